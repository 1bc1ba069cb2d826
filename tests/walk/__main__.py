"""Measures what a call of attention passes through in the package, and what the package has for it.

    python -m tests.walk [--root CHECKOUT ...] [--places]

With several checkouts, each has a column. The first figures are of the walk of one call of a tiny Llama under ReRoPE,
from its hook to its output (`stays.py`); they are counted while the model runs. The others are read off the source
(`source.py`), of `attention/` and `mounting/` where nothing else is said. `--places` lists what was counted.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tests import checkouts
from tests.walk.source import FIGURES, Source, lines

Figures = dict[str, list[Any] | int]
"""A figure is a number, or the list of what it counts."""


def figures_of(root: Path) -> Figures:
    """All figures of a checkout."""
    source = Source(root)
    walks = json.loads(checkouts.run("tests.walk.stays", root))
    return {
        **{f"{name}: {figure}": value for name, walk in walks.items() for figure, value in walk.items()},
        **{name: [*map(str, find(source))] for name, find in FIGURES.items()},
        **{f"lines of {folder}": number for folder, number in lines(source).items()},
    }


def table(columns: dict[str, Figures]) -> str:
    """A table with a row for each figure and a column for each checkout."""
    names = list(dict.fromkeys(name for figures in columns.values() for name in figures))
    rows = [("", *columns)]
    for name in names:
        values = (figures.get(name, 0) for figures in columns.values())
        rows.append((name, *(str(value if isinstance(value, int) else len(value)) for value in values)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    )


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.walk", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--root", type=Path, nargs="+", default=[checkouts.ROOT], help="checkouts to measure")
    parser.add_argument("--places", action="store_true", help="list what was counted")
    options = parser.parse_args()
    columns = {root.resolve().name: figures_of(root) for root in options.root}
    print(table(columns))
    for root, figures in columns.items() if options.places else ():
        for name, value in figures.items():
            if isinstance(value, list):
                print("", f"{root}, {name}:", *(f"    {place}" for place in value), sep="\n")


if __name__ == "__main__":
    main()
