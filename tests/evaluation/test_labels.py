from __future__ import annotations

from itertools import pairwise

import pytest

from rope_patch.evaluation.labels import spread_apart


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ([0.1, 0.5], [0.1, 0.5]),
        ([0.5, 0.5], [0.45, 0.55]),
        ([0.0, 0.0, 1.0, 1.0], [0.0, 0.1, 0.9, 1.0]),
    ],
)
def test_within_the_axes(wanted, found):
    assert spread_apart(wanted, 0.1, 0.0, 1.0) == pytest.approx(found)


@pytest.mark.parametrize("wanted", [[0.1, 0.5, 0.9], [0.5, 0.5, 0.5], [0.41, 0.48, 0.5, 0.52, 0.9], [0.0, 0.0]])
def test_without_bounds_a_block_is_centred_on_what_its_members_want(wanted):
    places = spread_apart(wanted, 0.1)
    assert all(upper - lower >= 0.1 - 1e-9 for lower, upper in pairwise(places))
    assert sum(places) == pytest.approx(sum(wanted))


def test_what_has_room_stays_where_it_is():
    assert spread_apart([0.1, 0.5], 0.1) == [0.1, 0.5]
