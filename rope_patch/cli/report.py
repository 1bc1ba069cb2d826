"""How a measurement ends: its rows, a picture, the verdict, and the command to run next."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_patch.cli.options import Measured, print_json, say

if TYPE_CHECKING:
    from rope_patch.evaluation.row import Row
    from rope_patch.evaluation.verdict import Verdict


def report(
    rows: Sequence[Row], options: Measured, file: Path, verdict: Verdict, what: str = "", **settings: Any
) -> Verdict:
    """Rows as one JSON document or as a table, a picture if there is matplotlib, and the verdict, which is returned.

    Args:
        file: of the rows; the picture lies beside it.
        what: of which a task gives the share, in the title of the table.
        settings: of the picture, such as `title`.
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
    """A picture beside the file of the rows, if there is matplotlib."""
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
    """The verdict, and the next command on the same model and text; on stderr if stdout has JSON."""
    for sentence in (verdict.sentence, f"Next: {spelled(verdict.command, options)}"):
        say(sentence) if options.json else print(sentence)


def spelled(command: str, options: Measured) -> str:
    """A command of `rope-patch` with the options that name model and text."""
    names = ("model", "text", "dataset", "split", "column")
    same = {name: value for name in names if (value := getattr(options, name)) != getattr(Measured, name)}
    words = [word for name, value in same.items() if f"--{name} " not in command for word in (f"--{name}", value)]
    return shlex.join(["rope-patch", *command.split(), *words])
