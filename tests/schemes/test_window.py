import torch
from hypothesis import given
from hypothesis import strategies as st

from rope_patch import SlidingWindow
from rope_patch.schemes import Checkpoint
from tests.definition import Definition, no_rotation
from tests.schemes.regions import rotated_distances

CASES = ["window:window=7"]

DEFINITIONS = {
    "window:window=7": Definition(visible=lambda m, n: m - n < 7),
    "window:window=1": Definition(visible=lambda m, n: m - n < 1),
    "window": Definition(visible=lambda m, n: m - n < 32),
    "alibi+window:window=7": Definition(
        distance=no_rotation,
        visible=lambda m, n: m - n < 7,
        bias=lambda head, m, n: -(4.0 ** -(head + 1)) * (m - n),
    ),
}


@given(window=st.integers(1, 80))
def test_only_pairs_within_the_window_are_held_and_keep_their_distance(window):
    m, n, found = rotated_distances(SlidingWindow(window))
    inside = (m - n).abs() < window
    assert torch.equal(found.isnan(), ~inside)
    assert torch.equal(found[inside], (m - n)[inside].double())


def test_the_default_window_is_the_training_length():
    assert SlidingWindow().resolve(Checkpoint(256, 4, 256)) == SlidingWindow(256)
    assert SlidingWindow(8).resolve(Checkpoint(256, 4, 256)) == SlidingWindow(8)
