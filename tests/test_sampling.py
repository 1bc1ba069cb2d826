"""What a run leaves out: no scheme, no family, and of a marked test no value of a parameter."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from tests.cases import REPRESENTATIVE
from tests.families import FAMILIES, SAMPLE, SCALED
from tests.sampling import ONE_IN, ONE_IN_NIGHTLY, in_nightly_run, in_usual_run, is_sampled

OTHERS = sorted((SAMPLE & FAMILIES.keys()) - {"llama"} - set(SCALED))
PLAIN, LISTED = (
    pytest.mark.parametrize("one", [{}, {"a": 1}, "b"]),
    pytest.mark.parametrize(("x", "y"), [(1, 2), (3, 4)]),
)


@pytest.mark.parametrize("turn", range(ONE_IN))
def test_every_family_meets_schemes_and_every_scheme_families(turn):
    for family in OTHERS:
        assert sum(is_sampled(family, spec, turn) for spec in REPRESENTATIVE) >= len(REPRESENTATIVE) // ONE_IN
    for spec in REPRESENTATIVE:
        assert sum(is_sampled(family, spec, turn) for family in OTHERS) >= len(OTHERS) // ONE_IN
    for family in SCALED:
        assert sum(is_sampled(family, spec, turn) for spec in REPRESENTATIVE) >= 2


def test_as_many_turns_take_every_square_once():
    for family, spec in itertools.product(OTHERS, REPRESENTATIVE):
        assert sum(is_sampled(family, spec, turn) for turn in range(ONE_IN)) == 1


class Square:
    """A case of a test of families and schemes."""

    mark = pytest.mark.parametrize(("family", "spec"), []).mark
    fixturenames = ("model",)

    def __init__(self, name, family, spec):
        self.originalname, self.callspec = name, SimpleNamespace(params={"family": family, "spec": spec})

    def iter_markers(self, name):
        return [self.mark]

    def get_closest_marker(self, name):
        return None


def test_the_long_run_has_what_the_usual_one_has_and_every_family_under_a_fourth_of_the_schemes():
    for name, family in itertools.product(("one", "other"), FAMILIES):
        squares = [Square(name, family, spec) for spec in REPRESENTATIVE]
        long = [square for square in squares if in_nightly_run(square)]
        assert {*filter(in_usual_run, squares)} <= {*long}
        fewest = len(squares) if family in ("llama", *SCALED) else len(squares) // ONE_IN_NIGHTLY
        assert fewest <= len(long) <= max(fewest, len(squares) // ONE_IN_NIGHTLY + 1)


def item(one, x, *marks):
    """A case of a test with these two parametrisations."""
    found = {mark.name: mark.mark for mark in marks}
    return SimpleNamespace(
        callspec=SimpleNamespace(params={"one": one, "x": x, "y": x + 1}),
        originalname="test",
        get_closest_marker=found.get,
        iter_markers=lambda name: [PLAIN.mark, LISTED.mark],
    )


def test_every_other_combination_has_every_value():
    cases = list(itertools.product(PLAIN.args[1], (1, 3)))
    taken = [case for case in cases if in_usual_run(item(*case, pytest.mark.one_in(2)))]
    assert taken == [({}, 1), ({"a": 1}, 3), ("b", 1)]
    assert all(in_usual_run(item(*case)) for case in cases)
    assert not any(in_usual_run(item(*case, pytest.mark.nightly)) for case in cases)
