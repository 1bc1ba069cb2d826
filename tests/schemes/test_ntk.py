import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rope_patch import DynamicNTK, InvalidField, NTKScaling, RoPE
from rope_patch.typing import RotarySpec
from tests.definition import Definition

CASES = ["ntk:factor=4", "abf:base=500", "dynamic_ntk:factor=2"]

LLAMA = RotarySpec(64, 10000.0, 2048)


def with_base_times(growth):
    """theta_i of a base that is `growth` times as large, for d = 16."""
    return lambda theta, length: theta * growth(length) ** -(np.arange(8) / 8)


DEFINITIONS = {
    "ntk:factor=4": Definition(frequencies=with_base_times(lambda length: 4 ** (16 / 14))),
    "ntk:factor=4,variant=old": Definition(frequencies=with_base_times(lambda length: 4.0)),
    "abf:base=500": Definition(frequencies=with_base_times(lambda length: 500 / 10000)),
    "dynamic_ntk:factor=2": Definition(
        frequencies=with_base_times(lambda length: (2 * max(length, 32) / 32 - 1) ** (16 / 14))
    ),
    "dynamic_ntk:factor=2,length=128": Definition(frequencies=with_base_times(lambda length: 7 ** (16 / 14))),
}


@pytest.mark.parametrize("factor", [1, 2.5, 8])
def test_ntk_keeps_the_fastest_pair_and_divides_the_slowest_by_the_factor(factor):
    plain = RoPE().frequencies(LLAMA).inv_freq
    scaled = NTKScaling(factor).frequencies(LLAMA).inv_freq
    assert scaled[0] == plain[0] == 1
    torch.testing.assert_close(plain[-1] / scaled[-1], torch.tensor(float(factor)))


@pytest.mark.parametrize("factor", [1.0, 2.0])
@pytest.mark.parametrize("length", [1, 2047, 2048, 2049, 5000, 16384])
def test_dynamic_frequencies_are_those_of_transformers_bit_for_bit(factor, length):
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": factor}
    config = LlamaConfig(head_dim=64, max_position_embeddings=2048, rope_parameters=parameters)
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, "cpu", seq_len=torch.tensor(length))
    found = DynamicNTK(factor).frequencies(LLAMA, torch.tensor([length])).inv_freq
    assert torch.equal(found[0], expected)


def test_dynamic_frequencies_couple_no_rows():
    both = DynamicNTK(2.0).frequencies(LLAMA, torch.tensor([100, 8192])).inv_freq
    for row, length in enumerate((100, 8192)):
        assert torch.equal(both[row], DynamicNTK(2.0).frequencies(LLAMA, torch.tensor([length])).inv_freq[0])


def test_a_fixed_length_is_no_longer_length_dependent():
    fixed = DynamicNTK(2.0, length=8192)
    assert not fixed.length_dependent
    followed = DynamicNTK(2.0).frequencies(LLAMA, torch.tensor([8192])).inv_freq[0]
    assert torch.equal(fixed.frequencies(LLAMA).inv_freq, followed)


@pytest.mark.parametrize("scheme", [NTKScaling(factor=4), DynamicNTK(factor=2)])
def test_one_pair_alone_is_refused(scheme):
    with pytest.raises(InvalidField, match="only one"):
        scheme.frequencies(RotarySpec(2, 10000.0, 32))
