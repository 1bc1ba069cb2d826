"""Positions with a pair axis: DPE's rule, where every group of pairs counts far tokens in steps of its own.

Source of the rule: "Effective Length Extrapolation via Dimension-Wise Positional Embeddings Manipulation", 2504.18857.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers import StaticCache

from rope_patch import Compose, Scheme, describe, get_scheme, patch
from rope_patch.attention import behind_cache, engine
from rope_patch.attention.executors import chunked
from rope_patch.description import rotated_distance
from rope_patch.schemes import Region
from rope_patch.schemes.base import Source
from rope_patch.schemes.tools.positions import Constant, Grouped, Identity, PerPair, pairs_of
from rope_patch.schemes.tools.rotary import rotation_tables
from tests.definition import Definition, defined_logits
from tests.families import build
from tests.runs import (
    assert_close,
    assert_same_gradients,
    cached_logits,
    generated,
    gradients,
    left_padded,
    logits,
    positions_of,
    tokens,
)
from tests.schemes.regions import rotated_distances

WINDOW = 7
STEPS, SIZES = (1, 2, 4, 3), (2, 1, 3, 2)
"""Steps of each group of pairs, in tokens, and how many of the 8 pairs it has."""

MODES = ["oracle", "chunked", "segmented", "auto"]


@dataclass(frozen=True)
class GroupsOfPairs(Scheme):
    """Self-Extend for each group of pairs."""

    name = "groups_of_pairs"
    equation = "m - n if m - n < w, else floor(m/s_g) - floor(n/s_g) + w - floor(w/s_g)"
    source = Source("a scheme of this test", 2026, "")

    window: int = WINDOW
    steps: tuple[int, ...] = STEPS
    sizes: tuple[int, ...] = SIZES

    def segments(self):
        w = self.window
        moved = PerPair(tuple(Grouped(s, shift=w - w // s) for s in self.steps), self.sizes)
        plain = PerPair(tuple(Grouped(s) for s in self.steps), self.sizes)
        return (
            Region(Identity(), Identity(), start=1 - w, stop=w),
            Region(moved, plain, start=w),
            Region(plain, moved, stop=1 - w),
        )


@dataclass(frozen=True)
class CappedPairs(Scheme):
    """ReRoPE on the slow pairs alone: only queries have a pair axis, and the slow pairs of far keys stay at 0."""

    name = "capped_pairs"
    equation = "m - n if m - n < w, else m - n of fast pairs and w of slow ones"
    source = Source("a scheme of this test", 2026, "")

    window: int = WINDOW
    kept: int = 3

    def segments(self):
        w, sizes = self.window, (self.kept, 8 - self.kept)
        return (
            Region(Identity(), Identity(), start=1 - w, stop=w),
            Region(PerPair((Identity(), Constant(w)), sizes), PerPair((Identity(), Constant(0)), sizes), start=w),
            Region(PerPair((Identity(), Constant(0)), sizes), PerPair((Identity(), Constant(w)), sizes), stop=1 - w),
        )


def groups_of_pairs(m, n):
    """The rule, `(q, k, d/2)`."""
    w, s = WINDOW, np.repeat(STEPS, SIZES)
    m, n = m[..., None], n[..., None]
    return np.where(m - n < w, m - n, m // s - n // s + w - w // s)


def capped_pairs(m, n):
    """ReRoPE from pair 3 on, `(q, k, d/2)`."""
    distance = (m - n)[..., None]
    return np.where((distance < WINDOW) | (np.arange(8) < 3), distance, WINDOW)


RULES = [(GroupsOfPairs(), groups_of_pairs), (CappedPairs(), capped_pairs)]
NAMES = [scheme.name for scheme, _ in RULES]


def single_step(m, n):
    return np.where(m - n < WINDOW, m - n, m // 4 + WINDOW - WINDOW // 4 - n // 4)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Let tiny texts take the ways that are meant for long ones."""
    monkeypatch.setattr(chunked, "SCORES_PER_BLOCK", 300)
    monkeypatch.setattr(behind_cache, "SMALL", 16)


# --- maps and tables -------------------------------------------------------------------------------------------------


