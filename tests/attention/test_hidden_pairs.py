"""A bias of -inf hides pairs, in every path; a query that sees nothing gets zeros and gradients without NaN."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from transformers import DynamicCache

from rope_patch import Scheme, patch
from rope_patch.attention import behind_cache, engine
from rope_patch.attention.bias import DiagonalTerm
from rope_patch.attention.executors import chunked, traced
from rope_patch.attention.pieces import Tile
from rope_patch.attention.problem import Problem
from rope_patch.attention.terms import DistanceBias
from rope_patch.attention.tile_kernels import Dense, FlashCPU, Work
from tests.attention.problems import whole
from tests.families import build
from tests.runs import left_padded, positions_of, tokens

LENGTH = 45
ROWS = {
    "plain": [[0] * LENGTH],
    "left pads": [[0] * LENGTH, [-1] * 9 + [0] * 36],
    "right pads": [[0] * LENGTH, [0] * 36 + [-1] * 9],
}


def near(distance):
    """Head windows of 3, 10, 30 and all keys."""
    widths = torch.tensor([3, 10, 30, 10**6]).view(-1, *[1] * distance.ndim)
    return torch.where(distance.abs() < widths, -0.1 * distance.abs(), -torch.inf)


def far(distance):
    """Heads that hide near keys: the first queries see nothing."""
    least = torch.tensor([5, 0, 30, 20]).view(-1, *[1] * distance.ndim)
    return torch.where(distance.abs() >= least, -0.1 * distance.abs(), -torch.inf)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(behind_cache, "SMALL", 0)
    monkeypatch.setattr(chunked, "SCORES_PER_BLOCK", 300)
    monkeypatch.setattr(Dense, "rows", 5)
    monkeypatch.setattr(DiagonalTerm, "rows", 16)


def formula(states, bias, seen):
    """Softmax over the pairs that are left, zeros where none is."""
    query, key, value = states
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    scores = (query @ key.mT * 0.3 + bias).masked_fill(~seen, -torch.inf)
    weights = (scores - scores.amax(dim=-1, keepdim=True).clamp(min=-1e30)).exp()
    return weights @ value / weights.sum(dim=-1, keepdim=True).clamp(min=1e-30)


def call_of(rows, bias, q_length, dtype, causal, kv_heads=2, masked=None):
    """A random call as `engine.score` takes it, its states, and the pairs that its queries may see."""
    groups, start = torch.tensor(ROWS[rows]), LENGTH - q_length
    random = torch.Generator().manual_seed(0)
    states = [
        torch.randn(len(groups), heads, length, 16, generator=random, dtype=torch.float64).to(dtype)
        for heads, length in ((4, q_length), (kv_heads, LENGTH), (kv_heads, LENGTH))
    ]
    slots = torch.arange(LENGTH)
    seen = ((groups[:, start:, None] == groups[:, None]) | (groups[:, start:, None] < 0)) & (groups[:, None] >= 0)
    seen = (seen & (slots[start:, None] >= slots) if causal else seen)[:, None]
    positions = slots - (groups >= 0).int().argmax(dim=-1, keepdim=True)
    additive = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    mask = {None: None, "boolean": seen, "additive": additive}[masked]
    inputs = Problem(
        (), states[2], positions[:, start:], positions, mask, causal and q_length > 1, start, 0.3, DistanceBias(bias),
        groups=groups if mask is None and len(groups) > 1 else None,
    )  # fmt: skip
    return inputs, states, seen, bias(slots[start:, None] - slots)


TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 0.03}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("q_length", [LENGTH, 20, 1])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bias", [near, far])
@pytest.mark.usefixtures("small_blocks")
def test_every_path_is_the_formula(bias, rows, q_length, dtype):
    ways = [("auto", None, 4), ("segmented", None, 2), ("chunked", "boolean", 2), ("oracle", "additive", 2)]
    for (mode, masked, kv_heads), causal in [(way, True) for way in ways] + [(way, False) for way in ways]:
        if not causal and q_length < LENGTH:
            continue
        inputs, states, seen, term = call_of(rows, bias, q_length, dtype, causal, kv_heads, masked)
        kept = (torch.tensor(ROWS[rows])[:, -q_length:] >= 0)[:, None, :, None]
        found = engine.score(whole(inputs, *states[:2], mode))[0]
        expected = formula([x.double() for x in states], term, seen) * kept
        torch.testing.assert_close(found.double() * kept, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
        toward = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(dtype) * kept
        leaves, doubles = ([x.to(of).requires_grad_() for x in states] for of in (dtype, torch.float64))
        found = engine.score(whole(dataclasses.replace(inputs, value=leaves[2]), *leaves[:2], mode))[0]
        ours = torch.autograd.grad(found, leaves, toward)
        theirs = torch.autograd.grad(formula(doubles, term, seen), doubles, toward.double())
        for one, other in zip(ours, theirs, strict=True):
            assert (one - other).norm() <= TOLERANCES[dtype] * other.norm()


@pytest.mark.parametrize("bias", [near, far])
def test_a_small_call_by_the_attention_of_pytorch(bias):
    for rows in ROWS:
        for masked in (None, "boolean", "additive"):
            inputs, states, seen, term = call_of(rows, bias, LENGTH, torch.float32, True, 4, masked)
            kept = (torch.tensor(ROWS[rows]) >= 0)[:, None, :, None]
            leaves = [x.requires_grad_() for x in states]
            found = engine.score(whole(dataclasses.replace(inputs, value=leaves[2]), *leaves[:2]))[0]
            torch.testing.assert_close(found * kept, formula(states, term, seen) * kept, atol=1e-5, rtol=1e-5)
            assert all(x.isfinite().all() for x in torch.autograd.grad((found * kept).sum(), leaves))


@pytest.mark.parametrize("bias", [near, far])
@pytest.mark.parametrize("length", [4, LENGTH])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_one_query_in_a_graph(bias, length, dtype):
    """With the empty tail of a static cache."""
    inputs, states, seen, _ = call_of("plain", bias, 1, dtype, True)
    inputs = dataclasses.replace(
        inputs, query_positions=torch.tensor([[length - 1]]), query_start=torch.tensor(length - 1), mask=seen
    )
    found = traced.attend(whole(inputs, *states[:2]))[0]
    assert found.dtype == dtype
    term, exists = bias(length - 1 - torch.arange(LENGTH))[:, None], torch.arange(LENGTH) < length
    expected = formula([x.double() for x in states], term, seen & exists)
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("kernel", [Dense(), FlashCPU()], ids=lambda kernel: type(kernel).__name__)
def test_a_hidden_row_of_a_tile_weighs_nothing_beside_another_tile(kernel):
    query, key = torch.randn(2, 1, 2, 600, 16, generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(1, 2, 600, 600)
    mask[:, 1, 100:200] = mask[:, :, 300, :550] = -torch.inf
    out, lse = kernel.forward(Work(query, key, key, Tile(0, 600, 0, 600), 0.1, mask))
    assert not out[:, 1, 100:200].any()
    assert (lse[:, 1, 100:200] == torch.finfo(torch.float32).min).all()
    torch.testing.assert_close(lse[:, :, 300], (query[:, :, 300:301] @ key[:, :, 550:].mT * 0.1).logsumexp(-1)[..., 0])


@dataclass(frozen=True)
class HeadWindows(Scheme):
    """Another window for each head."""

    name = "head_windows"

    def bias(self, distance, num_heads, weights=None):
        return near(distance)


@torch.no_grad()
def test_a_model_with_a_cache_and_a_chunk_beyond_small_calls():
    found = []
    for attention in ("oracle", "auto"):
        model = build("llama")
        patch(model, HeadWindows(), attention=attention)
        batch, mask = left_padded([tokens(1200), tokens(1100, seed=1)])
        assert behind_cache.SMALL < 500 * 1200
        cache, positions, logits = DynamicCache(config=model.config), positions_of(mask), []
        for part in (slice(0, 699), slice(699, 1199), slice(1199, 1200)):
            given = {"attention_mask": mask[:, : part.stop], "position_ids": positions[:, part]}
            logits.append(model(batch[:, part], past_key_values=cache, **given).logits)
        found.append(torch.cat(logits, dim=1) * mask[..., None])
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
