"""Schemes on the ALiBi kind, whose own positions are a bias."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rope_patch import ALiBi, LogN, NoPE, ReRoPE, RoPE, Sandwich, patch, unpatch
from rope_patch.models.baichuan import register_baichuan
from tests.models.baichuan_folders import TRAINING_LENGTH, VARIANTS, write_folder
from tests.runs import assert_close, cached_logits, generated, greedy, left_padded, logits, positions_of, tokens

LENGTH = 2 * TRAINING_LENGTH


@pytest.fixture(autouse=True)
def _registered():
    register_baichuan()


@pytest.fixture(params=["baichuan_13b", "baichuan2_13b"])
def variant(request):
    return VARIANTS[request.param]


@pytest.fixture
def load(variant, tmp_path):
    write_folder(tmp_path, variant)
    return lambda **options: AutoModelForCausalLM.from_pretrained(tmp_path, **options).eval()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_its_own_scheme_changes_nothing(load, attention):
    model, ids = load(attn_implementation=attention), tokens(LENGTH)
    plain = logits(model, ids)
    with patch(model, ALiBi()):
        assert_close(logits(model, ids), plain)
        assert_close(cached_logits(model, ids, (20, 1, LENGTH - 21)), plain)
    assert torch.equal(logits(model, ids), plain)


def test_rotation_stands_in_place_of_the_bias(load, variant, tmp_path):
    model, ids = load(), tokens(LENGTH)
    write_folder(tmp_path / "rotary", variant, position_embedding_type="rope")
    rotary = AutoModelForCausalLM.from_pretrained(tmp_path / "rotary").eval()
    patch(model, RoPE())
    assert_close(logits(model, ids), logits(rotary, ids))
    patch(rotary, ReRoPE(window=8))
    unpatch(model)
    patch(model, ReRoPE(window=8))
    assert_close(logits(model, ids), logits(rotary, ids))


def test_no_positions_are_a_penalty_of_zero(load):
    model, ids = load(), tokens(LENGTH)
    patch(model, NoPE())
    without = logits(model, ids)
    unpatch(model)
    patch(model, ALiBi(slopes=(1e-9,) * model.config.num_attention_heads))
    assert_close(logits(model, ids), without)


@pytest.mark.parametrize("scheme", [LogN(), Sandwich()], ids=str)
def test_what_does_not_rotate_is_told_from_the_plain_model_and_generates(load, scheme):
    model = load()
    rows = [tokens(LENGTH, seed=1), tokens(9, seed=2)]
    plain = logits(model, rows[0])
    patch(model, scheme)
    assert (logits(model, rows[0]) - plain).abs().max() > 1e-3
    ids, mask = left_padded(rows)
    batch = logits(model, ids, attention_mask=mask, position_ids=positions_of(mask))
    for row, states in zip(rows, batch, strict=True):
        assert_close(states[None, -row.shape[1] :], logits(model, row))
    for row, found in zip(rows, generated(model, ids, attention_mask=mask, eos_token_id=None), strict=True):
        assert torch.equal(found[None], greedy(model, row))


def test_a_query_scale_keeps_the_bias(load):
    model, ids = load(), tokens(TRAINING_LENGTH)
    plain = logits(model, ids)
    with patch(model, LogN()):  # which is one up to the training length
        assert_close(logits(model, ids), plain)


def test_attention_of_a_scheme_is_called_through_the_interface(load, monkeypatch):
    model, seen = load(), []

    def attention(module, query, key, value, mask, scaling, position_ids, **kwargs):
        seen.append((module.layer_idx, position_ids.tolist(), "start" in kwargs))
        return value.transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "rope_patch_test", attention)
    monkeypatch.setitem(
        ALL_MASK_ATTENTION_FUNCTIONS._local_mapping, "rope_patch_test", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    )
    model.set_attn_implementation("rope_patch_test")
    model(torch.tensor([[3, 4, 5]]))
    assert seen == [(0, [[0, 1, 2]], False), (1, [[0, 1, 2]], False)]
