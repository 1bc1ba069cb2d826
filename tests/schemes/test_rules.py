"""Rules of fields: read from annotations of any form, checked at the edge, and in the words of the error."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Optional

import pytest
import torch

from rope_patch import InvalidField, Scheme, get_scheme, list_schemes, patch
from rope_patch.schemes import scheme_class
from rope_patch.schemes.rules import (
    LARGEST,
    Above,
    AtLeast,
    AtMost,
    Between,
    Bound,
    EvenFrom,
    FieldRule,
    NumbersAboveZero,
    OneOf,
    Permutation,
    SomeOf,
    WholeNumbers,
    rules_of,
)
from rope_patch.typing import NO_WEIGHTS
from tests.cases import CASES
from tests.runs import logits, tokens

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Spelled(Scheme):
    """The same rules in all forms that an annotation has."""

    name = "spelled"
    limit: ClassVar[int] = -1

    needed: Annotated[int, AtLeast(1)]
    outside: Annotated[int, AtLeast(2)] | None = None
    inside: Annotated[int | None, AtLeast(2)] = None
    older: Optional[Annotated[int, AtLeast(2)]] = None  # noqa: UP045
    word: Literal["one", "other"] | None = None
    high: Annotated[float, AtLeast("low")] = 2.0
    low: Annotated[float, Above(0), AtMost(8)] = 1.0
    free: int = -5


def test_rules_are_read_from_annotations():
    rules = rules_of(Spelled)
    assert rules.keys() == {"needed", "outside", "inside", "older", "word", "high", "low"}
    assert {name for name, rule in rules.items() if rule.optional} == {"outside", "inside", "older", "word"}
    assert list(rules).index("low") < list(rules).index("high")
    assert rules["high"].allowed() == "a number of at least low"
    assert rules["low"].allowed() == "a number above 0, at most 8"
    assert rules["word"].allowed() == "one of 'one', 'other'"
    assert Spelled(1, free="anything").free == "anything"
    assert rules_of(Spelled) is rules


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"needed": 0}, "spelled: needed=0 is not allowed; needed must be an integer of at least 1"),
        ({"needed": True}, "spelled: needed=True is not allowed; needed must be an integer of at least 1"),
        ({"needed": 2.0}, "spelled: needed=2.0 is not allowed; needed must be an integer of at least 1; write 2"),
        ({"needed": None}, "spelled: needed=None is not allowed; needed must be an integer of at least 1"),
        ({"outside": 1}, "spelled: outside=1 is not allowed; outside must be an integer of at least 2"),
        ({"inside": 1}, "spelled: inside=1 is not allowed; inside must be an integer of at least 2"),
        ({"older": "2"}, "spelled: older='2' is not allowed; older must be an integer of at least 2; write 2"),
        ({"high": 0.5}, "spelled: high=0.5 is not allowed; high must be a number of at least low=1"),
        ({"high": "x", "low": 0}, "spelled: low=0 is not allowed; low must be a number above 0"),
        ({"low": 9}, "spelled: low=9 is not allowed; low must be at most 8"),
        ({"word": "ones"}, "spelled: word='ones': did you mean 'one'? allowed: one, other"),
        (
            {"high": 1e300},
            "spelled: high=1e+300 is not allowed; high must be a number of at least low=1, and 0 or of a size from "
            "1e-18 to 1e+18",
        ),
    ],
)
def test_errors_name_the_field_its_value_and_what_is_allowed(fields, error):
    with pytest.raises(InvalidField) as caught:
        Spelled(**{"needed": 1, **fields})
    assert str(caught.value) == error


def test_annotations_need_not_be_text():
    fields = [("window", Annotated[int, AtLeast(1)]), ("free", float, -1.0)]
    made = dataclasses.make_dataclass("Made", fields, bases=(Scheme,), namespace={"name": "made"}, frozen=True)
    assert made(1).free == -1
    with pytest.raises(InvalidField, match="made: window=0 is not allowed; window must be an integer of at least 1"):
        made(0)


EDGES = [(name, field) for name in list_schemes() for field in rules_of(scheme_class(name))]


@pytest.mark.parametrize("name", list_schemes())
def test_every_field_has_a_rule(name):
    without = {field.name for field in dataclasses.fields(scheme_class(name))} - rules_of(scheme_class(name)).keys()
    assert not without, f"annotate {without} of {name} with a rule: Annotated[..., AtLeast(1)], see schemes/rules.py"


@pytest.mark.parametrize(("name", "field"), EDGES)
def test_what_is_beyond_a_rule_is_refused_and_what_is_within_is_not(name, field):
    usual = get_scheme(CASES[name])
    rule = rules_of(type(usual))[field]
    legal, illegal = edges(rule, usual)
    for value in legal:
        rule.check(with_field(usual, field, value))
    for value in illegal:
        with pytest.raises(InvalidField, match=rf"^{name}: {field}="):
            dataclasses.replace(usual, **{field: value})


def edges(rule, scheme):
    """Values at the edge of what a rule allows beside the other fields of a scheme, and values beyond."""
    pairs = [edges_of(each, rule.kind, scheme) for each in rule.rules]
    legal, illegal = ([value for pair in pairs for value in pair[side]] for side in (0, 1))
    if rule.kind in (int, float):
        illegal += [True, "1", (1,), float("nan"), float("inf"), 2 * LARGEST] + [0.5] * (rule.kind is int)
    legal = [value for value in legal if rule.broken(value, scheme) is None]
    return legal + [None] * rule.optional, illegal + [None] * (not rule.optional) + [object()]


def edges_of(rule, kind, scheme):
    """Values of a kind just inside of what one rule allows, and just outside."""
    step = 1 if kind is int else 1e-3
    if isinstance(rule, Bound):
        limit = rule.of(scheme)
        if isinstance(rule, AtMost):
            return ([], []) if limit is None else ([kind(limit)], [limit + step])
        limit = limit or 0
        if isinstance(rule, AtLeast):
            return [kind(limit), kind(limit) + step], [limit - step]
        return [limit + step], [limit, limit - 1]
    if isinstance(rule, Between):
        return [rule.low + 1e-3, rule.high - 1e-3, rule.excluded + 1e-3], [rule.low, rule.high, rule.excluded]
    if isinstance(rule, EvenFrom):
        return [rule.low, rule.high], [rule.low - 2, rule.low + 1, rule.high + 2]
    if isinstance(rule, OneOf):
        return list(rule.choices), ["", rule.choices[0] + "s", 0]
    if isinstance(rule, SomeOf):
        words = rule.choices
        return [(words[0],), words, words[::-1]], [(), (words[0], words[0]), (*words, "other"), words[0]]
    if isinstance(rule, Permutation):
        return [(0,), (1, 0)], [(), (1,), (0, 0), (0, True), (0.0,), ("0",), 0]
    if isinstance(rule, WholeNumbers):
        return [(1,), (2, 1)], [(), (0,), (1, -1), (1.5,), (1, True), ("1",), 1]
    if isinstance(rule, NumbersAboveZero):
        return [(1e-3,), (1, 2.0)], [(), (0,), (1.0, -1), (1.0, True), ("1",), 1.0]
    return [True, False], [0, 1, "true"]


def with_field(scheme, field, value):
    """The scheme with a field that is not checked."""
    changed = object.__new__(type(scheme))
    changed.__dict__.update({**vars(scheme), field: value})
    return changed


# --- schemes of others -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plain(Scheme):
    """As in a notebook: plain annotations, some of which only a type checker can read."""

    name = "plain_annotations"

    strength: float = 0.5
    window: int | None = None
    widths: Sequence[int] = (1, 2)

    def query_scale(self, positions, num_heads, weights=NO_WEIGHTS):
        return torch.full_like(positions, self.strength, dtype=torch.float32)[None]


def test_a_scheme_without_rules_works(llama):
    assert rules_of(Plain) == {}
    with patch(llama, Plain(strength=2)):
        assert logits(llama, tokens()).isfinite().all()


def test_a_rule_that_cannot_be_read_is_no_rule_that_holds():
    @dataclass(frozen=True)
    class Lost(Scheme):
        name = "lost"
        window: Annotated[int, NoSuchRule(1)] = 1  # noqa: F821

    with pytest.raises(NameError, match="NoSuchRule"):
        Lost()


def test_the_check_of_a_subclass_comes_after_the_rules():
    @dataclass(frozen=True)
    class Both(Plain):
        def __post_init__(self):
            super().__post_init__()
            if self.window == 3:
                raise InvalidField("both: window=3")

    assert Both(window=4).window == 4
    with pytest.raises(InvalidField, match="both"):
        Both(window=3)


def test_a_list_becomes_a_tuple():
    assert get_scheme("alibi", slopes=[1, 2.0]).slopes == (1, 2.0)
    assert isinstance(rules_of(type(get_scheme("alibi")))["slopes"], FieldRule)
