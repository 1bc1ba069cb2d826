import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rope_patch import PositionInterpolation
from rope_patch.typing import RotarySpec
from tests.definition import Definition

CASES = ["pi:factor=4"]

DEFINITIONS = {"pi:factor=4": Definition(distance=lambda m, n: (m - n) / 4)}


@pytest.mark.parametrize("factor", [1.0, 3.0, 8])
def test_frequencies_are_those_of_transformers_bit_for_bit(factor):
    parameters = {"rope_type": "linear", "rope_theta": 10000.0, "factor": float(factor)}
    expected, _ = ROPE_INIT_FUNCTIONS["linear"](LlamaConfig(head_dim=64, rope_parameters=parameters), "cpu")
    assert torch.equal(PositionInterpolation(factor).frequencies(RotarySpec(64, 10000.0, 2048)).inv_freq, expected)
