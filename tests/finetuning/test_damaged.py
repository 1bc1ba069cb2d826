"""A training that was stopped, and whose files were damaged since: one line, and exit status 2."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.recipes import run_recipe

from .conftest import checkpoint_of, weights, words_of

STATES = [
    b"",
    b"{",
    b"[]",
    b"\xff",
    b"[" * 100_000,
    b'{"a": ' * 100_000,
    {"global_step": "1"},
    {"global_step": 2},
    {"global_step": True},
    {"global_step": None},
    {"max_steps": "x"},
    {"epoch": []},
    {"log_history": 3},
    {"log_history": [3]},
    {"unknown": 1},
]
"""Contents of a `trainer_state.json`, or fields in place of its own."""


@pytest.fixture
def stopped(finetune):
    """The options of a run that stopped after its first step, its newest checkpoint, and a copy of that."""
    chosen = finetune(steps=1, save_every=1, scheme=["ssmax"], method="lora")
    (newest,) = (checkpoint_of(chosen, "ssmax") / "trainer").glob("checkpoint-*")
    kept = chosen["output"].parent / "kept"
    shutil.copytree(newest, kept)
    return {**chosen, "steps": 2}, newest, kept


def test_a_damaged_checkpoint(stopped, capsys):
    options, newest, kept = stopped

    def refused(said):
        capsys.readouterr()
        assert run_recipe("finetune", words_of(options)) == 2
        *_, line = capsys.readouterr().err.splitlines()
        assert line.startswith("rope-patch: ")
        assert str(newest) in line
        assert said in line
        shutil.rmtree(newest)
        shutil.copytree(kept, newest)

    for state in STATES:
        file = newest / "trainer_state.json"
        whole = json.loads(file.read_text())
        file.write_bytes(state if isinstance(state, bytes) else json.dumps({**whole, **state}).encode())
        refused("trainer_state.json is damaged")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "adapter_model.safetensors"):
        for size in (0, 40, -20):
            file = newest / name
            file.write_bytes(file.read_bytes()[:size])
            refused("is damaged")
    (newest / "trainer_state.json").unlink()
    refused("trainer_state.json")
    settings = json.loads((newest / "adapter_config.json").read_text())
    (newest / "adapter_config.json").write_text(json.dumps({**settings, "megatron_config": {"a": 1}}))
    refused("megatron_config")
    index = {"metadata": {}, "weight_map": {"a": "../../b.safetensors"}}
    (newest / "model.safetensors.index.json").write_text(json.dumps(index))
    refused("weight_map")
    assert run_recipe("finetune", words_of(options)) == 0
    assert weights(options, "ssmax", "checkpoint")


@pytest.mark.parametrize("content", ["", "[]", "[" * 100_000, '{"scheme": 1, "scheme": 2}'])
def test_damaged_records_of_an_output(content, finetune, capsys):
    chosen = finetune(steps=1, scheme=["pi:factor=2"])
    for file in (
        checkpoint_of(chosen, "pi:factor=2") / "checkpoint" / "training.json",
        chosen["output"] / "options.json",
    ):
        file.write_text(content)
        capsys.readouterr()
        assert run_recipe("finetune", words_of(chosen)) == 2
        *_, line = capsys.readouterr().err.splitlines()
        assert f"rope-patch: {file} is damaged (" in line
        assert line.endswith("; remove it, or choose another output")
