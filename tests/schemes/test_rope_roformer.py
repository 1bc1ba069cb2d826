"""RoPE as its authors' model in Transformers has it: neighbours in pairs, values rotated or not."""

import pytest
import torch
from transformers import RoFormerConfig
from transformers.models.roformer.modeling_roformer import RoFormerSelfAttention

from rope_patch import RoPE
from rope_patch.schemes.tools.rotary import RotaryLayout, rotation_tables
from rope_patch.schemes.tools.sinusoids import sinusoidal_rows
from rope_patch.typing import RotarySpec
from tests.schemes.pairs import random

NEIGHBOURS = RotaryLayout((0, 2, 4, 6), (1, 3, 5, 7))


@pytest.mark.parametrize("rotary_value", [False, True])
def test_attention_is_that_of_roformer(rotary_value):
    length = 11
    config = RoFormerConfig(hidden_size=24, num_attention_heads=3, rotary_value=rotary_value)
    theirs = RoFormerSelfAttention(config).double().eval()
    states, positions = random(2, length, 24), torch.arange(length)
    sinusoids = sinusoidal_rows(positions, 8, layout="split")[None, None]
    with torch.no_grad():
        expected, expected_weights = theirs(states, sinusoidal_pos=sinusoids)
        query, key, value = (
            project(states).unflatten(-1, (3, 8)).transpose(1, 2)
            for project in (theirs.query, theirs.key, theirs.value)
        )
        found = RoPE().frequencies(RotarySpec(8, 10000.0, length))
        tables = rotation_tables(positions[None], found.inv_freq, found.attention_scaling, torch.float64)
        query, key = (NEIGHBOURS.rotate(x, *tables) for x in (query, key))
        value = NEIGHBOURS.rotate(value, *tables) if rotary_value else value
        weights = (query @ key.transpose(-1, -2) / 8**0.5).softmax(dim=-1)
        output = (weights @ value).transpose(1, 2).flatten(2)
    # our angles are float32
    torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=0)
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=0)