def test_a_map_returns_one_position_for_every_pair():
    phi = PerPair((Identity(), Grouped(4, shift=0.5), Constant(3)), (1, 2, 1))
    found = phi(torch.tensor([[0, 5, 11]]))
    assert (phi.pairs, pairs_of(phi), pairs_of(Identity()), pairs_of(lambda m: m)) == (4, 4, None, None)
    assert found.tolist() == [[[0, 0.5, 0.5, 3], [5, 1.5, 1.5, 3], [11, 2.5, 2.5, 3]]]


@pytest.mark.parametrize(("scheme", "rule"), RULES, ids=NAMES)
def test_regions_hold_the_rule(scheme, rule):
    m, n, found = rotated_distances(scheme)
    seen = m >= n
    assert torch.equal(found[seen], torch.tensor(rule(m.numpy(), n.numpy()))[seen].double())
    assert torch.equal(found, -found.transpose(0, 1))


def test_maps_of_a_region_may_differ():
    m, n = torch.tensor([[9], [4]]), torch.tensor([[1, 2, 3]])
    by_pair = PerPair((Identity(), Constant(5)), (1, 1))
    for region, expected in (
        (Region(by_pair, Identity()), torch.stack([m - n, 5 - n.expand(2, -1)], dim=-1)),
        (Region(Identity(), by_pair), torch.stack([m - n, (m - 5).expand(-1, 3)], dim=-1)),
    ):
        assert region.pairs == 2
        assert torch.equal(region.rotated_distance(m, n), expected.float())
    assert Region(Identity(), Identity()).pairs is None
    assert torch.equal(Region(Identity(), Identity()).rotated_distance(m, n), m - n)


@pytest.mark.parametrize("shape", [(2, 5), (2, 3, 5)])
@pytest.mark.parametrize("rows", [None, 2])
def test_tables_of_positions_with_a_pair_axis(shape, rows):
    inv_freq = torch.rand((8,) if rows is None else (rows, 8))
    positions = torch.randint(0, 50, shape)
    expected = rotation_tables(positions, inv_freq, 1.5, torch.float32)
    repeated = positions[..., None].expand(*shape, 8)
    found = rotation_tables(repeated, inv_freq, 1.5, torch.float32, by_pair=True)
    assert all(map(torch.equal, found, expected))
    steps = torch.arange(8)
    cos, sin = rotation_tables(repeated * steps, inv_freq, 1.5, torch.float32, by_pair=True)
    angles = (repeated * steps).double() * inv_freq.double().view(-1, *[1] * (len(shape) - 1), 8)
    heads = angles if len(shape) == 3 else angles[:, None]
    torch.testing.assert_close(cos.double(), 1.5 * heads.cos(), rtol=0, atol=1e-4)
    torch.testing.assert_close(sin.double(), 1.5 * heads.sin(), rtol=0, atol=1e-4)


def test_the_distance_of_a_pair_is_a_range():
    assert rotated_distance(GroupsOfPairs(), 40, 38) == "2"
    assert rotated_distance(GroupsOfPairs(), 40, 1) == "16 to 39"


# --- a model ---------------------------------------------------------------------------------------------------------


def full(model, ids):
    return logits(model, ids)


def token_by_token(model, ids):
    return cached_logits(model, ids, [1] * ids.shape[1])


def uneven_chunks(model, ids):
    return cached_logits(model, ids, [9, 1, 13, 2, ids.shape[1] - 25])


def static_cache(model, ids):
    cache = StaticCache(config=model.config, max_cache_len=ids.shape[1] + 3)
    return cached_logits(model, ids, [9, 1, 1, ids.shape[1] - 11], cache=cache)


def padded(model, ids, sizes=None):
    batch, mask = left_padded([ids, tokens(ids.shape[1] + 5, seed=1)])
    if sizes is None:
        return logits(model, batch, attention_mask=mask, position_ids=positions_of(mask))[:1, 5:]
    return cached_logits(model, batch, [*sizes, batch.shape[1] - sum(sizes)], mask)[:1, 5:]


def padded_cached(model, ids):
    return padded(model, ids, [11, 1, 1])


