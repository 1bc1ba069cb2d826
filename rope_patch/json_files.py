"""Read JSON that earlier runs wrote, and refuse in one line a file that no run can have written.

A run writes each key once, numbers that fit into 64 bits, and text that can be encoded. Anything else comes from a
damaged file, and would cause an error later.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin

from rope_patch.errors import EvaluationError

T = TypeVar("T")

_DEEPEST = 32  # levels of nested brackets; a scheme has fewer
_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}


def read_object(text: str) -> dict[str, Any]:
    """Parse the object of a JSON `text`.

    Raises:
        ValueError: the text is not JSON, is not an object, is nested too deep, or has a key twice, a number beyond 64
            bits, or half a character.
    """
    try:
        content = json.loads(
            text, object_pairs_hook=_once, parse_int=_whole, parse_float=_finite, parse_constant=_finite
        )
    except RecursionError:
        raise ValueError("its brackets are nested too deep") from None
    if not isinstance(content, dict):
        raise ValueError("it must be an object in {}")
    pending: list[tuple[Any, int]] = [(content, 1)]
    while pending:
        value, depth = pending.pop()
        if depth > _DEEPEST:
            raise ValueError("its brackets are nested too deep")
        if isinstance(value, (dict, list)):
            inner = [*value, *value.values()] if isinstance(value, dict) else value
            pending += [(each, depth + 1) for each in inner]
        elif isinstance(value, str) and not is_text(value):
            raise ValueError(f"{value!r:.80} contains half a character, a lone surrogate")
    return content


def check_types(fields: Mapping[str, Any], allowed: Mapping[str, Any]) -> None:
    """Check the values of `fields` against the annotation that `allowed` has for each name, such as `int | None`.

    Raises:
        TypeError: a value has another type. A whole number counts as a number; true and false do not.
    """
    for name, hint in allowed.items():
        if name in fields and not _fits(fields[name], hint):
            raise TypeError(f"{name}={fields[name]!r:.80} must be {_named(hint)}")


def read_fields(text: str, allowed: Mapping[str, Any]) -> dict[str, Any]:
    """Parse the object of a JSON `text` that has all `allowed` fields, with their types; it may have other fields.

    Raises:
        ValueError, TypeError: see `read_object` and `check_types`, or a field is missing.
    """
    fields = read_object(text)
    if missing := allowed.keys() - fields.keys():
        raise TypeError(f"it has no {min(missing)!r}")
    check_types(fields, allowed)
    return fields


def read_settings(path: Path) -> dict[str, Any]:
    """Read the object in a settings file of a run.

    Raises:
        EvaluationError: the file is damaged.
        OSError: the file cannot be read.
    """
    try:
        return read_object(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EvaluationError(f"{path} is damaged ({error}); remove it, or choose another output") from error


def read_rows(path: str | Path, content: bytes, row_of: Callable[[str], T]) -> tuple[list[T], int]:
    """Read the rows of a results file, one from each line, and return the size in bytes of its whole lines.

    Args:
        content: content of the file at `path`; a truncated last line is left out.
        row_of: a function from one line to its row; it raises ValueError, TypeError or KeyError if the line is no row.

    Raises:
        EvaluationError: a line is not a row.
    """
    *lines, cut = content.split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(row_of(line.decode()))
        except (ValueError, TypeError, KeyError) as error:
            raise EvaluationError(
                f"{path}, line {number}, is not a result row ({error}); remove the line, or move the file or choose "
                "another output"
            ) from error
    return rows, len(content) - len(cut)


def is_text(word: str) -> bool:
    """Whether a text can be encoded: a lone surrogate, which stands for a byte that is not UTF-8, cannot."""
    return not any("\ud800" <= letter <= "\udfff" for letter in word)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise ValueError(f"the key {name!r:.80} is there twice")
        content[name] = value
    return content


def _whole(digits: str) -> int:
    if len(digits) > 20 or abs(int(digits)) >= 2**63:
        raise ValueError(f"the number {digits:.30} is too large")
    return int(digits)


def _finite(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"{digits:.30} is not a finite number")
    return value


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in inner)
    if origin is list:
        return isinstance(value, list) and all(_fits(each, inner[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(each, inner[1]) for each in value.values())
    if hint in (int, float) and isinstance(value, bool):
        return False
    return hint is Any or isinstance(value, (int, float) if hint is float else hint)


def _named(hint: Any) -> str:
    """Name an annotation in words, as in "a list (a number each)"."""
    origin, inner = get_origin(hint), [each for each in get_args(hint) if each is not type(None)]
    if origin in (Union, types.UnionType):
        return " or ".join(map(_named, inner))
    within = "" if origin is None or inner[-1] is Any else f" ({_named(inner[-1])} each)"
    return f"{_NAMES.get(origin or hint, 'something else')}{within}"
