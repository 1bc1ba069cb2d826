"""Rules for the values of a scheme's fields. A rule is a part of the annotation: `window: Annotated[int, AtLeast(1)]`.

The check of every new scheme, `describe`, `rope-patch list`, the pages of the documentation and the tests read the
rules there. A field without a rule is not checked, unless it is a `bool` or a `Literal`.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from rope_patch.errors import InvalidField, did_you_mean

LARGEST = 1e18
"""A number is 0, or its absolute value lies between 1 / LARGEST and LARGEST: float32 and torch's integers hold such
numbers and the results computed from them.
"""

_WORDS = {int: "an integer", float: "a number"}


class Rule:
    """A rule for a value, beside its type. `scheme` is the scheme that holds the value, for bounds that are other
    fields.
    """

    def allowed(self, noun: str, scheme: Any = None) -> str:
        """Put the rule in words, such as `an integer of at least 1`; with the values of other fields of a `scheme`.

        Args:
            noun: `an integer` or `a number`.
        """
        raise NotImplementedError

    def holds(self, value: Any, scheme: Any) -> bool:
        """Whether a `value` of the right type is allowed."""
        raise NotImplementedError

    def refusal(self, field: str, value: Any, noun: str, scheme: Any) -> str:
        """The error message for a value, without the name of the scheme, which goes in front."""
        return f"{field}={value!r} is not allowed; {field} must be {self.allowed(noun, scheme)}{_meant(value, noun)}"


def _meant(value: Any, noun: str) -> str:
    """Advise what to write instead of a value of another type: `128.0` for an integer, `"4"`, `"4x"` or `"L/2"`."""
    if isinstance(value, str) and re.fullmatch(r"L(/\d+)?", value) and noun:
        return "; describe(model) shows L: write the number"
    if isinstance(value, str) and (number := re.fullmatch(r"(\d+(?:\.\d+)?)x?", value)) and noun:
        return f"; write {number[1]}"
    return f"; write {value:.0f}" if isinstance(value, float) and value.is_integer() and noun == _WORDS[int] else ""


@dataclass(frozen=True)
class Bound(Rule):
    """A limit on one side: a number, or the name of another field, which may be open."""

    bound: float | str
    _holds: ClassVar[Callable[[Any, Any], bool]]
    _words: ClassVar[str]

    def of(self, scheme: Any) -> float | None:
        """The limit as a number, given the other fields of a scheme; None if the field that holds it is open."""
        return getattr(scheme, self.bound) if isinstance(self.bound, str) else self.bound

    def allowed(self, noun: str, scheme: Any = None) -> str:
        name = f"{self.bound}=" if isinstance(self.bound, str) else ""
        limit = self.bound if name and scheme is None else f"{name}{self.of(scheme):g}"
        return self._words.format(noun=noun, limit=limit)

    def holds(self, value: Any, scheme: Any) -> bool:
        return (limit := self.of(scheme)) is None or type(self)._holds(value, limit)


class AtLeast(Bound):
    """A number that is at least its bound: `AtLeast(1)`, `AtLeast("beta_slow")`."""

    _holds, _words = operator.ge, "{noun} of at least {limit}"


class AtMost(Bound):
    """A number that is at most its bound; it stands beside the rule for the lower bound."""

    _holds, _words = operator.le, "at most {limit}"


class Above(Bound):
    """A number greater than its bound: `Above(0)`."""

    _holds, _words = operator.gt, "{noun} above {limit}"


@dataclass(frozen=True)
class Between(Rule):
    """A number strictly between two others, and not `excluded`."""

    low: float
    high: float
    excluded: float

    def allowed(self, noun: str, scheme: Any = None) -> str:
        return f"{noun} above {self.low:g} and below {self.high:g}, and not {self.excluded:g}"

    def holds(self, value: Any, scheme: Any) -> bool:
        return self.low < value < self.high and value != self.excluded


@dataclass(frozen=True)
class EvenFrom(Rule):
    """An even integer within bounds, both included."""

    low: int
    high: int

    def allowed(self, noun: str, scheme: Any = None) -> str:
        return f"an even integer from {self.low} to {self.high}"

    def holds(self, value: Any, scheme: Any) -> bool:
        return value in range(self.low, self.high + 1, 2)


@dataclass(frozen=True)
class TrueOrFalse(Rule):
    """The rule of every `bool`, and of `bool | None` if `optional`."""

    optional: bool

    def allowed(self, noun: str, scheme: Any = None) -> str:
        return "True, False or None" if self.optional else "True or False"

    def holds(self, value: Any, scheme: Any) -> bool:
        return True


@dataclass(frozen=True)
class OneOf(Rule):
    """One of several words: the rule of a `Literal`."""

    choices: tuple[str, ...]

    def allowed(self, noun: str, scheme: Any = None) -> str:
        return f"one of {', '.join(map(repr, self.choices))}"

    def holds(self, value: Any, scheme: Any) -> bool:
        return value in self.choices

    def refusal(self, field: str, value: Any, noun: str, scheme: Any) -> str:
        return f"{field}={value!r}: {did_you_mean(str(value), self.choices)}"


@dataclass(frozen=True)
class SomeOf(Rule):
    """A list of at least one of several words, each at most once."""

    choices: tuple[str, ...]

    def allowed(self, noun: str, scheme: Any = None) -> str:
        return f"some of {list(self.choices)}"

    def holds(self, value: Any, scheme: Any) -> bool:
        items = sorted(value, key=str)
        return bool(items) and items == [choice for choice in sorted(self.choices) if choice in items]


@dataclass(frozen=True)
class NumbersAboveZero(Rule):
    """A list with one positive number for each `pair`, `head` or the like."""

    each: str

    def allowed(self, noun: str, scheme: Any = None) -> str:
        return f"one number above 0 per {self.each}"

    def holds(self, value: Any, scheme: Any) -> bool:
        return bool(value) and all(_is_of(item, float) and item > 0 and is_computable(item) for item in value)


class WholeNumbers(NumbersAboveZero):
    """A list with one positive integer for each `pair`, `head` or the like."""

    def allowed(self, noun: str, scheme: Any = None) -> str:
        return f"one integer of at least 1 per {self.each}"

    def holds(self, value: Any, scheme: Any) -> bool:
        return super().holds(value, scheme) and all(isinstance(item, int) for item in value)


@dataclass(frozen=True)
class Permutation(Rule):
    """A permutation of the indices of all `head`s or the like, from 0 on."""

    each: str

    def allowed(self, noun: str, scheme: Any = None) -> str:
        return f"the number of each {self.each} once, from 0 on"

    def holds(self, value: Any, scheme: Any) -> bool:
        return bool(value) and all(_is_of(item, int) for item in value) and sorted(value) == list(range(len(value)))


@dataclass(frozen=True)
class FieldRule:
    """The type of a field, and all rules that its value must obey.

    Attributes:
        name: name of the field.
        kind: int, float, bool, str or tuple.
        optional: whether None is allowed too.
        rules: one or more; all of them must hold.
    """

    name: str
    kind: Any
    optional: bool
    rules: tuple[Rule, ...]

    def allowed(self) -> str:
        """Put the rules in words; bounds that are other fields appear by their names."""
        return ", ".join(rule.allowed(self._noun) for rule in self.rules)

    def broken(self, value: Any, scheme: Any) -> Rule | None:
        """The first rule that a value breaks, given the other fields of a scheme; None if it is allowed."""
        if value is None and self.optional:
            return None
        is_right = _is_of(value, self.kind) and is_computable(value)
        return next((rule for rule in self.rules if not (is_right and rule.holds(value, scheme))), None)

    def check(self, scheme: Any) -> None:
        """Check the field of a new scheme; a list becomes a tuple, and its numbers floats.

        Raises:
            InvalidField: names the field, its value and what is allowed.
        """
        value = plain_number(getattr(scheme, self.name))
        object.__setattr__(scheme, self.name, value)
        if (rule := self.broken(value, scheme)) is not None:
            has_size = self.kind not in _WORDS or is_computable(value)
            size = "" if has_size else f", and 0 or of a size from {1 / LARGEST:g} to {LARGEST:g}"
            raise InvalidField(f"{scheme.name}: {rule.refusal(self.name, value, self._noun, scheme)}{size}")
        if isinstance(value, (list, tuple)):
            numbers = any(type(rule) is NumbersAboveZero for rule in self.rules)
            object.__setattr__(scheme, self.name, tuple(map(float, value)) if numbers else tuple(value))

    @property
    def _noun(self) -> str:
        return _WORDS.get(self.kind, "")


@functools.cache
def rules_of(cls: type) -> dict[str, FieldRule]:
    """The rules of a scheme class by field; fields that bound others come first.

    Raises:
        NameError: the annotation of a rule needs a name that its module does not have.
    """
    hints = _annotations(cls)
    read = (_read(field.name, hints[field.name]) for field in dataclasses.fields(cls))
    rules = [rule for rule in read if rule is not None]
    rules.sort(key=lambda rule: any(isinstance(getattr(each, "bound", None), str) for each in rule.rules))
    return {rule.name: rule for rule in rules}


def _annotations(cls: type) -> dict[str, Any]:
    try:
        return get_type_hints(cls, include_extras=True)
    except (NameError, AttributeError):  # a name for type checkers alone, or of a function
        hints = {field.name: field.type for field in dataclasses.fields(cls)}
        if any(isinstance(hint, str) and "Annotated[" in hint for hint in hints.values()):
            raise
        return hints


def _read(name: str, hint: Any) -> FieldRule | None:
    hint, rules = _unwrapped(hint)
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kinds = [option for option in options if option is not types.NoneType]
    if len(kinds) != 1:
        return None
    optional = len(options) > 1
    kind, more = _unwrapped(kinds[0])
    rules += more
    if kind is bool:
        rules += (TrueOrFalse(optional),)
    if get_origin(kind) is Literal:
        kind, rules = str, (*rules, OneOf(get_args(kind)))
    return FieldRule(name, get_origin(kind) or kind, optional, rules) if rules else None


def _unwrapped(hint: Any) -> tuple[Any, tuple[Rule, ...]]:
    if get_origin(hint) is not Annotated:
        return hint, ()
    inner, *extras = get_args(hint)
    return inner, tuple(extra for extra in extras if isinstance(extra, Rule))


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a value is of a type. A bool is no number, an integer is one, and a list may be given for a tuple."""
    if kind in _WORDS:
        return isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
    if kind is str:
        return True  # `OneOf` checks it
    return isinstance(value, (tuple, list) if kind is tuple else kind)


def plain_number(value: Any) -> Any:
    """Convert a numpy or torch scalar to a Python number; return any other value unchanged."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def is_computable(value: Any) -> bool:
    """Whether float32 and torch's integers hold a number, with room for the results computed from it."""
    return not isinstance(value, (int, float)) or value == 0 or 1 / LARGEST <= abs(value) <= LARGEST
