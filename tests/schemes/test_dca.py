import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rope_patch import DualChunkAttention, InvalidField
from rope_patch.schemes import Checkpoint
from tests.definition import Definition
from tests.schemes import test_ntk as ntk
from tests.schemes.regions import rotated_distances

CASES = ["dca:chunk_size=9,local_window=2"]


def chunked(chunk_size, local_window):
    """The released code's positions, pair by pair."""
    s = chunk_size - local_window

    def distance(m, n):
        back = m // s - n // s
        query = np.where(back == 0, m % s, np.where(back == 1, np.minimum(m % s + s, chunk_size), 0))
        return np.where(back >= 2, min(2 * s - 1, chunk_size), query) - n % s

    return distance


def as_in_the_paper(chunk_size, local_window):
    """Equations 3 to 6: with c = s + w, queries at m mod s, at min(m mod s + s, c - 1), and at c - 1."""
    s, c = chunk_size, chunk_size + local_window

    def distance(m, n):
        back = m // s - n // s
        earlier = np.where(back == 1, np.minimum(m % s + s, c - 1), c - 1)
        return np.where(back == 0, m % s, earlier) - n % s

    return distance


DEFINITIONS = {
    "dca:chunk_size=9,local_window=2,constants=paper": Definition(distance=as_in_the_paper(9, 2)),
    "dca:constants=paper": Definition(distance=as_in_the_paper(24, 8)),
    "dca:chunk_size=9,local_window=2": Definition(distance=chunked(9, 2)),
    "dca:chunk_size=9,local_window=2+alibi": Definition(
        distance=chunked(9, 2), bias=lambda head, m, n: -(4.0 ** -(head + 1)) * (m - n)
    ),
    "dynamic_ntk:factor=2+dca:chunk_size=9,local_window=2": Definition(
        distance=chunked(9, 2), frequencies=ntk.DEFINITIONS["dynamic_ntk:factor=2"].frequencies
    ),
    "dca:chunk_size=12,local_window=8": Definition(distance=chunked(12, 8)),
    "dca": Definition(distance=chunked(24, 4)),
}


@given(chunk_size=st.integers(2, 40), local_window=st.integers(1, 39))
def test_distances_are_those_of_the_released_code(chunk_size, local_window):
    if local_window >= chunk_size:
        return
    m, n, found = rotated_distances(DualChunkAttention(chunk_size, local_window), 100)
    expected = torch.from_numpy(chunked(chunk_size, local_window)(m.numpy(), n.numpy()))
    assert torch.equal(found[m >= n], expected[m >= n].double())


@given(local_window=st.integers(1, 10))
def test_true_distances_within_a_local_window_of_half_the_chunk_and_none_beyond_the_chunk(local_window):
    m, n, found = rotated_distances(DualChunkAttention(20, local_window), 100)
    near = (m >= n) & (m - n <= local_window)
    assert torch.equal(found[near], (m - n)[near].double())
    assert found[m >= n].max() <= 20


def test_the_defaults_are_three_quarters_and_an_eighth_of_the_training_length():
    checkpoint = Checkpoint(4096, 8, 4096)
    assert DualChunkAttention().resolve(checkpoint) == DualChunkAttention(3072, 512)
    in_the_paper = DualChunkAttention(constants="paper")
    assert in_the_paper.resolve(checkpoint) == DualChunkAttention(3072, 1024, "paper")


def test_a_window_that_fills_the_chunk_is_named():
    with pytest.raises(InvalidField, match="local_window=8 must be below chunk_size=8"):
        DualChunkAttention(8, 8)
