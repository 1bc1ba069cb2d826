from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rope_patch import patch
from rope_patch.attention import chunked
from rope_patch.errors import EvaluationError
from rope_patch.finetuning.in_memory import MemoryRows
from rope_patch.finetuning.pose import PoSE, pose_positions
from rope_patch.finetuning.rows import RowSettings, lay_out, seeded
from tests.definition import Definition, defined_logits
from tests.evaluation.conftest import tiny_llama

SETTINGS = RowSettings(length=16, batch_size=2, layout="padded", allow_short=True, positions=PoSE(64))


def chunks_of(positions: torch.Tensor) -> list[list[int]]:
    """Runs of consecutive positions."""
    found = [[positions[0].item()]]
    for before, here in pairwise(positions.tolist()):
        if here == before + 1:
            found[-1].append(here)
        else:
            found.append([here])
    return found


@pytest.mark.parametrize("chunks", [1, 2, 3, 16])
def test_chunks_keep_their_order_and_their_own_positions(chunks):
    for seed in range(200):
        positions = pose_positions(16, 64, chunks, seeded(seed))
        assert positions.dtype == torch.int64
        assert positions[0] == 0
        assert (positions.diff() >= 1).all()
        assert positions[-1] < 64
        # the skip u of each token never falls and never exceeds what is left to skip
        skips = positions - torch.arange(16)
        assert (skips.diff() >= 0).all()
        assert skips.max() <= 64 - 16
        assert len(chunks_of(positions)) <= chunks


def test_cuts_and_skips_of_two_chunks_are_uniform():
    draws = 20_000
    random = torch.Generator().manual_seed(0)
    counted = Counter()
    for _ in range(draws):
        (*_, last) = chunks = chunks_of(pose_positions(4, 7, 2, random))
        counted[len(chunks[0]) if len(chunks) > 1 else None, last[-1] - 3] += 1
    # three places of the cut and four skips: twelve outcomes, three of which leave no trace
    for cut in (1, 2, 3):
        for skip in (1, 2, 3):
            assert abs(counted[cut, skip] - draws / 12) < 5 * (draws / 12) ** 0.5
    assert abs(counted[None, 0] - draws / 4) < 5 * (draws / 4) ** 0.5


def test_every_distance_below_the_target_is_met():
    met = set()
    for seed in range(3000):
        positions = pose_positions(16, 64, 2, seeded(seed))
        met |= set((positions[:, None] - positions[None]).flatten().tolist())
    assert met >= set(range(64))


def test_a_target_of_the_same_length_skips_nothing():
    assert pose_positions(16, 16, 2, seeded(0)).tolist() == list(range(16))
    assert pose_positions(1, 64, 2, seeded(0)).tolist() == [0]


def test_a_target_below_the_length_is_refused():
    with pytest.raises(EvaluationError, match="target_length=8 is not allowed; rows of 16 tokens"):
        pose_positions(16, 8, 2, seeded(0))
    with pytest.raises(EvaluationError, match="chunks=0"):
        PoSE(64, chunks=0)


def test_positions_follow_from_the_row_and_the_seed():
    documents = [torch.arange(40), torch.arange(50)]
    batch = MemoryRows(documents, SETTINGS).batch(5)
    assert torch.equal(MemoryRows(documents, SETTINGS).batch(5).position_ids, batch.position_ids)
    assert not torch.equal(batch.position_ids[0], batch.position_ids[1])
    other = replace(SETTINGS, positions=PoSE(64, seed=1))
    assert not torch.equal(MemoryRows(documents, other).batch(5).position_ids, batch.position_ids)


def test_packed_rows_cannot_skip():
    with pytest.raises(EvaluationError, match="layout='padded' is needed"):
        replace(SETTINGS, layout="packed")


def skipping_batch():
    random = torch.Generator().manual_seed(3)
    rows = [[torch.randint(257, (size,), generator=random)] for size in (17, 17, 11)]
    batch = lay_out(rows, SETTINGS, first_row=0)
    assert all(len(chunks_of(row)) == 2 for row in batch.position_ids[:2])
    return batch


