import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rope_patch import NoPE, RoPE, patch
from rope_patch.typing import RotarySpec
from tests.definition import Definition, no_rotation
from tests.schemes.test_yarn import yarn

CASES = ["rope", "nope", "learned_rope", "learned_rope:per_layer=false"]


def sped_up(theta, learned):
    return theta * np.exp(learned["log_speed"])


DEFINITIONS = {
    "rope": Definition(),
    "nope": Definition(distance=no_rotation),
    "learned_rope": Definition(learned_frequencies=sped_up),
    "learned_rope:per_layer=false": Definition(learned_frequencies=sped_up),
    "yarn:factor=4+learned_rope": Definition(
        frequencies=yarn, learned_frequencies=sped_up, temperature=0.1 * np.log(4) + 1
    ),
    "rerope:window=6+learned_rope": Definition(distance=lambda m, n: np.minimum(m - n, 6), learned_frequencies=sped_up),
}


@pytest.mark.parametrize(("dim", "base"), [(16, 10000.0), (64, 500000.0), (128, 1e6)])
def test_frequencies_are_those_of_transformers_bit_for_bit(dim, base):
    config = LlamaConfig(head_dim=dim, rope_parameters={"rope_type": "default", "rope_theta": base})
    expected = LlamaRotaryEmbedding(config).inv_freq
    found = RoPE().frequencies(RotarySpec(dim, base, 2048))
    assert torch.equal(found.inv_freq, expected)
    assert found.attention_scaling == 1.0


def test_frequencies_are_powers_of_the_base():
    found = RoPE().frequencies(RotarySpec(64, 10000.0, 2048)).inv_freq
    np.testing.assert_allclose(found, 10000.0 ** -(np.arange(32) / 32), rtol=1e-6)


def test_layers_can_share_what_they_learn(llama):
    with patch(llama, "learned_rope:per_layer=false"):
        (name,) = [name for name, _ in llama.named_parameters() if "log_speed" in name]
        assert "layers" not in name


def test_nope_turns_nothing():
    assert not NoPE().frequencies(RotarySpec(64, 10000.0, 2048)).inv_freq.any()
