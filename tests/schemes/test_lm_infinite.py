import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rope_patch import LMInfinite
from tests.definition import Definition
from tests.schemes.regions import rotated_distances

CASES = ["lm_infinite:local_window=7,n_global=3"]

DEFINITIONS = {
    "lm_infinite:local_window=7,n_global=3": Definition(
        distance=lambda m, n: np.minimum(m - n, 7), visible=lambda m, n: (n < 3) | (m - n < 7)
    ),
    "lm_infinite:local_window=7,n_global=0": Definition(visible=lambda m, n: m - n < 7),
}


@given(window=st.integers(1, 80), n_global=st.integers(0, 80))
def test_the_first_tokens_and_the_window_are_held_at_capped_distances(window, n_global):
    m, n, found = rotated_distances(LMInfinite(window, n_global))
    causal = m >= n
    held = causal & ((n < n_global) | (m - n < window))
    assert torch.equal(~found.isnan() & causal, held)
    assert torch.equal(found[held], (m - n).clamp(max=window)[held].double())
