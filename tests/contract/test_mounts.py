"""What is decided where: mounts from slots, layouts from measurement."""

import pytest
import torch
from torch import nn

from rope_patch import InvalidField, NothingToPatch, UnsupportedModel, get_scheme, patch, plan_mounts
from rope_patch.attention.rotation import rotate
from rope_patch.models.find_stacks import read_stack
from rope_patch.models.probe import measure_layout
from rope_patch.schemes.tools.rotary import RotaryLayout
from tests.cases import ALL
from tests.families import FAMILIES, FOLLOWING, LLAMA_AND_SCALED, RUN, SHARED_TABLES, TRAINING_LENGTH, build
from tests.runs import LENGTH, assert_close, cached_logits, logits, tokens
from tests.snapshots import snapshot

HALVES = tuple(range(8)), tuple(range(8, 16))
NEIGHBOURS = tuple(range(0, 16, 2)), tuple(range(1, 16, 2))
QUARTERS = tuple(range(4)), tuple(range(4, 8))
BEHIND_THE_PLAIN_PART = tuple(range(16, 20)), tuple(range(20, 24))
FIRST_NEIGHBOURS = tuple(range(0, 8, 2)), tuple(range(1, 8, 2))
LAYOUTS = {
    **dict.fromkeys(FAMILIES, HALVES),
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe", "ernie4_5", "ernie4_5_moe", "helium"), NEIGHBOURS),
    **dict.fromkeys(("llama4_text", "llama4_normed"), NEIGHBOURS),
    "nanochat": HALVES[::-1],
    "deepseek_v2": (tuple(range(16, 24, 2)), tuple(range(17, 24, 2))),
    **dict.fromkeys(("gpt_neox", "glm4_moe", "laguna", "mimo_v2_flash", "nemotron"), QUARTERS),
    **dict.fromkeys(("persimmon", "phi", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "stablelm"), QUARTERS),
    **dict.fromkeys(("glm", "glm4"), FIRST_NEIGHBOURS),
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu"), BEHIND_THE_PLAIN_PART),
}
NO_POSITIONS = {
    **{"smollm3": [1, 3], "afmoe": [3], "cohere2": [3], "exaone4": [3], "exaone_moe": [3]},
    **{"llama4_text": [2], "llama4_normed": [2]},
}
NARROW = {"gemma2": [0], "gemma3": [0, 2], "gemma3_yarn": [0], "olmo3": [0, 2]}


@pytest.mark.parametrize(
    ("spec", "rotary", "late", "rotate_late"),
    [
        ("rope", True, False, False),
        ("yarn:factor=4", True, False, False),
        ("nope", True, False, False),
        ("dynamic_ntk:factor=2,length=64", True, False, False),
        ("dynamic_ntk:factor=2", False, True, True),
        ("rerope:window=6", False, True, True),
        ("leaky_rerope:window=6,factor=2", False, True, True),
        ("window:window=6", False, True, False),
        ("logn", False, True, False),
        ("alibi", True, True, False),
        ("rope+alibi", True, True, False),
        ("yarn:factor=4+logn", True, True, False),
        ("yarn:factor=4+rerope:window=6", True, True, True),
        ("dynamic_ntk:factor=2+logn", False, True, True),
    ],
)
def test_mounts_follow_from_slots(llama, spec, rotary, late, rotate_late):
    plan = plan_mounts(get_scheme(spec), read_stack(llama))
    assert (bool(plan.rotary), bool(plan.late), plan.rotation != "module") == (rotary, late, rotate_late)
    assert plan.late in ((), (0, 1))


@pytest.mark.parametrize("spec", ALL)
def test_late_is_obeyed(llama, spec):
    plan = plan_mounts(get_scheme(spec), read_stack(llama), "late")
    assert not plan.rotary
    assert plan.late == (0, 1)
    assert plan.rotation == "late"


@pytest.mark.parametrize(("family", "spec"), LLAMA_AND_SCALED)
def test_planning_changes_nothing(model, spec):
    before = snapshot(model)
    plan_mounts(get_scheme(spec), read_stack(model))
    assert snapshot(model) == before


