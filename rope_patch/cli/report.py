"""The report of a measurement: its rows, a picture, the verdict, and the command to run next."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_patch.cli import COMMANDS
from rope_patch.cli.options import Measured, in_tokens, parse, print_json, say

if TYPE_CHECKING:
    from rope_patch.evaluation.row import Row
    from rope_patch.evaluation.verdict import Verdict


def report(
    rows: Sequence[Row], options: Measured, file: Path, verdict: Verdict, what: str = "", **settings: Any
) -> Verdict:
    """Print rows as one JSON document or as a table, draw a picture if matplotlib is installed, and return the verdict.

    Args:
        file: file of the rows; the picture is written beside it.
        what: the noun whose share a task gives, for the title of the table.
        settings: settings of the picture, such as `title`.
    """
    from rope_patch.evaluation.tables import print_table

    if options.json:
        print_json([json.loads(row.to_json()) for row in rows])
    else:
        print_table(rows, what=what)
    draw(rows, file, **settings)
    conclude(verdict, options)
    return verdict


def draw(rows: Sequence[Row], file: Path, **settings: Any) -> None:
    """Draw a picture beside the file of the rows, if matplotlib is installed."""
    from rope_patch.errors import MissingPackage
    from rope_patch.evaluation import charts

    picture = file.with_suffix(".png")
    try:
        charts.save(rows, picture, **settings)
    except MissingPackage as missing:
        say(str(missing))
        say(f"wrote {file}")
    else:
        say(f"wrote {file} and {picture}")


def conclude(verdict: Verdict, options: Measured) -> None:
    """Print the verdict, and the next command on the same model and text; on stderr if stdout has JSON."""
    for sentence in (verdict.sentence, f"Next: {next_command(verdict.command, options)}"):
        say(sentence) if options.json else print(sentence)


def next_command(command: str, options: Measured) -> str:
    """The command of a verdict. If this run has just executed it, another command on the same schemes and lengths."""
    _, lengths, rest = command.partition("--lengths")
    others = [f"{other} {lengths}{rest}" for other in ("perplexity --protocol repeat", "passkey --task spans")]
    commands = [spelled(each, options) for each in (command, *(others if lengths else ()))]
    return next((each for each in commands if not _was_run(each, options)), commands[0])


def _was_run(command: str, options: Measured) -> bool:
    """Whether the run with these options has every row that a command would measure."""
    _, name, *words = shlex.split(command)
    if COMMANDS[name].name != Path(str(sys.modules[type(options).__module__].__file__)).name:
        return False
    asked, ran = vars(in_tokens(parse(type(options), words))), vars(options)
    same = {"output": True, "json": True, "protocol": {asked.get("protocol"), ran.get("protocol")} <= {"auto", "last"}}
    return all(
        same.get(name, False) or (set(value) <= set(ran[name]) if isinstance(value, tuple) else value == ran[name])
        for name, value in asked.items()
    )


def spelled(command: str, options: Measured) -> str:
    """Complete a `rope-patch` command with the options for model, text and machine."""
    names = ("model", "text", "dataset", "split", "column", "dtype", "device", "attention", "seed")
    typed = {name: str(value) for name in names if (value := getattr(options, name)) != getattr(type(options), name)}
    words = [word for name, value in typed.items() if f"--{name} " not in command for word in (f"--{name}", value)]
    return shlex.join(["rope-patch", *command.split(), *words])
