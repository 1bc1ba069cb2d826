"""Which cases belong to the usual run and which to the long one: a few of every scheme and of every family, or more."""

from __future__ import annotations

import functools
import zlib
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

from rope_patch import get_scheme
from tests.cases import ALL, REPRESENTATIVE, ROUTES
from tests.families import FAMILIES, SAMPLE, SCALED

ONE_IN = 12
"""Of the squares of a board of families and schemes, in the usual run."""

ONE_IN_NIGHTLY = 4
"""Likewise in the long run, whose board has every family."""

ONE_IN_FURTHER = 6
"""Of the settings that are no `REPRESENTATIVE`, where a test runs Llama under all of them."""


def in_usual_run(item: pytest.Item, of_one_scheme: bool = False) -> bool:
    """Whether a test is not for the long run alone.

    What is tried on every family is tried on Llama under one scheme of each kind, and on the other families of the
    sample by `is_sampled`. What is tried on Llama under every setting is tried under one of each kind, and under
    every sixth of the others, by turns: each setting meets every sixth of these tests, and in a run that is of one
    scheme all of them. Of any other test that is marked `one_in(n)`, each n-th combination of its parameters.
    """
    callspec = getattr(item, "callspec", None)
    if item.get_closest_marker("nightly") is not None:
        return False
    if callspec is None:
        return True
    family, spec = callspec.params.get("family"), callspec.params.get("spec")
    if family in FAMILIES and family not in SAMPLE:
        return False
    marks = list(item.iter_markers("parametrize"))
    if mark := item.get_closest_marker("one_in"):
        return sum(_place(each, callspec.params) for each in marks) % mark.args[0] == 0
    if family in SAMPLE - {"llama"} and spec in REPRESENTATIVE:
        return is_sampled(family, spec, _turn(item, marks))
    is_further = spec in ALL and spec not in REPRESENTATIVE and any(map(_takes_nearly_all, marks))
    if is_further and not of_one_scheme and {"llama", "model"} & set(item.fixturenames):
        return (ALL.index(spec) + _turn(item, marks)) % ONE_IN_FURTHER == 0
    return True


def in_nightly_run(item: pytest.Item) -> bool:
    """Whether a test is one of the long run: of the board of families and schemes every fourth square, others for each
    test; Llama and the scaled checkpoints under all schemes; and all that is not tried on every family.
    """
    params = item.callspec.params if hasattr(item, "callspec") else {}
    family, spec = params.get("family"), params.get("spec")
    if family not in FAMILIES or family in ("llama", *SCALED) or spec not in ALL or in_usual_run(item):
        return True
    return (_row(family) + _column(spec) + _turn(item, list(item.iter_markers("parametrize")))) % ONE_IN_NIGHTLY == 0


def is_sampled(family: str, spec: str, turn: int) -> bool:
    """Whether a square of the board is one of the usual run, at this turn of the board: every twelfth square, so that
    each family meets several schemes and each scheme several families.

    Tests differ in their turns, so that together they take every square. What a checkpoint scales is met by the schemes
    that leave it and by one of each route, every third square of them.
    """
    if family in SCALED:
        met = [each for each in REPRESENTATIVE if each in ROUTES or _leaves_frequencies(each)]
        return spec in met and (SCALED.index(family) + met.index(spec) + turn) % 3 == 0
    return (_row(family) + _column(spec) + turn) % ONE_IN == 0


def _row(family: str) -> int:
    return [each for each in FAMILIES if each != "llama" and each not in SCALED].index(family)


def _column(spec: str) -> int:
    return (REPRESENTATIVE if spec in REPRESENTATIVE else ALL).index(spec)


@functools.cache
def _leaves_frequencies(spec: str) -> bool:
    return get_scheme(spec).slots <= {"segments", "query_scale"}


def _turn(item: pytest.Item, marks: list[pytest.Mark]) -> int:
    others = [each for each in marks if not {"family", "spec"} & set(_names(each))]
    return zlib.crc32(item.originalname.encode()) + sum(_place(each, item.callspec.params) for each in others)


def _takes_nearly_all(mark: pytest.Mark) -> bool:
    values = [value if isinstance(value, tuple) else [value] for value in mark.args[1]]
    return sum(any(isinstance(each, str) and each in ALL for each in value) for value in values) > 0.8 * len(ALL)


def _names(mark: pytest.Mark) -> list[str]:
    names = mark.args[0]
    return [names] if isinstance(names, str) else list(names)


def _place(mark: pytest.Mark, params: dict[str, Any]) -> int:
    """Which of the values of a parametrisation a test was given: these very objects."""
    given = [params[name] for name in _names(mark)]
    for place, value in enumerate(mark.args[1]):
        values = value.values if isinstance(value, ParameterSet) else [value] if len(given) == 1 else value
        if all(one is other for one, other in zip(given, values, strict=True)):
            return place
    raise AssertionError(f"{given} is none of the values of {_names(mark)}")
