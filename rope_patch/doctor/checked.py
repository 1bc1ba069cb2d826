"""Values of a config, each checked where it is read.

An error names the file, the field, its value and what is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from .errors import Unreadable

MOST_TOKENS = 2**40
"""The longest text that a config may name, in tokens."""


class Checked:
    """A reader of one file's values, with checks; `notes` has a sentence about each value that programs may read
    differently.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []

    def refuse(self, reason: str) -> NoReturn:
        """Stop with an error of one line."""
        raise Unreadable(f"{self.path}: {reason}")

    def object(self, name: str, value: Any) -> Mapping[str, Any]:
        """Check a value that must have named fields."""
        if not isinstance(value, dict):
            self.refuse(f"{name}={value!r:.80} must be an object with a rope_type")
        return value

    def flag(self, name: str, value: Any) -> bool:
        """Check a value that must be true or false."""
        if not isinstance(value, bool):
            self.refuse(f"{name}={value!r:.80} must be true or false")
        return value

    def number(self, name: str, value: Any, above: float = 0.0, most: float = 1e9, least: float | None = None) -> float:
        """Check a number against its limits: above one, at least another, and at most a third. A string that spells a
        number counts, with a note.
        """
        found = value
        if isinstance(value, str):
            try:
                found = float(value)
            except ValueError:
                found = None
            else:
                self.notes.append(f"{name}={value!r:.40} is a string; programs that need a number stop or misread it")
        number = isinstance(found, (int, float)) and not isinstance(found, bool)
        if not number or not (found > above if least is None else found >= least) or not found <= most:  # also NaN
            lower = f"above {above:g}" if least is None else f"of at least {least:g}"
            self.refuse(f"{name}={value!r:.80} must be a number {lower} and at most {most:g}")
        return float(found)

    def tokens(self, name: str, value: Any, least: int = 2) -> int:
        """Check a length in tokens."""
        found = int(self.number(name, value, 0, MOST_TOKENS))
        if found < least:
            self.refuse(f"{name}={value!r:.80} must be at least {least}, in tokens")
        return found

    def size(self, name: str, value: Any) -> int:
        """Check a count of dimensions or heads; if the config has one for each layer, return the largest."""
        if isinstance(value, list) and value and all(type(each) is int for each in value):
            value = max(value)
        return int(self.number(name, value, 0, 2**24))

    def numbers(self, name: str, value: Any) -> tuple[float, ...]:
        """Check a list of numbers above 0."""
        if not isinstance(value, list) or not value or any(isinstance(each, str) for each in value):
            self.refuse(f"{name}={value!r:.80} must be a list with one number for each pair")
        return tuple(self.number(f"{name}[{index}]", each, most=1e38) for index, each in enumerate(value))
