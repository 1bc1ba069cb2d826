import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rope_patch import DynamicYaRN, NotExpressible, YaRN
from rope_patch.typing import RotarySpec
from tests.definition import Definition

CASES = ["yarn:factor=4", "ntk_by_parts:factor=4", "dynamic_yarn"]


def yarn(theta, length, factor=4, trained=32, base=10000.0, beta_fast=32, beta_slow=1):
    """Each pair between its own frequency and the interpolated one, by a ramp in the index of the dimension."""
    d = 2 * len(theta)
    low, high = (d * math.log(trained / (beta * 2 * math.pi)) / (2 * math.log(base)) for beta in (beta_fast, beta_slow))
    low, high = max(math.floor(low), 0), min(math.ceil(high), d - 1)
    ramp = np.array([min(max((i - low) / (high - low), 0), 1) for i in range(d // 2)])
    return theta / factor * ramp + theta * (1 - ramp)


def rotations_ramp(theta, length):
    """The paper's ramp, linear in the rotations within L."""
    keep = np.clip((32 * theta / (2 * math.pi) - 1) / (32 - 1), 0, 1)
    return theta / 4 * (1 - keep) + theta * keep


DEFINITIONS = {
    "yarn:factor=4,ramp=rotations": Definition(frequencies=rotations_ramp, temperature=0.1 * math.log(4) + 1),
    "ntk_by_parts:factor=4": Definition(frequencies=yarn),
    "dynamic_yarn:length=128": Definition(frequencies=yarn, temperature=0.1 * math.log(4) + 1),
    "dynamic_yarn:attention_factor=1.0": Definition(
        frequencies=lambda theta, length: yarn(theta, length, factor=max(1, length / 32))
    ),
    "yarn:factor=4": Definition(frequencies=yarn, temperature=0.1 * math.log(4) + 1),
    "yarn:factor=4,attention_factor=1.0": Definition(frequencies=yarn),
    "yarn:factor=4+rerope:window=6": Definition(
        distance=lambda m, n: np.minimum(m - n, 6), frequencies=yarn, temperature=0.1 * math.log(4) + 1
    ),
}


@pytest.mark.parametrize(
    "fields",
    [
        {"factor": 8.0},
        {"factor": 1.0},
        {"factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0},
        {"factor": 4.0, "attention_factor": 1.25},
        {"factor": 4.0, "truncate": False},
        {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0},
    ],
    ids=lambda fields: ",".join(fields),
)
@pytest.mark.parametrize(
    ("trained", "base"), [(256, 10000.0), (4096, 10000.0), (131072, 10000.0), (4096, 100.0), (8192, 5e5)]
)
def test_frequencies_are_those_of_transformers_bit_for_bit(fields, trained, base):
    parameters = {
        "rope_type": "yarn",
        "rope_theta": base,
        "original_max_position_embeddings": trained,
        **fields,
    }
    expected, scaling = ROPE_INIT_FUNCTIONS["yarn"](LlamaConfig(head_dim=64, rope_parameters=parameters), "cpu")
    found = YaRN(**fields).frequencies(RotarySpec(64, base, trained))
    assert torch.equal(found.inv_freq, expected)
    assert found.attention_scaling == scaling


def test_fast_pairs_stay_and_slow_pairs_are_interpolated():
    plain = 10000.0 ** -(np.arange(64) / 64)
    found = YaRN(16).frequencies(RotarySpec(128, 10000.0, 4096)).inv_freq.numpy()
    rotations = 4096 * plain / (2 * math.pi)
    # the ramp ends on whole dimensions, so the pairs right at its ends may still lie on it
    np.testing.assert_allclose(found[rotations > 40], plain[rotations > 40], rtol=1e-6)
    np.testing.assert_allclose(found[rotations < 0.8], plain[rotations < 0.8] / 16, rtol=1e-6)
    np.testing.assert_allclose(found, yarn(plain, 0, factor=16, trained=4096), rtol=1e-6)


def test_dynamic_yarn_is_yarn_with_the_factor_that_each_row_needs():
    spec = RotarySpec(64, 10000.0, 2048)
    found = DynamicYaRN().frequencies(spec, torch.tensor([100, 8192]))
    for row, factor in enumerate((1.0, 4.0)):
        expected = YaRN(factor).frequencies(spec)
        torch.testing.assert_close(found.inv_freq[row], expected.inv_freq)
        assert found.attention_scaling[row].item() == pytest.approx(expected.attention_scaling)


def test_the_papers_ramp_has_no_word_in_transformers():
    with pytest.raises(NotExpressible, match="linear in the index"):
        YaRN(4.0, ramp="rotations").rope_parameters(RotarySpec(64, 10000.0, 2048))