WAYS = [full, token_by_token, uneven_chunks, static_cache, padded, padded_cached]


@pytest.mark.parametrize("family", ["llama", "llama_mha"])
@pytest.mark.parametrize("attention", MODES)
@pytest.mark.parametrize(("scheme", "rule"), RULES, ids=NAMES)
def test_logits_are_those_of_the_definition(family, attention, scheme, rule):
    model, ids = build(family), tokens()
    expected = defined_logits(model, ids, Definition(distance=rule)).float()
    wrong = defined_logits(model, ids, Definition(distance=single_step)).float()
    assert (wrong - expected).abs().max() > 1e-2
    with patch(model, scheme, attention=attention):
        for way in WAYS:
            assert_close(way(model, ids), expected, 1e-4)


@pytest.mark.parametrize(("scheme", "rule"), RULES, ids=NAMES)
def test_unrotated_keys_give_the_same(llama, scheme, rule):
    expected = defined_logits(llama, tokens(), Definition(distance=rule)).float()
    with patch(llama, scheme, mount="late"):
        for way in WAYS:
            assert_close(way(llama, tokens()), expected, 1e-4)


@pytest.mark.parametrize("beside", ["yarn:factor=4", "logn:training_length=8", "dynamic_ntk", "xpos:scale_base=8"])
def test_beside_other_schemes(llama, beside):
    scheme, ids = Compose(GroupsOfPairs(), get_scheme(beside)), tokens(28, rows=2)
    with patch(llama, scheme, attention="oracle", mount="late"):
        expected = logits(llama, ids)
    with patch(llama, scheme):
        for way in (full, token_by_token, uneven_chunks):
            assert_close(way(llama, ids), expected, 1e-4)


def test_equal_steps_are_self_extend(llama):
    ids = tokens()
    with patch(llama, "self_extend:group_size=4,window=7"):
        expected = logits(llama, ids)
        words = generated(llama, ids)
    with patch(llama, GroupsOfPairs(steps=(4, 4), sizes=(3, 5))):
        assert_close(logits(llama, ids), expected)
        assert torch.equal(generated(llama, ids), words)


@pytest.mark.parametrize("attention", MODES[1:])
def test_gradients(llama, attention):
    with patch(llama, GroupsOfPairs(), attention="oracle", mount="late"):
        expected = gradients(llama, tokens(rows=2))
    with patch(llama, GroupsOfPairs(), attention=attention):
        assert_same_gradients(gradients(llama, tokens(rows=2)), expected)


@pytest.mark.parametrize("attention", MODES)
def test_bfloat16(llama, attention):
    llama.bfloat16().float()  # its weights are rounded, so that only the arithmetic differs
    expected = defined_logits(llama, tokens(), Definition(distance=groups_of_pairs)).float()
    with patch(llama.bfloat16(), GroupsOfPairs(), attention=attention):
        for way in (full, uneven_chunks):
            found = way(llama, tokens()).float()
            assert (found - expected).norm() / expected.norm() < 0.03


@pytest.mark.parametrize("scheme", [scheme for scheme, _ in RULES], ids=NAMES)
def test_the_tables_of_the_fused_kernel_rotate_alike(llama, scheme, monkeypatch):
    calls, score = [], engine.score
    monkeypatch.setattr(engine, "score", lambda problem: calls.append(problem) or score(problem))
    with patch(llama, scheme):
        full(llama, tokens())
    problem, turner = calls[0], calls[0].turner
    fused = turner.fused(problem.query, problem.key, in_order=True)

    def rotated(x, table):
        cos, sin = table
        return x * cos + x[..., fused.partner] * sin

    assert len(turner.regions) == 2
    for region, of_query, of_key in zip(turner.regions, fused.query_tables, fused.key_tables, strict=True):
        assert_close(rotated(problem.query, of_query), turner.turn(problem.query, region, "query"))
        assert_close(rotated(problem.key, of_key), turner.turn(problem.key, region, "key"))


def test_it_is_described(llama):
    with patch(llama, GroupsOfPairs()):
        assert "(128, 0): " in describe(llama)
        assert " to 128" in describe(llama)
