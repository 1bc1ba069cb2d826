"""Randomized YaRN: positions of short rows, drawn from a range that grows with the training."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.testing import assert_close
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from rope_patch import patch
from rope_patch.data import randomized
from rope_patch.data.pose import PoSECollator
from rope_patch.data.randomized import RandomizedCollator, curriculum, numbered
from rope_patch.errors import EvaluationError
from tests.evaluation.conftest import tiny_llama

SCHEMES = [None, "yarn:factor=4", "rerope:window=4+logn", "alibi"]


def row(start, length=8, **more):
    return {"input_ids": list(range(start, start + length)), **more}


def positions(collate, rows):
    return collate(rows)["position_ids"]


def test_positions_are_a_sorted_subset_of_the_range():
    collate = RandomizedCollator((64,))
    for start in range(200):
        (found,) = positions(collate, [row(start)])
        assert found.dtype == torch.int64
        assert (found.diff() >= 1).all()
        assert 0 <= found[0] <= found[-1] < 64
    assert positions(RandomizedCollator((8,)), [row(0)])[0].tolist() == list(range(8))


def test_all_subsets_are_equally_likely():
    """Of 6 positions, 3 tokens: 20 subsets, by Pearson's chi-squared with 19 degrees of freedom (its 0.999 is 43.8)."""
    collate, draws = RandomizedCollator((6,)), 4000
    found = Counter(tuple(each.tolist()) for start in range(draws) for each in positions(collate, [row(start, 3)]))
    assert set(found) == set(itertools.combinations(range(6), 3))
    assert sum((count - draws / 20) ** 2 / (draws / 20) for count in found.values()) < 43.8


def test_the_distance_of_neighbours_has_its_distribution():
    """P(d) = C(R - d, l - 1) / C(R, l) for the gap of the first to the second position, in float64 from factorials."""
    size, length, draws = 16, 4, 4000
    collate = RandomizedCollator((size,))
    gaps = [int(positions(collate, [row(start, length)])[0].diff()[0]) for start in range(draws)]
    counted = Counter(b - a for a, b, *_ in itertools.combinations(range(size), length))
    total = sum(counted.values())
    for gap, count in counted.items():
        share, expected = gaps.count(gap) / draws, count / total
        assert abs(share - expected) < 5 * np.sqrt(expected * (1 - expected) / draws), gap


def test_ranges_follow_one_another_in_equal_parts_of_the_training():
    ranges = (8, 16, 64, 1000)
    collate = RandomizedCollator(ranges, rows=400)
    highest = [int(positions(collate, [row(1, row_number=n)]).max()) for n in range(400)]
    for part, limit in enumerate(ranges):
        found = highest[100 * part : 100 * part + 100]
        assert max(found) < limit
        assert np.mean(found) == pytest.approx(8 / 9 * (limit + 1) - 1, rel=0.05)  # the mean of the largest of 8
    assert positions(collate, [row(1, row_number=4000)]).max() > 64  # beyond the end: the last range


def test_the_curriculum_is_that_of_the_paper():
    assert curriculum(8192, 16384) == (8192, 10240, 12288, 16384, 16384)
    assert curriculum(8192, 8192) == (8192,) * 5


