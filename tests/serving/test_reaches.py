"""The factor of a request follows from its length, to the token."""

from __future__ import annotations

import pytest

from rope_patch.serving.factors import Reaches

REACHES = Reaches(64, {1: 16, 2: 32, 4: 64})


@pytest.mark.parametrize(("tokens", "factor"), [(1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 4), (63, 4), (64, 4)])
def test_the_smallest_factor_that_covers_a_request_is_chosen(tokens, factor):
    assert REACHES.choose(tokens) == factor
    assert Reaches(64).choose(tokens) is None


@pytest.mark.parametrize(("factor", "reach"), [(None, 64), (1, 16), (2.0, 32), (4, 64)])
def test_a_request_may_be_as_long_as_its_factor_reaches_and_no_longer(factor, reach):
    assert REACHES.of(factor) == reach
    assert REACHES.choose(reach, factor) == (factor or 4)
    with pytest.raises(ValueError, match=f"{reach} tokens of prompt and answer are allowed"):
        REACHES.choose(reach + 1, factor)
