import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rope_patch import InvalidField, SelfExtend
from tests.definition import Definition
from tests.schemes.regions import rotated_distances

CASES = ["self_extend:group_size=4,window=7"]


def grouped(shift):
    return lambda m, n: np.where(m - n < 7, m - n, m // 4 + shift - n // 4)


DEFINITIONS = {
    "self_extend:group_size=4,window=7": Definition(distance=grouped(7 - 7 // 4)),
    "self_extend:group_size=4,window=7,shift=fractional": Definition(distance=grouped(7 - 7 / 4)),
}


@given(group_size=st.integers(1, 16), window=st.integers(1, 80))
def test_far_distances_are_those_of_groups(group_size, window):
    m, n, found = rotated_distances(SelfExtend(group_size, window))
    far = m // group_size + window - window // group_size - n // group_size
    expected = torch.where(m - n < window, m - n, far)
    assert torch.equal(found[m >= n], expected[m >= n].double())


@given(window=st.integers(1, 80))
def test_groups_of_one_are_rope(window):
    m, n, found = rotated_distances(SelfExtend(1, window))
    assert torch.equal(found, (m - n).double())


@pytest.mark.parametrize(("query", "key", "expected"), [(15, 12, 3), (15, 11, 4), (15, 8, 4), (15, 7, 5), (15, 0, 6)])
def test_published_example(query, key, expected):
    # group 4 and window 4: shift 4 - 1, so that 15 is at 15 // 4 + 3 = 6 against groups 0 to 3
    _, _, found = rotated_distances(SelfExtend(4, 4), 16)
    assert found[query, key] == expected


def test_an_unknown_shift_is_named():
    with pytest.raises(InvalidField, match=r"shift='floors': did you mean 'floor'\?"):
        SelfExtend(4, 8, shift="floors")
