import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rope_patch import InvalidField, Llama3Scaling
from rope_patch.typing import RotarySpec
from tests.definition import Definition

CASES = ["llama3:factor=4"]


def blended(theta, length):
    kept = np.clip((32 * theta / (2 * math.pi) - 1) / (4 - 1), 0, 1)
    return theta * (kept + (1 - kept) / 4)


DEFINITIONS = {"llama3:factor=4": Definition(frequencies=blended)}


@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("base", [10000.0, 500000.0])
@pytest.mark.parametrize(("factor", "low", "high"), [(8.0, 1.0, 4.0), (32.0, 1.0, 4.0), (4.0, 2.0, 3.0)])
@pytest.mark.parametrize("trained", [2048, 8192])
def test_the_frequencies_are_those_of_transformers_bit_for_bit(head_dim, base, factor, low, high, trained):
    parameters = {
        "rope_type": "llama3",
        "rope_theta": base,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": trained,
    }
    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=131072, rope_parameters=parameters)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    found = Llama3Scaling(factor, low, high).frequencies(RotarySpec(head_dim, base, trained))
    assert torch.equal(found.inv_freq, expected)


def test_factors_in_the_wrong_order_are_named():
    with pytest.raises(InvalidField, match=r"high_freq_factor=1.0 must be above low_freq_factor=4.0"):
        Llama3Scaling(8.0, low_freq_factor=4.0, high_freq_factor=1.0)