def yarn_of_transformers(model) -> tuple[np.ndarray, float]:
    """Frequencies and attention factor for four times the length."""
    config = copy.deepcopy(model.config)
    config.rope_parameters = {
        "rope_type": "yarn",
        "rope_theta": model.config.rope_parameters["rope_theta"],
        "factor": 4.0,
        "original_max_position_embeddings": config.max_position_embeddings,
    }
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    return inv_freq.double().numpy(), attention_factor


@pytest.mark.parametrize("mode", ["auto", "segmented", "chunked"])
@pytest.mark.parametrize("scheme", [None, "pi:factor=4", "yarn:factor=4", "rerope:window=4"])
@torch.no_grad()
def test_logits_of_skipping_rows_follow_the_definition(scheme, mode, monkeypatch):
    monkeypatch.setattr(chunked, "SCORES_PER_BLOCK", 64)  # blocks of four queries: the skip lies within and between
    batch = skipping_batch()
    model = tiny_llama().double().train()
    inv_freq, attention_factor = yarn_of_transformers(model)

    def definition(p: np.ndarray) -> Definition:
        return {
            None: Definition(distance=lambda m, n: p[m] - p[n]),
            "pi:factor=4": Definition(distance=lambda m, n: (p[m] - p[n]) / 4),
            "yarn:factor=4": Definition(
                distance=lambda m, n: p[m] - p[n],
                frequencies=lambda theta, length: inv_freq,
                temperature=attention_factor,
            ),
            "rerope:window=4": Definition(distance=lambda m, n: np.minimum(p[m] - p[n], 4)),
        }[scheme]

    expected = []
    for ids, positions, tokens in zip(batch.input_ids, batch.position_ids, batch.attention_mask.bool(), strict=True):
        expected.append(defined_logits(model, ids[tokens][None], definition(positions[tokens].numpy()))[0])
    if scheme:
        patch(model, scheme, attention=mode)
    found = model(**batch.arguments).logits
    # tables of angles are made in float32
    torch.testing.assert_close(found[batch.attention_mask.bool()], torch.cat(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("full", [True, False], ids=["full rows", "with pads"])
@pytest.mark.parametrize("scheme", [None, "yarn:factor=4", "rerope:window=4", "rerope:window=4+logn", "alibi"])
@torch.no_grad()
def test_logits_of_skipping_rows_are_those_of_a_dense_causal_mask(scheme, full):
    batch = skipping_batch()
    batch = batch.split(2)[0] if full else batch
    model, dense = tiny_llama().double().train(), tiny_llama().double().train()
    if scheme:
        patch(model, scheme)
        patch(dense, scheme, mount="late", attention="oracle")
    found = model(**batch.arguments).logits
    causal = torch.ones(16, 16, dtype=torch.bool).tril()[None, None] & batch.attention_mask.bool()[:, None, None]
    expected = dense(**{**batch.arguments, "attention_mask": causal}).logits
    there = batch.attention_mask.bool()
    torch.testing.assert_close(found[there], expected[there], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scheme", [None, "yarn:factor=4", "rerope:window=4"])
@torch.no_grad()
def test_attention_crosses_the_skip(scheme):
    batch = skipping_batch().split(1)[0]
    model = tiny_llama().double().train()
    if scheme:
        patch(model, scheme)
    changed = {**batch.arguments, "input_ids": batch.input_ids.clone()}
    changed["input_ids"][0, 0] += 1
    before, after = model(**batch.arguments).logits, model(**changed).logits
    assert (before - after).abs().amax(dim=-1)[0].min() > 1e-6
    # without the mask it does not, which is why padded rows carry one of ones
    unmasked = [model(**{**arguments, "attention_mask": None}).logits for arguments in (batch.arguments, changed)]
    cut = len(chunks_of(batch.position_ids[0])[0])
    assert torch.equal(unmasked[0][0, cut:], unmasked[1][0, cut:])
