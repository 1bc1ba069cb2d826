import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rope_patch import InvalidField, Proportional
from rope_patch.typing import RotarySpec
from tests.definition import Definition

CASES = ["proportional:partial_rotary_factor=0.5,factor=2"]

DEFINITIONS = {
    "proportional:partial_rotary_factor=0.5,factor=2": Definition(
        frequencies=lambda theta, length: np.where(np.arange(8) < 4, theta / 2, 0)
    )
}


@pytest.mark.parametrize("head_dim", [16, 64, 256])
@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("factor", [1.0, 8.0])
def test_the_frequencies_are_those_of_transformers_bit_for_bit(head_dim, share, factor):
    parameters = {
        "rope_type": "proportional",
        "rope_theta": 10000.0,
        "partial_rotary_factor": share,
        "factor": factor,
    }
    config = LlamaConfig(head_dim=head_dim, rope_parameters=parameters)
    expected, _ = ROPE_INIT_FUNCTIONS["proportional"](config, "cpu")
    assert torch.equal(Proportional(share, factor).frequencies(RotarySpec(head_dim, 10000.0, 2048)).inv_freq, expected)


def test_a_share_above_one_is_named():
    with pytest.raises(InvalidField, match=r"partial_rotary_factor=1\.5 is not allowed"):
        Proportional(1.5)
