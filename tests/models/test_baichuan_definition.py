"""Logits of the native classes against a forward in float64 that shares no code with the package."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, StaticCache

from rope_patch.models.baichuan import register_baichuan
from tests.models.baichuan_folders import TRAINING_LENGTH, VARIANTS, VOCABULARY, Variant, write_folder
from tests.runs import assert_close, cached_logits, left_padded, logits, positions_of

Array = np.ndarray

LONG = 2 * TRAINING_LENGTH + 7
HEADS = (4, 5, 10, 40)


def slopes_of(heads: int) -> list[float]:
    """The recursion of the ALiBi paper's authors."""
    if heads & (heads - 1) == 0:
        first = 2 ** (-8 / heads)
        return [first ** (index + 1) for index in range(heads)]
    below = 1 << (heads.bit_length() - 1)
    return slopes_of(below) + slopes_of(2 * below)[::2][: heads - below]


def defined_logits(weights: dict[str, torch.Tensor], config: dict[str, Any], ids: torch.Tensor) -> torch.Tensor:
    """Logits of one row of tokens, `(1, length, vocabulary)`, from published names and fields."""
    w = {name: tensor.double().numpy() for name, tensor in weights.items()}
    heads, width, eps = config["num_attention_heads"], config["hidden_size"], config["rms_norm_eps"]
    rotary, head_dim = "max_position_embeddings" in config, config["hidden_size"] // config["num_attention_heads"]
    x = w["model.embed_tokens.weight"][ids.flatten().numpy()]
    m = np.arange(len(x))
    hidden = np.where(m[:, None] >= m[None, :], 0.0, -np.inf)
    bias = np.zeros((heads, 1, 1)) if rotary else -np.array(slopes_of(heads))[:, None, None] * (m[:, None] - m[None, :])
    turn = np.exp(1j * m[:, None] * 10000.0 ** (-np.arange(0, head_dim, 2) / head_dim))

    def norm(x: Array, name: str) -> Array:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w[f"{name}.weight"]

    def rotated(x: Array) -> Array:
        if not rotary:
            return x
        pairs = (x[..., : head_dim // 2] + 1j * x[..., head_dim // 2 :]) * turn
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        packed = norm(x, f"{layer}.input_layernorm") @ w[f"{layer}.self_attn.W_pack.weight"].T
        q, k, v = packed.reshape(len(x), 3, heads, head_dim).transpose(1, 2, 0, 3)
        scores = rotated(q) @ rotated(k).transpose(0, 2, 1) / np.sqrt(head_dim) + bias + hidden
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        x = x + (shares @ v).transpose(1, 0, 2).reshape(len(x), width) @ w[f"{layer}.self_attn.o_proj.weight"].T
        normed = norm(x, f"{layer}.post_attention_layernorm")
        gate = normed @ w[f"{layer}.mlp.gate_proj.weight"].T
        up = normed @ w[f"{layer}.mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{layer}.mlp.down_proj.weight"].T
    head = w["lm_head.weight"]
    if config.get("normalize_lm_head"):
        head = head / np.linalg.norm(head, axis=1, keepdims=True)
    return torch.tensor(norm(x, "model.norm") @ head.T)[None]


@dataclasses.dataclass(frozen=True)
class Case:
    """A loaded folder and its definition."""

    model: PreTrainedModel
    weights: dict[str, torch.Tensor]
    config: dict[str, Any]

    def expected(self, ids: torch.Tensor) -> torch.Tensor:
        return defined_logits(self.weights, self.config, ids)


def load_case(folder: Path, variant: Variant, **options: Any) -> Case:
    register_baichuan()
    weights = write_folder(folder, variant)
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    return Case(model, weights, json.loads((folder / "config.json").read_text()))


@pytest.fixture(params=["sdpa", "eager"])
def attention(request):
    return request.param


@pytest.fixture(params=VARIANTS)
def case(request, tmp_path, attention):
    return load_case(tmp_path, VARIANTS[request.param], attn_implementation=attention)


def tokens(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("length", [1, TRAINING_LENGTH, LONG])
def test_a_full_forward(case, length):
    ids = tokens(length)
    assert_close(logits(case.model, ids).double(), case.expected(ids))


@pytest.mark.parametrize("sizes", [(9, 1, 6, 1, 5), (1,) * 12, (20, LONG - 20)])
def test_a_cache_in_steps(case, sizes):
    ids = tokens(sum(sizes))
    assert_close(cached_logits(case.model, ids, sizes).double(), case.expected(ids))


def test_a_static_cache(case):
    ids = tokens(LONG)
    cache = StaticCache(config=case.model.config, max_cache_len=LONG + 5)
    assert_close(cached_logits(case.model, ids, (20, 1, LONG - 21), cache=cache).double(), case.expected(ids))


def test_left_pads_are_invisible(case):
    rows = [tokens(LONG, 1), tokens(9, 2), tokens(20, 3)]
    ids, mask = left_padded(rows)
    found = {
        "full": logits(case.model, ids, attention_mask=mask, position_ids=positions_of(mask)),
        "in steps": cached_logits(case.model, ids, (25, 1, LONG - 26), mask=mask),
    }
    for batch in found.values():
        for row, states in zip(rows, batch, strict=True):
            assert_close(states[None, -row.shape[1] :].double(), case.expected(row))


def test_right_pads_are_invisible(case):
    rows = [tokens(LONG, 1), tokens(9, 2)]
    ids = torch.cat([torch.nn.functional.pad(row, (0, LONG - row.shape[1])) for row in rows])
    batch = logits(case.model, ids, attention_mask=(ids != 0).long())
    for row, states in zip(rows, batch, strict=True):
        assert_close(states[None, : row.shape[1]].double(), case.expected(row))


def test_documents_of_a_packed_row_do_not_see_each_other(case):
    rows = [tokens(13, 1), tokens(LONG, 2), tokens(5, 3)]
    ids = torch.cat(rows, dim=1)
    positions = torch.cat([torch.arange(row.shape[1]) for row in rows])[None]
    found = logits(case.model, ids, position_ids=positions).split([row.shape[1] for row in rows], dim=1)
    for row, states in zip(rows, found, strict=True):
        assert_close(states.double(), case.expected(row))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", ["baichuan_13b", "baichuan2_13b"])
def test_alibi_of_any_head_count(tmp_path, name, heads):
    case = load_case(tmp_path, dataclasses.replace(VARIANTS[name], heads=heads, head_dim=4))
    ids = tokens(LONG)
    assert_close(logits(case.model, ids).double(), case.expected(ids))
    assert_close(cached_logits(case.model, ids, (LONG - 3, 1, 2)).double(), case.expected(ids))


def test_alibi_over_more_pairs_than_one_block(tmp_path):
    case = load_case(tmp_path, VARIANTS["baichuan_13b"])
    rows = [tokens(700, 1), tokens(600, 2)]
    ids, mask = left_padded(rows)
    batch = logits(case.model, ids, attention_mask=mask, position_ids=positions_of(mask))
    for row, states in zip(rows, batch, strict=True):
        assert_close(states[None, -row.shape[1] :].double(), case.expected(row))


def test_alibi_knows_distances_alone(tmp_path):
    case = load_case(tmp_path, VARIANTS["baichuan_13b"])
    ids = tokens(LONG)
    far = torch.arange(LONG)[None] + 3_000_000
    assert_close(logits(case.model, ids, position_ids=far), logits(case.model, ids))
