"""What was found, on stdout: tables for people, or one JSON document."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from rich.console import Console

from rope_patch.cli.common import is_first


class Output(Console):
    """stdout, in the width and the colours that it has; a reader that goes away is an error like others."""

    def on_broken_pipe(self) -> NoReturn:
        """Leave it to whoever minds the process: rich calls this where it handles a BrokenPipeError."""
        raise


def show_outcome(outcome: Any, show: Callable[[Console], object], names: Sequence[str] = ("picture",)) -> None:
    """Print what was found and where the files are, once, however many processes measured.

    Args:
        outcome: with the path of its `results`.
        show: prints what was found.
        names: of its other paths; one that is None was not written.
    """
    if not is_first():
        return
    show(Output())
    print_paths({"rows": outcome.results, **{name: getattr(outcome, name) for name in names}})


def print_paths(paths: dict[str, Any]) -> None:
    """Print where files are, one below the other, without those that are None."""
    width = max(map(len, paths)) + 2
    for name, path in paths.items():
        if path is not None:
            print(f"{name:<{width}}{path}")


def print_json(found: Any) -> None:
    """Print what was found as JSON, once, however many processes measured."""
    if is_first():
        print(json.dumps(found, indent=2))


def print_rows(rows: Sequence[Any]) -> None:
    """Print rows as a list in JSON."""
    print_json([json.loads(row.to_json()) for row in rows])
