"""Schemes with a target length: the open fields of `yarn:target=8192` follow from the checkpoint."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rope_patch.errors import InvalidField, MissingField
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.compose import Combined
from rope_patch.schemes.slots import Checkpoint, Target

_MULTIPLE = re.compile(r"\d{1,6}(\.\d{1,6})?x")

_FEW = 10  # a target of fewer tokens is meant as a multiple,
_MANY = 16  # if the model reads so many times more: a measurement may be that short

LONGEST = 10**15  # the longest target in tokens

_VAST = Checkpoint(LONGEST, num_heads=1, max_length=LONGEST)


@dataclass(frozen=True)
class Reaching(Combined):
    """A scheme whose open fields follow from a target length and a checkpoint.

    It declares the properties of the scheme that it becomes. It computes nothing until it is resolved.

    Args:
        placeholder: the scheme that it becomes, with the values for a checkpoint trained at every length.
        target: the length in tokens, or in multiples of the length that the checkpoint reads today, such as `"4x"`;
            `"auto"` if no field depends on it.
        given: names of the fields that the user set.
    """

    placeholder: Scheme
    target: int | str
    given: tuple[str, ...]

    def __post_init__(self) -> None:
        own = {name: getattr(self.placeholder, name) for name in ("name", "equation", "source")}
        vars(self).update(own, inner=(self.placeholder,))

    def reach(self, checkpoint: Checkpoint) -> Scheme:
        given = {name: getattr(self.placeholder, name) for name in self.given}
        if isinstance(self.target, int) and is_multiple(self.target, checkpoint.max_length):
            raise InvalidField(
                f"{self.placeholder.name}: target={self.target} is a length in tokens{_times(self.target)}"
            )
        if self.target != "auto":
            tokens = _tokens(self.target, checkpoint.max_length)
            filled = self.placeholder.fields_for(Target(self.placeholder.name, tokens, checkpoint, given))
        elif (rule := _whatever_length(type(self.placeholder), given, checkpoint)) is not None:
            filled = rule
        else:
            raise InvalidField(
                f"{self.placeholder.name}: target='auto' is not allowed, as its fields follow from the length; target "
                f"must be a whole number of tokens from 1 to {LONGEST:g}, such as 8192, or a multiple of the training "
                "length, such as '4x'"
            )
        return type(self.placeholder)(**{**filled, **given})

    def resolve(self, checkpoint: Checkpoint) -> Scheme:
        return self.reach(checkpoint).resolve(checkpoint)

    def fields(self) -> dict[str, Any]:
        plain = self.placeholder.fields()
        return {"target": self.target, **{name: plain[name] for name in self.given}}


def is_multiple(tokens: int, trained: float = math.inf) -> bool:
    """Whether a length in tokens is so short, also beside the `trained` length, that a multiple of it is meant."""
    return 1 <= tokens < _FEW and tokens * _MANY <= trained


def takes_target(kind: type[Scheme]) -> bool:
    """Whether a target length determines fields of a scheme."""
    return kind.fields_for.__func__ is not Scheme.fields_for.__func__  # type: ignore[attr-defined]


def filled_for(kind: type[Scheme], target: Any) -> dict[str, Any]:
    """The fields of a scheme that a target fills, with placeholder values, so that the other fields can be checked.

    Raises:
        InvalidField: the target is not a length.
    """
    if target == "auto" or (isinstance(target, str) and _MULTIPLE.fullmatch(target) and float(target[:-1]) > 0):
        target = LONGEST
    if not isinstance(target, int) or isinstance(target, bool) or not 1 <= target <= LONGEST:
        raise InvalidField(
            f"{kind.name}: target={target!r} is not allowed; target must be a whole number of tokens from 1 to "
            f"{LONGEST:g}, a multiple of the training length such as 4x, or auto for commands that measure lengths and "
            f"fields that follow from the checkpoint{_instead(target)}"
        )
    return kind.fields_for(Target(kind.name, target, _VAST, {}))


def _instead(target: Any) -> str:
    """The line to write for a whole number in quotes or with a point, and for thousands (`8k`), which may mean 1,000 or
    1,024 tokens each.
    """
    number = re.fullmatch(r"0*([1-9]\d{0,11})(\.0+|k)?", str(target), re.IGNORECASE)
    if number is None:
        return ""
    tokens = int(number[1])
    if (number[2] or "").lower() == "k":
        return f"; if k is 1024, write target={tokens * 1024}"
    return _times(tokens) if is_multiple(tokens) else f"; write target={tokens}"


def _times(number: int) -> str:
    return f"; for {number} times the length that the model reads today, write target='{number}x'"


def _tokens(target: int | str, trained: int) -> int:
    """Convert a target to tokens; a multiple such as `4x` counts in the `trained` length."""
    return target if isinstance(target, int) else max(1, round(float(target.removesuffix("x")) * trained))


def _filled(kind: type[Scheme], times: int, given: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    return kind.fields_for(Target(kind.name, times * checkpoint.training_length, checkpoint, given))


def _whatever_length(kind: type[Scheme], given: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The fields that reach every length on a checkpoint; None if they depend on the length."""
    filled = _filled(kind, 2, given, checkpoint)
    return filled if filled == _filled(kind, 4, given, checkpoint) else None


def advise(error: MissingField, checkpoint: Checkpoint) -> MissingField:
    """Extend the error with values for the missing fields on a checkpoint, if there is a rule for them."""
    kind, given = error.scheme, error.given
    if isinstance(kind, type) and type(checkpoint.native) is kind and not given:
        error = MissingField(f"{error}; this checkpoint has a {kind.name} of its own, which needs no patch")
        error.scheme, error.given = kind, given
    if not (isinstance(kind, type) and takes_target(kind)):
        return error
    try:
        checkpoint = checkpoint.under(kind(**{**filled_for(kind, "auto"), **given}))
        trained = checkpoint.training_length
        rule, filled = _whatever_length(kind, given, checkpoint), _filled(kind, 4, given, checkpoint)
        kind(**{**filled, **given})
        filled = {name: value for name, value in filled.items() if name not in given}
    except (InvalidField, TypeError):  # no rule for all of them
        return error
    shares: dict[Any, str] = {trained: " (L)", trained / 2: " (half of L)"}
    open_fields = {name: f"{value:g}" if isinstance(value, float) else value for name, value in filled.items()}
    values = ", ".join(f"{name}={value}{shares.get(value, '')}" for name, value in open_fields.items())
    how = "target='auto' fills it in" if rule else f"reaches {4 * trained} tokens, as target={4 * trained} does"
    return MissingField(f"{error}; on this model {values}{': ' if rule else ' '}{how}")


def resolved(scheme: Scheme, checkpoint: Checkpoint) -> Scheme:
    """Fill in a scheme's defaults, relative to the length that it builds on, see `Checkpoint.under`.

    Raises:
        InvalidField: a field does not fit this checkpoint.
    """
    return scheme.resolve(checkpoint.under(scheme))


def reached(scheme: Scheme, checkpoints: Iterable[Checkpoint]) -> Scheme:
    """Fill in the fields that follow from the target, equal for all parts of a model.

    Raises:
        InvalidField: parts trained at different lengths need different fields, or see `Scheme.fields_for`.
    """
    of_parts: Sequence[Scheme] = [scheme.reach(checkpoint.under(scheme)) for checkpoint in checkpoints]
    for other in of_parts[1:]:
        if other != of_parts[0]:
            raise InvalidField(
                f"{scheme}: parts of this model need {of_parts[0]} and {other}, because they were trained at different "
                "lengths; set the fields instead of the target"
            )
    return of_parts[0] if of_parts else scheme