def test_positions_follow_from_the_row_its_number_and_the_seed():
    rows = [row(n, 16, row_number=n) for n in range(6)]
    collate = RandomizedCollator((64, 128), rows=6)
    found = positions(collate, rows)
    assert torch.equal(torch.cat([positions(collate, rows[:2]), positions(collate, rows[2:])]), found)
    assert not torch.equal(positions(dataclasses.replace(collate, seed=1), rows), found)
    again = positions(RandomizedCollator((64,)), [row(0, 16, row_number=n) for n in range(6)])
    assert len({tuple(each.tolist()) for each in again}) == 6
    assert torch.equal(*positions(RandomizedCollator((64,)), [row(0, 16), row(0, 16)]))


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_draw_what_the_main_process_draws(workers):
    rows = numbered(Dataset.from_list([row(n) for n in range(7)]), 24)
    collate = RandomizedCollator((8, 16, 64), rows=24)
    expected, found = (
        list(DataLoader(rows, batch_size=2, collate_fn=collate, num_workers=number)) for number in (0, workers)
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_rows_are_numbered_for_the_whole_training():
    rows = Dataset.from_list([row(n) for n in range(7)])
    found = numbered(rows, 17, seed=3)
    assert found["row_number"] == list(range(17))
    order = [ids[0] for ids in found["input_ids"]]
    assert sorted(order[:7]) == list(range(7)) != order[:7]
    assert order == (order[:7] * 3)[:17]
    assert [each["row_number"] for each in numbered(rows.to_iterable_dataset(), 17)] == list(range(7))
    assert len(numbered(rows, 3)) == 3


def test_pads_on_either_side_are_left_out():
    ids, labels = [0, 0, 5, 6, 7, 0], [-100, -100, -100, 6, 7, -100]
    padded = {"input_ids": ids, "labels": labels, "attention_mask": [0, 0, 1, 1, 1, 0]}
    alone = {"input_ids": ids[2:5], "labels": labels[2:5]}
    for collate in (RandomizedCollator((64,)), PoSECollator(64), PoSECollator(64, middle="gaussian")):
        found, expected = collate([padded, row(1, 4)]), collate([alone, row(1, 4)])
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert found["attention_mask"].sum(-1).tolist() == [3, 4]
        assert found["labels"][0].tolist() == [-100, 6, 7, -100]


PACKED = [{"position_ids": [0, 1, 2, 0, 1, 2, 3, 4]}, {"seq_lengths": [3, 5]}]


def test_what_would_be_silently_wrong_is_refused():
    for packed, collate in itertools.product(PACKED, (RandomizedCollator((64,)), PoSECollator(64))):
        with pytest.raises(EvaluationError, match=r"a row holds several documents.*packing=False"):
            collate([row(1, **packed)])
    grows = RandomizedCollator((8, 64), rows=100)
    with pytest.raises(EvaluationError, match=r"need a row_number for each row.*remove_unused_columns=False"):
        grows([row(1)])
    with pytest.raises(EvaluationError, match=r"come in the order .*train_sampling_strategy='sequential'"):
        grows([row(n, row_number=n) for n in (30, 7, 55, 2)])
    grows([row(n, row_number=n) for n in (98, 99, 0, 1)])  # as accelerate fills the last batch
    with pytest.raises(EvaluationError, match="position_range=64 is not allowed; a row has 65 tokens"):
        RandomizedCollator((64,))([row(1, 65)])
    for ranges, rows in (((), 1), ((0,), 1), ((8, 16), 0)):
        with pytest.raises(EvaluationError, match="is not allowed"):
            RandomizedCollator(ranges, rows)


def batch_of(*sizes):
    random = torch.Generator().manual_seed(3)
    rows = [{"input_ids": torch.randint(257, (size,), generator=random)} for size in sizes]
    return {**RandomizedCollator((64,), seed=1)(rows), "use_cache": False}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_losses_and_gradients_are_those_of_a_dense_causal_mask(scheme):
    batch, model, dense = batch_of(16, 16, 10), tiny_llama().double().train(), tiny_llama().double().train()
    if scheme:
        patch(model, scheme)
        patch(dense, scheme, mount="late", attention="oracle")
    there = batch["attention_mask"].bool()
    causal = torch.ones(16, 16, dtype=torch.bool).tril()[None, None] & there[:, None, None]
    found, expected = model(**batch), dense(**{**batch, "attention_mask": causal})
    assert_close(found.loss, expected.loss, rtol=1e-9, atol=1e-9)
    found.loss.backward()
    expected.loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad, rtol=1e-7, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


def seen_by(model):
    """The highest positions of each row of every forward."""
    found = []
    model.register_forward_pre_hook(
        lambda _, __, given: found.extend(given["position_ids"].amax(dim=-1).tolist()), with_kwargs=True
    )
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_a_trainer_that_is_resumed_draws_the_same(workers, tmp_path):
    rows = numbered(Dataset.from_list([row(n, 12) for n in range(5)]), 12)
    collate = RandomizedCollator((12, 24, 200), rows=12)

    def train(folder, steps, resume=None):
        model = tiny_llama()
        patch(model, "yarn:factor=8")
        found = seen_by(model)
        arguments = TrainingArguments(
            *(str(folder),),
            **{"max_steps": 6, "per_device_train_batch_size": 2, "save_steps": 1, "use_cpu": True},
            **{"report_to": "none", "remove_unused_columns": False, "dataloader_num_workers": workers},
            train_sampling_strategy="sequential",
        )
        trainer = Trainer(model, arguments, data_collator=collate, train_dataset=rows)
        if steps < 6:
            trainer.add_callback(stop_at(steps))
        trainer.train(resume_from_checkpoint=resume)
        return found

    whole = train(tmp_path / "whole", 6)
    assert [max(whole[n : n + 4]) for n in (0, 4, 8)] == sorted(max(whole[n : n + 4]) for n in (0, 4, 8))
    assert whole[:4] == [11] * 4
    first = train(tmp_path / "parts", 3)
    assert [*first, *train(tmp_path / "parts", 6, resume=True)] == whole


def stop_at(step):
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == step

    return Stop()


def test_the_recipe_trains_on_growing_ranges(finetune, monkeypatch):
    found, place = [], RandomizedCollator._place

    def watched(collator, ids, row):
        found.append((row["row_number"], int(place(collator, ids, row).max())))
        return place(collator, ids, row)

    monkeypatch.setattr(randomized.RandomizedCollator, "_place", watched)
    finetune(layout="randomized", steps=6, batch_size=4, pose_row=8, position_ranges="8,16,32")
    numbers, highest = zip(*found, strict=True)
    assert numbers == tuple(range(24))
    assert max(highest[:8]) <= 7 < max(highest[8:16]) <= 15 < max(highest[16:])


def test_the_steps_of_a_curriculum_cannot_change(finetune, capsys):
    finetune(layout="randomized", steps=1)
    finetune(2, layout="randomized", steps=2)
    assert "holds other runs (steps was 1 and is 2)" in capsys.readouterr().err
