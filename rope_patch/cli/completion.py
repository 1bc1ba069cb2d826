"""`rope-patch completion`: a script by which a shell completes commands, options and their values."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from rope_patch.cli.parser import add_command

SHELLS = ("bash", "zsh", "tcsh")


def add(commands: Any) -> None:
    """Register the command."""
    command = add_command(
        commands,
        "completion",
        summary="a script by which bash, zsh or tcsh completes commands, options, schemes and files",
        description="""\
Print the script by which a shell completes commands and options, names of schemes, protocols, pictures and recipes, and
files. To install it:

  bash   rope-patch completion bash > ~/.local/share/bash-completion/completions/rope-patch
  zsh    rope-patch completion zsh > DIR/_rope-patch, with DIR in $fpath before compinit
  tcsh   rope-patch completion tcsh > ~/.rope-patch.csh, and in ~/.tcshrc: source ~/.rope-patch.csh

and open a new shell. For a while, in bash: eval "$(rope-patch completion bash)". Print it again after an update.
""",
        examples=("rope-patch completion bash",),
    )
    command.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or tcsh")
    command.set_defaults(run=_complete)


def _complete(arguments: argparse.Namespace) -> None:
    import shtab

    from rope_patch.cli import make_parser

    parser = make_parser()
    names, places = known_names(), known_places()
    for command in all_parsers(parser):
        for action in command._actions:
            if action.dest in names and action.choices is None:
                action.choices = names[action.dest]
            elif place := places.get(f"{command.prog} {action.dest}") or places.get(action.dest):
                action.complete = place  # type: ignore[attr-defined]
    print(shtab.complete(parser, arguments.shell))


def known_names() -> dict[str, Iterable[str]]:
    """The values of options and arguments by their destination, where they are names. A scheme's fields follow it."""
    from rope_patch.cli.cookbook import names as recipes
    from rope_patch.cli.plot import PICTURES
    from rope_patch.evaluation.loading import DTYPES
    from rope_patch.evaluation.protocols import ProtocolName
    from rope_patch.evaluation.retrieval.experiment import TASKS
    from rope_patch.finetuning.adapters import Method
    from rope_patch.finetuning.description import POSE, PRECISIONS
    from rope_patch.finetuning.rows import LAYOUTS
    from rope_patch.schemes import list_schemes

    schemes = list_schemes()
    return {
        "scheme": schemes,
        "schemes": schemes,
        "only": schemes,
        "picture": PICTURES,
        "name": recipes(),
        "protocol": get_args(ProtocolName),
        "task": TASKS,
        "regime": ("training-free", "fine-tune"),
        "dtype": DTYPES,
        "method": get_args(Method),
        "precision": PRECISIONS,
        "layout": (*LAYOUTS, POSE),
    }


def known_places() -> dict[str, Any]:
    """Likewise, where they are files or folders; one command's own under its name."""
    from shtab import DIRECTORY, FILE, glob

    description = glob("*.yaml", "*.yml")
    return {
        "model": DIRECTORY,
        "checkpoint": DIRECTORY,
        "output": DIRECTORY,
        "rope-patch plot output": FILE,
        "to": DIRECTORY,
        "text": FILE,
        "eval_text": FILE,
        "dataset": FILE,
        "config": description,
        "description": description,
    }


def all_parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Every command, and the commands of commands, without the parsers that only hold others."""
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not inner:
        yield parser
    for action in inner:
        for command in action.choices.values():
            yield from all_parsers(command)
