"""The loop: what is saved when, what the log holds, and what stops it."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from rope_patch.errors import EvaluationError
from rope_patch.training.loop import LOG, Diverged, Schedule, learning_rate, make_optimizer, read_log, take_step, train
from rope_patch.training.state import STATE, restore


class Place:
    """Data that has a place."""

    def __init__(self):
        self.step = 0

    def batch(self, step):
        assert step == self.step
        self.step += 1
        return torch.full((4,), float(step + 1))

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def schedule(folder, **changed):
    fields = {
        "output": str(folder), "context": 4, "batch_size": 1, "steps": 6, "warmup_steps": 2, "decay_steps": 2,
        "learning_rate": 0.1, "weight_decay": 0.1, "save_every_seconds": 0.0, "evaluate_every": 2, "seed": 0,
    }  # fmt: skip
    return Schedule(**{**fields, **changed})


def go(folder, fails_at=None, loss=lambda x: x, observe=lambda step: {"seen": step}, **changed):
    torch.manual_seed(0)
    model, config, data = nn.Linear(4, 1), schedule(folder, **changed), Place()

    def losses_at(step):
        if step == fails_at:
            raise KeyboardInterrupt
        yield loss(model(data.batch(step)).square().sum())

    train(config, model, make_optimizer(model, config), losses_at, observe, data=data)
    return model


@pytest.mark.parametrize("step", range(6))
def test_the_place_in_the_data_is_that_of_the_saved_weights(step, tmp_path):
    (tmp_path / "whole").mkdir()
    expected = go(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, fails_at=step)
    found = go(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), expected.parameters(), strict=True))
    ours, theirs = (
        [{name: value for name, value in row.items() if name != "seconds"} for row in read_log(folder)]
        for folder in (tmp_path, tmp_path / "whole")
    )
    assert ours == theirs
    assert len((tmp_path / LOG).read_text().splitlines()) == 3  # none of them twice


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_no_state_is_saved_whose_loss_is_not_finite(bad, tmp_path):
    calls = []

    def loss(value):
        calls.append(value)
        return value * bad if len(calls) == 4 else value

    with pytest.raises(Diverged, match=r"step 4: .*; lower the learning rate"):
        go(tmp_path, loss=loss)
    assert torch.load(tmp_path / STATE)["step"] == 2


def test_a_step_that_is_not_finite_changes_nothing():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.clone()
    with pytest.raises(Diverged, match="the weights came like this"):
        take_step(model, optimizer, lambda _: [model(torch.full((2,), torch.nan)).sum()], 0)
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None


def test_a_state_beyond_the_last_step(tmp_path):
    go(tmp_path)
    with pytest.raises(EvaluationError, match=r"steps=4, but .* is at step 6 already"):
        go(tmp_path, steps=4)


def test_a_log_without_its_end(tmp_path):
    (tmp_path / LOG).write_text(json.dumps({"step": 2, "a": 1}) + "\n" + '{"step": 4')
    assert read_log(tmp_path) == [{"step": 2, "a": 1}]
    assert read_log(tmp_path / "nowhere") == []


def test_the_learning_rate_warms_up_stays_and_falls(tmp_path):
    config = schedule(tmp_path, steps=6)
    assert [learning_rate(step, config) for step in range(6)] == pytest.approx([0.05, 0.1, 0.1, 0.1, 0.1, 0.05])
    flat = schedule(tmp_path, warmup_steps=0, decay_steps=0)
    assert {learning_rate(step, flat) for step in range(6)} == {0.1}


def test_frozen_parameters_are_neither_optimised_nor_saved(tmp_path):
    model = nn.Linear(4, 1)
    model.bias.requires_grad_(False)
    optimizer = make_optimizer(model, schedule(tmp_path))
    assert [p for group in optimizer.param_groups for p in group["params"]] == [model.weight]
    assert restore(tmp_path, model, optimizer) == (0, 0.0)
