"""Phi-3.5-MoE's rotary module computes its frequencies anew in every forward, whatever its buffers contain."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig

from rope_patch import RoPE, UnsupportedModel, get_scheme, native_scheme, patch, unpatch
from rope_patch.models.config import checkpoint_of_config
from rope_patch.typing import RotarySpec
from tests.families import GENERIC, TRAINING_LENGTH, from_config
from tests.runs import cached_logits, logits, tokens

DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": TRAINING_LENGTH},
    **{"short_factor": [1.0] * 5 + [1.5, 1.5, 2.0], "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0]},
    **{"short_mscale": 1.25, "long_mscale": 1.25},
}
IDS = tokens(length=2 * TRAINING_LENGTH)


def phimoe(length=TRAINING_LENGTH, **entry):
    shape = {"head_dim": 16, "num_hidden_layers": 2, "num_key_value_heads": 2, "max_position_embeddings": length}
    return from_config(AutoConfig.for_model("phimoe", **{**GENERIC, **shape, "rope_parameters": dict(entry)}))


def rotating(model, scheme):
    """The plain model with a rotary module that computes a scheme's frequencies."""
    found = scheme.resolve(checkpoint_of_config(model.config)).frequencies(RotarySpec(16, 10000.0, TRAINING_LENGTH))

    def forward(x, position_ids):
        angles = (position_ids[..., None].float() * found.inv_freq).repeat(1, 1, 2)
        return angles.cos() * found.attention_scaling, angles.sin() * found.attention_scaling

    model = copy.deepcopy(model)
    model.model.rotary_emb.forward = forward
    return model


@pytest.mark.parametrize("spec", ["rope", "yarn:factor=4", "pi:factor=4", "abf:base=500000", "nope"])
def test_frequencies_take_effect(spec):
    model = phimoe(**DEFAULT)
    plain, expected = logits(model, IDS), logits(rotating(model, get_scheme(spec)), IDS)
    for mount in ("auto", "late"):
        with patch(model, spec, mount=mount):
            torch.testing.assert_close(logits(model, IDS), expected, rtol=0, atol=1e-5)
    assert torch.equal(logits(model, IDS), plain)


def test_a_bias_replaces_the_rotation():
    model, length = phimoe(**DEFAULT), IDS.shape[1]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    bias = get_scheme("alibi").bias(distance, model.config.num_attention_heads).masked_fill(distance < 0, -torch.inf)
    with torch.no_grad():
        expected = rotating(model, get_scheme("nope"))(IDS, attention_mask=bias[None]).logits
    patch(model, "alibi")
    torch.testing.assert_close(logits(model, IDS), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "spec", ["logn:training_length=4096", "rerope:window=100", "self_extend:window=100,group_size=2"]
)
@pytest.mark.parametrize("mount", ["auto", "late"])
def test_the_models_own_factor_is_kept(spec, mount):
    model = phimoe(4 * TRAINING_LENGTH, **LONGROPE)
    plain = logits(model, IDS)
    patch(model, spec, mount=mount)
    torch.testing.assert_close(logits(model, IDS), plain, rtol=0, atol=1e-5)
    torch.testing.assert_close(cached_logits(model, IDS, [40, 1, 23]), plain, rtol=0, atol=1e-5)
    unpatch(model)
    assert torch.equal(logits(model, IDS), plain)


def test_what_its_config_does_not_describe_is_refused():
    model = phimoe(4 * TRAINING_LENGTH, **LONGROPE)
    for scheme in (native_scheme(model), RoPE()):
        with pytest.raises(UnsupportedModel, match="other frequencies than its config describes"):
            patch(model, scheme)
    with pytest.raises(UnsupportedModel, match="by another factor in longer texts"):
        patch(phimoe(4 * TRAINING_LENGTH, **{**LONGROPE, "long_mscale": 1.5}), "logn")
