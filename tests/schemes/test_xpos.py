import dataclasses

import numpy as np
import pytest
import torch

from rope_patch import XPos, patch
from rope_patch.attention import decay
from rope_patch.attention.decay import Decay
from rope_patch.schemes.tools.rotary import RotaryLayout, half_split
from rope_patch.typing import RotarySpec
from tests.attention.test_segmented import inputs_of
from tests.definition import Definition
from tests.runs import assert_close, assert_same_gradients, gradients, logits, tokens

CASES = ["xpos:scale_base=8"]


def fading(scale_base, gamma=0.4):
    """zeta_i^((m - n) / scale_base) for d = 16."""
    zeta = (np.arange(8) / 8 + gamma) / (1 + gamma)
    return lambda distance: zeta ** (distance[..., None] / scale_base)


DEFINITIONS = {
    "xpos:scale_base=8": Definition(pair_weights=fading(8)),
    "xpos:scale_base=16,gamma=1": Definition(pair_weights=fading(16, 1)),
    "xpos:scale_base=8+rerope:window=6": Definition(distance=lambda m, n: np.minimum(m - n, 6), pair_weights=fading(8)),
}


def test_keys_after_the_last_query_stay_finite_in_float16():
    inputs, _ = inputs_of("", [[0] * 45], 20, 45, torch.float16)
    inputs = dataclasses.replace(
        inputs, query_positions=torch.arange(20)[None], key_positions=10 * torch.arange(45)[None]
    )
    fading = Decay(half_split(16), torch.linspace(0, 0.2, 8))
    assert inputs.replaced(decay=fading).decayed().branches[0].key.isfinite().all()


def test_the_slowest_pair_hardly_fades_and_the_fastest_most():
    rate = XPos().frequencies(RotarySpec(128, 10000.0, 2048)).decay
    assert (rate.diff() < 0).all()
    torch.testing.assert_close(torch.exp(-512 * rate[0]), torch.tensor(0.4 / 1.4))


@pytest.mark.parametrize("spec", ["xpos:scale_base=8", "xpos:scale_base=8+rerope:window=6"])
@pytest.mark.parametrize("attention", ["oracle", "chunked", "segmented"])
def test_blocks_of_queries_give_what_the_whole_gives(llama, spec, attention, monkeypatch):
    with patch(llama, spec, attention="oracle"):
        expected, slopes = logits(llama, tokens(rows=2)), gradients(llama, tokens(rows=2))
    monkeypatch.setattr(decay, "ROWS", 7)
    with patch(llama, spec, attention=attention):
        assert_close(logits(llama, tokens(rows=2)), expected)
        assert_same_gradients(gradients(llama, tokens(rows=2)), slopes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_factor_leaves_the_range_of_its_dtype(dtype):
    rate = XPos().frequencies(RotarySpec(64, 10000.0, 2048)).decay
    layout = RotaryLayout(tuple(range(32)), tuple(range(32, 64)))
    x = torch.ones(1, 1, 2, 64, dtype=dtype)
    for exponent in (float(decay.ROWS), -1e6):
        factor = Decay(layout, rate).factor(torch.full((1, 2), exponent), x)
        assert factor.dtype == dtype
        assert factor.isfinite().all()
