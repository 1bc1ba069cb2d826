"""Run the measurements of a checkpoint that a plan lists, one after the other.

    rope-patch measure recipes/configs/real/qwen2.5-coder-1.5b.yaml --dry-run
    rope-patch measure recipes/configs/real/qwen2.5-coder-1.5b.yaml --only repeat-code --device cuda
    python recipes/measure.py recipes/configs/real/qwen2.5-coder-1.5b.yaml --only last-code last-prose

A plan is a YAML file. Under `runs` each run has a name, a `command` (perplexity, passkey, sweep ...) and the options of
that command. Options beside `runs` hold for every run whose command has them. Each run writes into a folder with its
name below `output`, and resumes there: run the same command again after a stop. At the end a sentence sums up every
run.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rope_patch.cli import available, load
from rope_patch.cli.options import (
    File,
    Names,
    OptionalFolder,
    OptionalName,
    Positional,
    flags_of,
    in_tokens,
    is_main,
    parse,
    read_yaml,
    run,
    say,
    words_of,
)
from rope_patch.errors import EvaluationError, did_you_mean


@dataclass(kw_only=True)
class Options:
    plan: Positional[File]  # YAML file that lists the runs
    only: Names = ()  # names of the runs to make (default: all, in the order of the plan)
    model: OptionalFolder = None  # checkpoint, instead of the plan's
    device: OptionalName = None  # device to run on, instead of the plan's
    output: OptionalFolder = None  # folder for a folder of each run, instead of the plan's
    dry_run: bool = False  # print the command of each run and measure nothing

    resumes: ClassVar[bool] = True


def main(options: Options) -> None:
    """Check the options of every run, then make the runs."""
    path = Path(options.plan)
    commands = commands_of(path, read_yaml(path), {name: getattr(options, name) for name in OVERRULED})
    if unknown := [name for name in options.only if name not in commands]:
        raise EvaluationError(f"{path} has no run {unknown[0]!r}; {did_you_mean(unknown[0], commands)}")
    chosen = {name: commands[name] for name in options.only or commands}
    # what is mistyped is found before hours have passed
    parsed = {name: in_tokens(parse(load(command).Options, words)) for name, (command, *words) in chosen.items()}
    if options.dry_run:
        for name, words in chosen.items():
            print(f"{shlex.join(['rope-patch', *words])}  # {name}")
        return
    found = {}
    for number, (name, words) in enumerate(chosen.items(), start=1):
        say(f"run {number} of {len(chosen)}, {name}: rope-patch {shlex.join(words)}")
        found[name] = load(words[0]).main(parsed[name])
    sentences = [f"- {name}: {verdict.sentence}" for name, verdict in found.items() if verdict is not None]
    if is_main() and len(sentences) > 1:
        print("\n".join(["", "In short", *sentences]))


OVERRULED = ("model", "device", "output")
"""Options with which the command line of `measure` overrules the plan."""


def commands_of(path: Path, plan: dict[str, Any], overruled: dict[str, str | None]) -> dict[str, list[str]]:
    """The words of each run's command line, after `rope-patch`, by the name of the run.

    Args:
        plan: content of the file at `path`.
        overruled: options by name that replace the plan's; None keeps the plan's.

    Raises:
        EvaluationError: the plan lists no runs, a run has no command or an unknown one, or no command of the plan has
            one of its options.
    """
    runs = plan.pop("runs", None)
    if not isinstance(runs, dict) or not all(isinstance(one, dict) for one in runs.values()):
        raise EvaluationError(f"{path}: `runs` must give each run by its name, with its command and options")
    shared = plan | {name: value for name, value in overruled.items() if value is not None}
    commands, used = {}, {"output"}
    for name, own in runs.items():
        where, command = f"{path}: run {name}", own.pop("command", None)
        if command not in available() or command in ("measure", "doctor"):
            raise EvaluationError(
                f"{where}: there is no command {command!r}; {did_you_mean(str(command), available())}"
            )
        flags = flags_of(load(command).Options)
        of_plan = {option: value for option, value in shared.items() if option in flags}
        used |= of_plan.keys()
        if int(own.get("context_parallel", 1)) > 1:
            raise EvaluationError(
                f"{where}: context_parallel starts processes; run its command by itself, see --dry-run"
            )
        settings = of_plan | own | {"output": f"{shared.get('output', 'runs')}/{name}"}
        words = words_of(Path(where), settings, flags)
        commands[str(name)] = [command, *(word for of_option in words.values() for word in of_option)]
    if left := plan.keys() - used:
        raise EvaluationError(f"{path}: no command of its runs has the option {min(left)!r}")
    return commands


if __name__ == "__main__":
    run(Options, main)
