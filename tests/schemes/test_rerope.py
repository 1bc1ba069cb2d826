import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rope_patch import LeakyReRoPE, ReRoPE
from tests.definition import Definition
from tests.schemes.regions import rotated_distances

CASES = ["rerope:window=6", "leaky_rerope:window=6,factor=4"]


def leaky(m, n, window=6, factor=4):
    return np.where(m - n < window, m - n, window + (m - n - window) / factor)


DEFINITIONS = {
    "rerope:window=6": Definition(distance=lambda m, n: np.minimum(m - n, 6)),
    "rerope:window=1": Definition(distance=lambda m, n: np.minimum(m - n, 1)),
    "leaky_rerope:window=6,factor=4": Definition(distance=leaky),
    "rerope:window=6+logn:training_length=8": Definition(
        distance=lambda m, n: np.minimum(m - n, 6),
        query_scale=lambda m: np.maximum(1, np.log(m + 1) / np.log(8)),
    ),
}


@given(window=st.integers(1, 80))
def test_rerope_is_the_minimum_of_distance_and_window(window):
    m, n, found = rotated_distances(ReRoPE(window))
    assert torch.equal(found, (m - n).clamp(-window, window).double())


@given(window=st.integers(1, 80), factor=st.floats(1, 64))
def test_leaky_rerope_grows_by_one_over_the_factor_beyond_the_window(window, factor):
    m, n, found = rotated_distances(LeakyReRoPE(window, factor))
    distance = (m - n).abs().double()
    expected = torch.where(distance < window, distance, window + (distance - window) / factor)
    torch.testing.assert_close(found.abs(), expected, rtol=0, atol=1e-4)
    assert torch.equal(found.sign(), (m - n).sign().double())


@pytest.mark.parametrize("factor", [1, 1.0])
def test_leaky_rerope_of_factor_one_is_rope(factor):
    m, n, found = rotated_distances(LeakyReRoPE(16, factor))
    assert torch.equal(found, (m - n).double())
