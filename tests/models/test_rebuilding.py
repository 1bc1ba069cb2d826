"""Numbers that attention computed from `rope_parameters` when it was built: YaRN's temperature in latent attention."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch import UnsupportedModel, export_rope_parameters, get_scheme, patch, unpatch
from tests.families import FAMILIES, TRAINING_LENGTH, build
from tests.runs import logits, tokens
from tests.snapshots import snapshot

LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu")
YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "original_max_position_embeddings": TRAINING_LENGTH,
}
OTHERS = ("rope", "pi:factor=4", "yarn:factor=4", "yarn:factor=8,mscale=0.7,mscale_all_dim=0.7")


def extended(family: str) -> torch.nn.Module:
    if family not in FAMILIES:
        pytest.skip(f"this Transformers has no {family}")
    return build(family, rope_parameters=dict(YARN), max_position_embeddings=4 * TRAINING_LENGTH)


def scales(model: torch.nn.Module) -> set[float]:
    return {module.scaling for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "scaling")}


@pytest.mark.parametrize("name", LATENT)
def test_another_scheme_brings_its_own_temperature(name):
    model, ids = extended(name), tokens(length=2 * TRAINING_LENGTH)
    before = snapshot(model)
    for spec in OTHERS:
        config = copy.deepcopy(model.config)
        config.rope_parameters = export_rope_parameters(get_scheme(spec), config)
        theirs = type(model)(config).eval()
        theirs.load_state_dict(model.state_dict())
        for mount in ("auto", "late"):
            with patch(model, spec, mount=mount):
                assert scales(model) == scales(theirs)
                torch.testing.assert_close(logits(model, ids), logits(theirs, ids), rtol=0, atol=1e-5)
    assert snapshot(model) == before


@pytest.mark.parametrize("spec", ["rerope:window=8", "logn", "resonance", "yarn:factor=4,mscale=1,mscale_all_dim=1"])
def test_a_scheme_with_the_checkpoints_frequencies_keeps_its_temperature(spec):
    model = extended("deepseek_v3")
    (own,) = scales(model)
    with patch(model, spec):
        assert scales(model) == {own}


def test_layers_may_differ():
    model = extended("deepseek_v3")
    (own,) = scales(model)
    with patch(model, "layers:[0=rope;rest=none]"):
        first, second = (layer.self_attn.scaling for layer in model.model.layers)
        assert (first, second) == (model.model.layers[0].self_attn.qk_head_dim ** -0.5, own)


@pytest.mark.parametrize(
    "spec", ["yarn:factor=4", "rope", "rerope:window=8", "yarn:factor=2,mscale=1,mscale_all_dim=1"]
)
def test_a_saved_temperature_is_applied_once(spec, tmp_path):
    model, ids = extended("deepseek_v3"), tokens(length=2 * TRAINING_LENGTH)
    plain = logits(model, ids)
    patch(model, spec)
    expected = logits(model, ids)
    model.save_pretrained(tmp_path)
    ours = rope_patch.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(ours, ids), expected)
    unpatch(ours)
    assert torch.equal(logits(ours, ids), plain)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    loaded = logits(theirs, ids)
    rope_patch.repatch(theirs)
    assert torch.equal(logits(theirs, ids), expected)
    unpatch(theirs)
    assert torch.equal(logits(theirs, ids), loaded)


def test_a_temperature_that_would_follow_the_length_is_refused():
    model = extended("deepseek_v3")
    before = snapshot(model)
    with pytest.raises(UnsupportedModel, match="DeepseekV3Attention computes a temperature from mscale_all_dim"):
        patch(model, "dynamic_yarn:mscale=1,mscale_all_dim=1")
    assert snapshot(model) == before
