"""Two processes on gloo train what one trains."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import transformers
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

import rope_patch
from rope_patch.errors import UnsupportedPositions
from rope_patch.evaluation import charts
from tests.evaluation.conftest import byte_tokenizer, tiny_llama
from tests.processes import run_one, run_two
from tests.recipes import run_recipe
from tests.releases import since

from .conftest import losses, rows, weights, words_of

CONFIGS = sorted((Path(__file__).parents[2] / "recipes" / "configs" / "accelerate").glob("*.yaml"))
CASES = {
    "full": {},
    "adapters, padded, micro-batches": {
        **{"method": "lora", "layout": "padded", "scheme": ["rerope:window=8"]},
        **{"micro_batch_size": 1, "gradient_checkpointing": True},
    },
    "stream, learned": {"streaming": True, "scheme": ["kerple"]},
    "shared rows": {"scheme": ["rerope:window=8+logn"], "gradient_checkpointing": True},
}
TOGETHER = {"shared rows": {"context_parallel": 2}}


def train(rank, *commands):
    charts.save = lambda *_, **__: None
    sys.exit(max(run_recipe("finetune", words) for words in commands))


@since(transformers, "5.18", "cannot resume on two processes of a CPU")
@pytest.mark.slow
def test_two_processes_train_what_one_trains(options, tmp_path):
    shared = {"batch_size": 4, "save_every": 2, "steps": 3}
    alone = {name: options(**shared, **case, output=tmp_path / f"one {name}") for name, case in CASES.items()}
    outputs = {name: {"output": tmp_path / f"two {name}"} for name in CASES}
    together = {name: {**alone[name], **TOGETHER.get(name, {}), **outputs[name]} for name in CASES}
    assert run_one(train, 0, *map(words_of, alone.values())) == 0
    assert run_two(train, *map(words_of, together.values())) == [0, 0]
    for name, case in CASES.items():
        (scheme,) = case.get("scheme", ["yarn:factor=2"])
        one, two = alone[name], together[name]
        assert losses(two, scheme) == pytest.approx(losses(one, scheme), abs=1e-4), name
        expected, found = weights(one, scheme), weights(two, scheme)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-5)
        assert [row["nll"] for row in rows(two)] == pytest.approx([row["nll"] for row in rows(one)], abs=1e-5)
    straight = options(**{**shared, "steps": 5}, output=tmp_path / "straight")
    assert run_one(train, 0, words_of(straight)) == 0
    for before, handed_over in (("alone", run_two), ("together", lambda *call: [run_one(call[0], 0, *call[1:])])):
        more = {**(alone if before == "alone" else together)["full"], "steps": 5}
        assert set(handed_over(train, words_of(more))) == {0}
        for key, value in weights(straight).items():
            torch.testing.assert_close(weights(more)[key], value, rtol=0, atol=1e-5)


@pytest.mark.nightly
def test_two_processes_train_a_checkpoint_in_bfloat16(options, tmp_path):
    """Weights that train in float32 equal those of one process; adapters beside bfloat16 do so up to its rounding."""
    tiny_llama().bfloat16().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    half = {"method": "lora", "dtype": "bfloat16", "precision": "bfloat16"}
    for name, case, off in (("full", {}, 1e-5), ("adapters", half, 0.05)):
        shared = {"model": tmp_path / "model", "batch_size": 4, "steps": 3, **case}
        one, two = (options(**shared, output=tmp_path / f"{name} {number}") for number in (1, 2))
        assert run_one(train, 0, words_of(one)) == 0
        assert run_two(train, words_of(two)) == [0, 0]
        assert losses(two) == pytest.approx(losses(one), abs=off)
        expected, found = weights(one), weights(two)
        for key, value in expected.items():
            assert (found[key] - value).norm() <= off * value.norm(), key


def divide_a_row(rank):
    """A model of this library where torch divides a row over processes."""
    distributed.init_process_group("gloo")
    rope_patch.patch(model := tiny_llama(), "rerope:window=8")
    row = torch.arange(32)[None]
    divided = context_parallel(init_device_mesh("cpu", (2,)), buffers=[row], buffer_seq_dims=[1])
    with torch.no_grad(), divided, pytest.raises(UnsupportedPositions, match="context parallelism"):
        model(row, position_ids=row, use_cache=False)


@pytest.mark.slow
def test_a_row_that_is_divided_over_processes_is_refused():
    assert run_two(divide_a_row) == [0, 0]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_reads_the_configs(config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    arguments = launch_command_parser().parse_args(["--config_file", str(config), "recipes/finetune.py", "CONFIG"])
    arguments, defaults, _ = _validate_launch_command(arguments)
    assert defaults.num_processes == arguments.num_processes == 2
    assert load_config_from_file(str(config)).mixed_precision == "no"
    assert arguments.use_fsdp == (config.stem == "fsdp2")