@pytest.mark.parametrize("family", FOLLOWING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reading_a_model_changes_nothing_that_a_long_text_has_left(model, dtype):
    logits(model.to(dtype), tokens(3 * TRAINING_LENGTH))
    before = snapshot(model)
    read_stack(model)
    assert snapshot(model) == before


@pytest.mark.parametrize("family", RUN)
def test_layers_are_left_alone_for_a_reason(model, family):
    left = plan_mounts(get_scheme("rerope:window=6"), read_stack(model)).left_alone
    assert sorted(left) == (NO_POSITIONS | NARROW).get(family, [])
    for reason in left.values():
        assert reason.startswith("layer without positions" if family in NO_POSITIONS else "sliding window of 16")


def test_only_the_tables_of_full_attention_change():
    model = build("gemma3")
    rotary = model.model.rotary_emb
    sliding, full = rotary.sliding_attention_inv_freq.clone(), rotary.full_attention_inv_freq.clone()
    with patch(model, "pi", factor=4) as handle:
        assert handle.plan.rotary == ("full_attention",)
        assert torch.equal(rotary.sliding_attention_inv_freq, sliding)
        assert torch.equal(rotary.full_attention_inv_freq, full / 4)


@pytest.mark.parametrize("spec", ["rope", f"rerope:window={LENGTH}", f"leaky_rerope:window={LENGTH},factor=4"])
@pytest.mark.parametrize("mount", ["auto", "late"])
def test_layers_of_two_types_turn_by_tables_of_their_own(spec, mount):
    model = build("gemma3", sliding_window=TRAINING_LENGTH + 4)
    assert len({entry["rope_theta"] for entry in model.config.rope_parameters.values()}) == 2
    expected = logits(model, tokens())
    with patch(model, spec, mount=mount) as handle:
        assert not handle.plan.left_alone
        assert_close(logits(model, tokens()), expected)


@pytest.mark.parametrize("spec", ["rerope:window=6", "dynamic_ntk:factor=2", "logn:training_length=8"])
def test_positions_written_into_the_same_tensor_are_read_anew(llama, spec):
    ids, positions = tokens(12), torch.arange(12)[None]
    mask = torch.ones_like(ids)
    with patch(llama, spec):
        expected = logits(llama, ids, attention_mask=mask, position_ids=4 * positions)
        logits(llama, ids, attention_mask=mask, position_ids=positions)
        assert torch.equal(logits(llama, ids, attention_mask=mask, position_ids=positions.mul_(4)), expected)


@pytest.mark.parametrize("mode", ["auto", "oracle", "chunked", "segmented"])
@pytest.mark.parametrize("mount", ["auto", "late"])
def test_a_model_that_scales_its_scores_otherwise_is_heeded(llama, mount, mode):
    for layer in llama.model.layers:
        layer.self_attn.scaling *= 1.5
    expected = logits(llama, tokens())
    assert (logits(build(), tokens()) - expected).abs().max() > 1e-2
    with patch(llama, "rerope", window=LENGTH, mount=mount, attention=mode):
        assert_close(logits(llama, tokens()), expected)
        assert_close(cached_logits(llama, tokens(), [17, 1, LENGTH - 18]), expected)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("spec", ALL)
def test_dropout_of_all_attention_weights_leaves_no_attention(spec):
    model = build(attention_dropout=1.0)
    with patch(model, spec):
        found = logits(model.train(), tokens())
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    with patch(model, spec):
        assert_close(found, logits(model, tokens()))


@pytest.mark.parametrize("family", sorted(SHARED_TABLES))
def test_tables_that_also_serve_layers_left_alone_are_not_changed(model):
    before = model.model.rotary_emb.inv_freq.clone()
    with patch(model, "pi", factor=4) as handle:
        assert not handle.plan.rotary
        assert handle.plan.late == (1,)
        assert torch.equal(model.model.rotary_emb.inv_freq, before)


@pytest.mark.parametrize("window", [16, TRAINING_LENGTH])
def test_a_window_within_the_training_length_leaves_nothing_to_patch(window):
    model = build("mistral", sliding_window=window)
    before = snapshot(model)
    with pytest.raises(NothingToPatch, match=f"sliding window of {window} within the training length of 32"):
        patch(model, "rerope", window=6)
    with pytest.raises(NothingToPatch, match=r"^yarn:factor=4 would change no layer"):  # as it was typed
        patch(model, "yarn:factor=4")
    assert snapshot(model) == before


def test_a_window_that_is_wider_by_one_token_is_patched():
    stack = read_stack(build("mistral", sliding_window=TRAINING_LENGTH + 1))
    assert not plan_mounts(get_scheme("rerope:window=6"), stack).left_alone


@pytest.mark.parametrize("mount", ["Late", "rotary", "", None])
def test_an_unknown_mount_is_named(llama, mount):
    with pytest.raises(InvalidField, match="allowed: auto, late"):
        plan_mounts(get_scheme("rope"), read_stack(llama), mount)


@pytest.mark.parametrize("family", RUN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_layout_of_every_family_is_measured(model, family, dtype):
    before = snapshot(model.to(dtype).train())
    layers = read_stack(model).layers
    assert snapshot(model) == before
    for layer in layers:
        if layer.index in NO_POSITIONS.get(family, []):
            assert layer.layout is None
        else:
            assert (layer.layout.first, layer.layout.second) == LAYOUTS[family]


@pytest.mark.parametrize("name", ["half_split", "interleaved", "scattered", "whole_head"])
def test_every_layout_rotates_its_pairs(name):
    first, second = {
        "half_split": ((1, 2), (3, 4)),
        "interleaved": ((0, 2), (1, 3)),
        "scattered": ((0, 5), (3, 1)),
        "whole_head": ((0, 1, 2), (3, 4, 5)),
    }[name]
    layout = RotaryLayout(first, second)
    x, angle = torch.randn(2, 3, 7, 6, dtype=torch.float64), torch.randn(2, 1, 7, len(first), dtype=torch.float64)
    expected = x.clone()
    for pair, (a, b) in enumerate(zip(first, second, strict=True)):
        turned = torch.complex(x[..., a], x[..., b]) * torch.exp(1j * angle[..., pair])
        expected[..., a], expected[..., b] = turned.real, turned.imag
    torch.testing.assert_close(layout.rotate(x, angle.cos(), angle.sin()), expected)
    torch.testing.assert_close(layout.rotate_in_graph(x, layout.wide(angle.cos(), 6), angle.sin()), expected)
    eye, exchange = layout.basis(x)
    cos, sin = (layout.wide(table[:, :, :1], 6) for table in (angle.cos(), angle.sin()))
    matrix = eye * cos + exchange * sin
    of_first = x[:, :, :1] @ matrix
    torch.testing.assert_close(of_first, expected[:, :, :1])
    few, tables = x[:, :, :2].requires_grad_(), (layout.wide(angle.cos(), 6)[:, :, :2], angle.sin()[:, :, :2])
    assert torch.autograd.gradcheck(lambda states: rotate(layout, states, *tables), few)
    assert torch.autograd.gradgradcheck(lambda states: rotate(layout, states, *tables), few)


class Spoilt(nn.Module):
    """An attention module that does something to queries and keys after they were rotated."""

    def __init__(self, attention: nn.Module, spoil) -> None:
        super().__init__()
        self.attention, self.spoil = attention, spoil
        self.config, self.layer_idx = attention.config, attention.layer_idx
        self.head_dim = attention.head_dim

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        query, key, value = (
            projection(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.attention.q_proj, self.attention.k_proj, self.attention.v_proj)
        )
        query, key = self.spoil(*apply_rotary_pos_emb(query, key, *position_embeddings))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        return attend(self, query, key, value, attention_mask, scaling=0.25)


def spoilt(llama, spoil):
    module = Spoilt(llama.model.layers[0].self_attn, spoil)
    return measure_layout("attention", module, read_stack(llama).rotary[0])[0]


def test_an_attention_of_the_same_form_that_spoils_nothing_is_measured(llama):
    layout = spoilt(llama, lambda query, key: (query, key))
    assert (layout.first, layout.second) == HALVES


SPOILS = {
    "a norm": lambda q, k: (nn.functional.rms_norm(q, (16,), torch.linspace(0.5, 2, 16)), k),
    "a norm of keys": lambda q, k: (q, nn.functional.rms_norm(k, (16,), torch.linspace(0.5, 2, 16))),
    "a weight": lambda q, k: (q * torch.linspace(0.5, 2, 16), k),
    "another layout": lambda q, k: (q, k.flip(-1)),
    "a shared offset": lambda q, k: (q + 1, k + 1),
    "a mixture": lambda q, k: (q + q.roll(1, -1), k + k.roll(1, -1)),
}


@pytest.mark.parametrize("what", SPOILS)
def test_what_follows_the_rotation_is_refused(llama, what):
    with pytest.raises(UnsupportedModel, match=r"^attention: "):
        spoilt(llama, SPOILS[what])
