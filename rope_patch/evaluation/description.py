"""Descriptions of what to run: frozen dataclasses whose fields are the keys of a YAML file."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import yaml

from rope_patch.errors import EvaluationError, did_you_mean

Description = TypeVar("Description")


_UNIONS = (types.UnionType, typing.Union)
_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", types.NoneType: "nothing"}


def read_yaml(
    cls: type[Description], path: str | Path, changed: Mapping[str, Any] = MappingProxyType({})
) -> Description:
    """The description that a YAML file holds.

    Args:
        cls: its dataclass.
        path: of the file.
        changed: settings that overrule those of the file.

    Raises:
        EvaluationError: the file is no YAML mapping, or a key or a value is wrong or missing.
        OSError: it cannot be read.
    """
    try:
        words = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise EvaluationError(f"{path} is not YAML: {error}") from error
    data = parse_yaml(words, str(path))
    if not isinstance(data, dict):
        raise EvaluationError(f"{path} holds no mapping of settings to values")
    return describe(cls, {**data, **changed}, str(path))


def parse_yaml(words: str, source: str) -> Any:
    """What a text in YAML says.

    Args:
        words: the text.
        source: where it comes from, for messages.

    Raises:
        EvaluationError: it is no YAML, or has a value in it that is none, such as the date 2001-99-99.
    """
    try:
        return yaml.safe_load(words)
    except Exception as error:  # beside YAMLError, whatever the makers of numbers, dates and nested lists raise
        raise EvaluationError(f"{source} is not YAML: {' '.join(str(error).split())}") from error


def describe(cls: type[Description], settings: Mapping[str, Any], source: str) -> Description:
    """The description that settings by name are.

    Args:
        cls: its dataclass.
        settings: the fields.
        source: where they come from, for messages.

    Raises:
        EvaluationError: a key or a value is wrong or missing.
    """
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    known = [field.name for field in fields]
    for key in settings:
        if key not in known:
            raise EvaluationError(f"{source} has an unknown key {key!r}; {did_you_mean(str(key), known)}")
    for field in fields:
        if field.default is dataclasses.MISSING and field.name not in settings:
            raise EvaluationError(f"{source} says no {field.name!r}")
    return cls(**settings)


def check_types(description: Any) -> None:
    """To be called by `__post_init__`: lists, as YAML and argparse spell them, become tuples, and types are checked.

    A number such as 2e-5, which YAML takes for a text for want of a point, is read as the number that it is.

    Raises:
        EvaluationError: a field is of the wrong type.
    """
    hints = typing.get_type_hints(type(description))
    for name in (field.name for field in dataclasses.fields(description)):
        hint = hints[name]
        value = getattr(description, name)
        if isinstance(value, list):
            value = tuple(value)
        elif isinstance(value, str) and float in (hint, *typing.get_args(hint)):
            value = _number(value)
        object.__setattr__(description, name, value)
        if not _fits(value, hint):
            raise EvaluationError(f"{name}={value!r} is not allowed; {name} must be {_spelled(hint)}")


def check_at_least(description: Any, minimum: int, *names: str) -> None:
    """Check fields that hold a number or nothing.

    Args:
        description: a dataclass.
        minimum: what is allowed at the least.
        *names: of the fields.

    Raises:
        EvaluationError: a number is below `minimum`.
    """
    for name in names:
        value = getattr(description, name)
        if value is not None and value < minimum:
            raise EvaluationError(f"{name}={value} is not allowed; {name} must be at least {minimum}")


def check_lengths(lengths: Sequence[int]) -> None:
    """Check context lengths.

    Raises:
        EvaluationError: they are missing, not whole numbers of at least 1, or do not ascend.
    """
    if not lengths:
        raise EvaluationError("no lengths were given; give at least one, in tokens")
    if not all(is_count(length) for length in lengths):
        shown = ", ".join(map(str, lengths))
        raise EvaluationError(f"lengths {shown}: every length must be a whole number of at least 1 token")
    check_ascending("lengths", [str(length) for length in lengths], lengths)


def check_ascending(name: str, shown: Sequence[str], values: Sequence[float]) -> None:
    """Check that numbers ascend.

    Args:
        name: of the numbers, for messages.
        shown: how each is spelled there.
        values: the numbers.

    Raises:
        EvaluationError: one is there twice, or a lower one follows a higher one.
    """
    for (one, next_one), (shorter, longer) in zip(pairwise(shown), pairwise(values), strict=True):
        if shorter == longer:
            raise EvaluationError(f"{name} {', '.join(shown)}: {one} is there twice")
        if shorter > longer:
            raise EvaluationError(f"{name} {', '.join(shown)}: they must ascend, but {next_one} follows {one}")


def is_count(value: object) -> bool:
    """Whether it is a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _number(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word


def _fits(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) in _UNIONS:
        return any(_fits(value, option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(item, typing.get_args(hint)[0]) for item in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _spelled(hint: Any) -> str:
    if typing.get_origin(hint) in _UNIONS:
        return " or ".join(_spelled(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"a list, each {_spelled(typing.get_args(hint)[0])}"
    return _NAMES[hint]
