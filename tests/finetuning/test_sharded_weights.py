"""Under FSDP2, as accelerate wraps a model, two processes on gloo train what one trains with whole weights."""

from __future__ import annotations

import os
import signal
import sys

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from rope_patch.evaluation import charts
from rope_patch.training.checkpoints import SafeTrainer
from tests.processes import run_one, run_two, shard_on_cpu
from tests.recipes import run_recipe

from .conftest import losses, rows, weights, words_of

CASES = {
    "full": {"scheme": ["rerope:window=8+logn"], "gradient_checkpointing": True},
    "learned": {"scheme": ["kerple"], "micro_batch_size": 1},
    "adapters, learned": {"scheme": ["kerple"], "method": "lora"},
}


def train(rank, sharded, dies_at, *commands):
    """Run the recipe. Of the processes of a group, the last is killed before its step `dies_at`, counted from 1."""
    charts.save = lambda *_, **__: None
    if sharded:
        shard_on_cpu()
    step = SafeTrainer.training_step

    def watched(trainer, model, *arguments, **keywords):
        assert isinstance(model, FSDPModule) == sharded
        if trainer.state.global_step + 1 == dies_at and rank == int(os.environ.get("WORLD_SIZE", "1")) - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(trainer, model, *arguments, **keywords)

    SafeTrainer.training_step = watched
    sys.exit(max(run_recipe("finetune", words) for words in commands))


@pytest.mark.nightly
def test_sharded_weights_train_as_whole_ones(options, tmp_path):
    shared = {"batch_size": 4, "save_every": 1, "steps": 3}
    whole, sharded = (
        {name: options(**shared, **case, output=tmp_path / f"{kind} {name}") for name, case in CASES.items()}
        for kind in ("whole", "sharded")
    )
    assert run_one(train, 0, False, None, *map(words_of, whole.values())) == 0
    assert run_two(train, True, None, *map(words_of, sharded.values())) == [0, 0]
    for name, case in CASES.items():
        (scheme,) = case["scheme"]
        same_run(whole[name], sharded[name], scheme)
    killed = {**sharded["learned"], "output": tmp_path / "killed"}
    survivor, dead = run_two(train, True, 3, words_of(killed))
    assert dead == -signal.SIGKILL
    assert survivor not in (0, None)  # it ends by itself
    assert run_two(train, True, None, words_of(killed)) == [0, 0]
    same_run(whole["learned"], killed, "kerple")


def same_run(one, other, scheme):
    assert losses(other, scheme) == pytest.approx(losses(one, scheme), abs=1e-5)
    expected, found = weights(one, scheme), weights(other, scheme)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    assert [row["nll"] for row in rows(other)] == pytest.approx([row["nll"] for row in rows(one)], abs=1e-5)
