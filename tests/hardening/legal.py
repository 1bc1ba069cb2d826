"""Strategies of what is allowed: every registered scheme with any legal fields, and compositions of them.

Nothing here knows a scheme. What a field may be follows from the rule in its annotation, near the value that it usually
has; only what a scheme asks of several fields together is found by trying.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from rope_patch import Compose, RopePatchError, Scheme, get_scheme, list_schemes
from rope_patch.schemes import Checkpoint
from rope_patch.schemes.rules import NumbersAboveZero, OneOf, Permutation, SomeOf, TrueOrFalse, WholeNumbers, rules_of
from rope_patch.schemes.slots import ModelShape, Tokens
from rope_patch.typing import RotarySpec
from tests.cases import CASES, VARIANTS, what_is_missing
from tests.families import TRAINING_LENGTH, VOCABULARY

LONGEST = 52
"""Tokens of the longest text of these tests."""

WIDTH = 24
"""Of the states of the narrowest model."""

TRIES = 30
"""How often a value is drawn anew when a scheme refuses it."""

_EXAMPLE = "`window: Annotated[int, AtLeast(1)]` (rope_patch.schemes.rules)"

_OWNED = {"frequencies", "segments", "values", "embedding"}
"""Slots that one scheme of a composition has for itself."""


@st.composite
def schemes(draw: DrawFn, pairs: int, heads: int) -> Scheme:
    """One scheme, or up to three that do not want the same slot.

    Args:
        draw: by hypothesis.
        pairs: of dimensions of a head that turn.
        heads: number of query heads.
    """
    found: list[Scheme] = []
    for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
        scheme = draw(single(pairs, heads))
        owned = _OWNED - ({"frequencies"} if scheme.refines else set())
        if not any(scheme.slots & other.slots & owned or scheme.name == other.name for other in found):
            found.append(scheme)
    return found[0] if len(found) == 1 else Compose(*found)


@st.composite
def single(draw: DrawFn, pairs: int, heads: int) -> Scheme:
    """A registered scheme with some of its fields drawn.

    Args:
        draw, pairs, heads: as of `schemes`.
    """
    return draw(named(draw(st.sampled_from(list_schemes())), pairs, heads))


@st.composite
def named(draw: DrawFn, name: str, pairs: int, heads: int) -> Scheme:
    """The scheme of this name: the fields that it needs, and then any others, one by one where they go with the rest.

    Args:
        draw, pairs, heads: as of `schemes`.
        name: as registered.
    """
    usual = draw(st.sampled_from(settings(name)))
    fields = dataclasses.fields(usual)  # type: ignore[arg-type]
    groups = [name for name, rule in rules_of(type(usual)).items() if isinstance(rule.rules[0], WholeNumbers)]
    lengths = [len(getattr(usual, groups[0]))] if groups else [pairs, heads]
    needed = [field for field in fields if field.default is dataclasses.MISSING]
    if not fits(usual, pairs, heads):  # it is set for another model: this one takes other values
        needed = [field for field in fields if getattr(usual, field.name) != field.default]
        lengths = [number for number in range(1, pairs + 1) if pairs % number == 0] if groups else lengths
    others = [field for field in fields if field not in needed and draw(st.booleans())]
    scheme = None
    for wanted in [needed, *([field] for field in others)]:
        for _ in range(TRIES):
            # a list has a number for each pair, for each head, or for each of its groups: its scheme knows for which
            size = draw(st.sampled_from(lengths))
            values = {field.name: draw(values_of(usual, field, size)) for field in wanted}
            try:
                scheme = fitting(name, (scheme or usual).fields() | values, pairs, heads)
                break
            except RopePatchError:
                continue
    assert scheme is not None, f"{name}: no legal values of {', '.join(field.name for field in needed)} were found"
    return scheme


def settings(name: str) -> list[Scheme]:
    """The scheme as its own tests and the compositions of `tests.cases` have it."""
    assert name in CASES, what_is_missing(name)
    parts = [part for spec in (*CASES.values(), *VARIANTS) for part in spec.split("+")]
    return [get_scheme(part) for part in parts if part.partition(":")[0] == name]


def fitting(name: str, fields: dict[str, Any], pairs: int, heads: int) -> Scheme:
    """The scheme, unless it refuses a field, a model of these sizes, or the longest text.

    Raises:
        RopePatchError: it refuses.
    """
    scheme = get_scheme(name, **fields)
    resolved = scheme.resolve(Checkpoint(TRAINING_LENGTH, heads, TRAINING_LENGTH, pairs=pairs))
    sizes = ModelShape(heads, 2 * pairs, WIDTH, 1, VOCABULARY, TRAINING_LENGTH, 2 * pairs)
    weights = resolved.parameters(sizes, torch.Generator())
    if "frequencies" in resolved.slots:
        resolved.frequencies(RotarySpec(2 * pairs, 10000.0, TRAINING_LENGTH), torch.tensor([LONGEST]))
    if "embedding" in resolved.slots:
        last = torch.tensor([[LONGEST - 1]])
        resolved.embedding(Tokens(torch.zeros(1, 1, WIDTH), last, last), weights)
    return scheme


def fits(scheme: Scheme, pairs: int, heads: int) -> bool:
    """Whether `fitting` takes its fields."""
    try:
        fitting(scheme.name, scheme.fields(), pairs, heads)
    except RopePatchError:
        return False
    return True


def values_of(usual: Scheme, field: dataclasses.Field[Any], size: int) -> SearchStrategy[Any]:
    """What a field may be by its rule, around the value that it usually has; and its default.

    Args:
        usual: a scheme that has it.
        field: of the scheme.
        size: of a list of numbers.
    """
    value = getattr(usual, field.name)
    near = _by_rule(usual, field.name, value, size)
    return near if field.default in (dataclasses.MISSING, value) else st.just(field.default) | near


def _by_rule(usual: Scheme, field: str, value: Any, size: int) -> SearchStrategy[Any]:
    rule = rules_of(type(usual)).get(field)
    assert rule is not None, f"{usual.name}: {field} has no rule; write one into its annotation, such as {_EXAMPLE}"
    first = rule.rules[0]
    if isinstance(first, TrueOrFalse):
        return st.booleans()
    if isinstance(first, OneOf):
        return st.sampled_from(first.choices)
    if isinstance(first, SomeOf):
        return st.lists(st.sampled_from(first.choices), min_size=1, unique=True)
    if isinstance(first, Permutation):
        return st.permutations(range(size)).map(list)
    if isinstance(first, WholeNumbers):
        return st.lists(st.integers(1, 4), min_size=size, max_size=size)
    if isinstance(first, NumbersAboveZero):
        return st.lists(st.floats(0.1, 2), min_size=size, max_size=size)
    if rule.kind is int:
        near = st.integers(value // 4, 4 * value) if value else st.integers(0, 4) | st.integers(0, 2 * LONGEST)
    else:
        near = st.floats((value or 1) / 4, 4 * (value or 1))
    return near.filter(lambda value: rule.broken(value, usual) is None)


def is_cached_exactly(scheme: Scheme, length: int) -> bool:
    """Whether a cache may be compared with a full forward: states of a length-dependent scheme are of their time."""
    return not scheme.length_dependent or length <= min(TRAINING_LENGTH, _own_length(scheme))


def _own_length(scheme: Scheme) -> int:
    said = [getattr(part, "original_max_position_embeddings", None) for part in scheme.parts()]
    return min((length for length in said if length), default=TRAINING_LENGTH)
