"""The state on disk: it is the old one or the new one, and it says whose it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rope_patch.errors import EvaluationError
from rope_patch.training.state import STATE, restore, save_state


def started(inputs=3):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, 2), nn.Linear(2, 1))
    model[1].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model(torch.ones(1, inputs)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_it_holds_what_is_trained_and_where_it_was(tmp_path):
    model, optimizer = started()
    save_state(tmp_path, model, optimizer, 7, 1.5, {"place": 3})
    assert set(torch.load(tmp_path / STATE)["model"]) == {"0.weight", "0.bias"}
    other, its_optimizer = started()
    with torch.no_grad():
        other[0].weight.zero_()
    assert restore(tmp_path, other, its_optimizer) == (7, 1.5)
    assert torch.equal(other[0].weight, model[0].weight)
    ours, theirs = optimizer.state[model[0].weight], its_optimizer.state[other[0].weight]
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_another_model_is_refused(tmp_path):
    save_state(tmp_path, *started(), 1)
    with pytest.raises(EvaluationError, match="the state of another model"):
        restore(tmp_path, *started(inputs=4))


def test_a_full_disk_leaves_the_state_before(tmp_path, monkeypatch):
    model, optimizer = started()
    save_state(tmp_path, model, optimizer, 1)

    def full(state, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left on device") as error:
        save_state(tmp_path, model, optimizer, 2)
    assert error.value.filename == str(tmp_path / STATE)
    assert [path.name for path in tmp_path.iterdir()] == [STATE]
    assert restore(tmp_path, model, optimizer)[0] == 1


def test_a_damaged_state_is_named(tmp_path):
    model, optimizer = started()
    (tmp_path / STATE).write_bytes(b"")
    with pytest.raises(EvaluationError, match="is damaged; without it the run begins anew"):
        restore(tmp_path, model, optimizer)
