import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rope_patch import InvalidField, LongRoPE
from rope_patch.schemes import Checkpoint
from rope_patch.typing import RotarySpec
from tests.definition import Definition

CASES = [
    "longrope:short_factor=[1,1,1,1,1.5,1.5,2,2],long_factor=[1,1.5,2,3,4,5,6,8],factor=4",
    "longrope:short_factor=[1,1,1,1,1.5,1.5,2,2],long_factor=[1,1.5,2,3,4,5,6,8],factor=4,length=64,learned=true",
]

SHORT, LONG = (1.0, 1.0, 1.0, 1.0, 1.5, 1.5, 2.0, 2.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
SPELLED = f"longrope:short_factor={list(SHORT)},long_factor={list(LONG)},factor=4"

DEFINITIONS = {
    SPELLED: Definition(
        frequencies=lambda theta, length: theta / np.array(LONG if length > 32 else SHORT),
        temperature=math.sqrt(1 + math.log(4) / math.log(32)),
    ),
    f"{SPELLED},attention_factor=1.0,length=16": Definition(
        frequencies=lambda theta, length: theta / np.array(SHORT),
    ),
    CASES[1]: Definition(
        learned_frequencies=lambda theta, learned: theta / learned["long_factor"],
        temperature=math.sqrt(1 + math.log(4) / math.log(32)),
    ),
}


@pytest.mark.parametrize("head_dim", [16, 96, 128, 256])
@pytest.mark.parametrize("factor", [1.0, 4.0, 32.0])
@pytest.mark.parametrize("length", [1, 4096, 4097, 100000])
def test_the_frequencies_are_those_of_transformers_bit_for_bit(head_dim, factor, length):
    random = torch.Generator().manual_seed(0)
    short, long = (1 + 9 * torch.rand(2, head_dim // 2, generator=random)).tolist()
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": factor,
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": 4096,
    }
    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=131072, rope_parameters=parameters)
    expected, temperature = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=length)
    scheme = LongRoPE(tuple(short), tuple(long), factor)
    found = scheme.frequencies(RotarySpec(head_dim, 10000.0, 4096), torch.tensor([length]))
    assert torch.equal(found.inv_freq[0], expected)
    assert found.attention_scaling == temperature


def test_the_temperature_follows_the_longest_length_of_the_checkpoint():
    scheme = LongRoPE((1.0,) * 8, (2.0,) * 8)
    assert scheme.resolve(Checkpoint(4096, 32, 131072)).factor == 32
    assert scheme.resolve(Checkpoint(4096, 32, 4096)).factor == 1
    assert LongRoPE((1.0,) * 8, (2.0,) * 8, 4.0).resolve(Checkpoint(4096, 32, 131072)).factor == 4


def test_lists_of_the_wrong_length_are_named():
    with pytest.raises(InvalidField, match="short_factor has 1 numbers, long_factor 2"):
        LongRoPE((1.0,), (1.0, 2.0))
    with pytest.raises(InvalidField, match="short_factor has 2 numbers; this checkpoint has 8 pairs"):
        LongRoPE((1.0, 1.0), (1.0, 2.0)).frequencies(RotarySpec(16, 10000.0, 32))
