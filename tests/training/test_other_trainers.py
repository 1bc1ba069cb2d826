"""Trainers on gloo processes: in shared rows, TRL's and evaluations; weights that accelerate's config shards."""

from __future__ import annotations

import warnings

import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from datasets import Dataset
from safetensors.torch import load_file, save_file
from torch import distributed
from transformers import AutoTokenizer, Trainer, TrainingArguments

import rope_patch
from rope_patch.errors import EvaluationError
from rope_patch.saving.loading import default_checkpoint
from rope_patch.training.context_parallel import ContextParallelTrainer
from tests.families import VOCABULARY, build
from tests.processes import run_many, run_one, run_two, shard_on_cpu

trl = pytest.importorskip("trl")

SPEC = "rerope:window=6+logn"
IDS = torch.randint(1, VOCABULARY, (4, 45), generator=torch.Generator().manual_seed(2)).tolist()


class Shared(ContextParallelTrainer, trl.SFTTrainer):
    """As the page of processes says."""


def settings(folder, rows):
    """Every step reads the same rows, all of them, so their order is of no account."""
    return {
        **{"output_dir": str(folder), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": 3},
        **{"per_device_train_batch_size": rows, "learning_rate": 1.0, "save_strategy": "no", "bf16": False},
        "optim": "sgd",  # shows the size of gradients, which Adam hides
    }


def train(rank, folder, kind):
    """Train a patched model by a trainer of this kind, and keep its weights."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = build("llama")
    rope_patch.patch(model, SPEC)
    rows = Dataset.from_dict({"input_ids": IDS, "labels": IDS})
    if kind == "sharded weights":
        shard_on_cpu()
        arguments = TrainingArguments(
            **settings(folder, 2),
            parallelism_config=ParallelismConfig(dp_shard_size=2),
            remove_unused_columns=False,
        )
        trainer = Trainer(model, arguments, train_dataset=rows)
    else:
        arguments = trl.SFTConfig(
            **settings(folder, 4),
            max_length=None,
            gradient_checkpointing=False,
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        tokenizer = AutoTokenizer.from_pretrained(default_checkpoint())
        make, sharing = (Shared, {"sharing": 2}) if kind == "shared rows" else (trl.SFTTrainer, {})
        trainer = make(model, arguments, train_dataset=rows, processing_class=tokenizer, **sharing)
    trainer.train()
    assert AcceleratorState().num_processes == (1 if kind == "one process" else 2)
    found = {name: getattr(p, "full_tensor", p.clone)().detach() for name, p in model.named_parameters()}
    if rank == 0:
        save_file(found, folder / f"{kind}.safetensors")
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.mark.nightly
def test_they_train_what_one_process_trains(tmp_path):
    assert run_one(train, 0, tmp_path, "one process") == 0
    expected = load_file(tmp_path / "one process.safetensors")
    for kind in ("shared rows", "sharded weights"):
        assert run_two(train, tmp_path, kind) == [0, 0], kind
        found = load_file(tmp_path / f"{kind}.safetensors")
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )


def evaluate(rank, folder, number, rows):
    """Predict five rows, `rows` at a time on every two processes, and keep what the first process has."""
    warnings.simplefilter("ignore")
    rope_patch.patch(model := build("llama"), SPEC)
    ids = [*IDS, [7] * 45]
    given = Dataset.from_dict({"input_ids": ids, "labels": ids})
    arguments = TrainingArguments(**settings(folder, 4), per_device_eval_batch_size=rows)
    found = ContextParallelTrainer(model, arguments, sharing=min(2, number)).predict(given)
    if rank == 0:
        kept = {"logits": found.predictions, "labels": found.label_ids, "loss": found.metrics["test_loss"]}
        save_file({name: torch.as_tensor(value) for name, value in kept.items()}, folder / f"{number}.safetensors")
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.mark.nightly
def test_shared_rows_are_evaluated_once_and_whole(tmp_path):
    assert run_one(evaluate, 0, tmp_path, 1, 2) == 0
    assert run_two(evaluate, tmp_path, 2, 2) == [0, 0]
    assert run_many(4, evaluate, tmp_path, 4, 1) == [0] * 4
    alone, two, four = (load_file(tmp_path / f"{number}.safetensors") for number in (1, 2, 4))
    del four["loss"]  # the two groups also read a first row beside the last one
    for found in (two, four):
        expected = {name: alone[name] for name in found}
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_smoothed_labels_are_refused_in_shared_rows(tmp_path):
    arguments = TrainingArguments(**settings(tmp_path, 4), label_smoothing_factor=0.1)
    with pytest.raises(EvaluationError, match=r"label_smoothing_factor=0\.1 is not allowed"):
        ContextParallelTrainer(build("llama"), arguments, sharing=2)
