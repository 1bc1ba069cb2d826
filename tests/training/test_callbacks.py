"""Perplexity against length in a training that knows nothing of it."""

from __future__ import annotations

import json
import math

import pytest
import torch
from datasets import Dataset
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

from rope_patch import patch
from rope_patch.errors import EvaluationError
from rope_patch.training.callbacks import PerplexityCallback
from tests.evaluation.conftest import TRAINING_LENGTH, byte_tokenizer, documents, tiny_llama
from tests.processes import run_two

HELD_OUT = documents(80, 40, 75)
LENGTHS = [TRAINING_LENGTH, 4 * TRAINING_LENGTH]
SPECS = [None, "yarn:factor=4", "rerope:window=6+logn", "rope+kerple"]

schemes = pytest.mark.parametrize("spec", SPECS)


def model_of(spec):
    """With dropout, so that the training consumes random numbers."""
    model = tiny_llama()
    model.config.attention_dropout = 0.2
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.2
    if spec is not None:
        patch(model, spec)
    return model


def trainer_of(folder, spec, callbacks=(), **settings):
    ids = torch.randint(1, 257, (16, TRAINING_LENGTH), generator=torch.Generator().manual_seed(0))
    rows = Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist()})
    plain = {"max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 2, "seed": 1}
    plain |= {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments(str(folder), **{**plain, **settings})
    given = {"train_dataset": rows, "eval_dataset": rows, "processing_class": byte_tokenizer()}
    return Trainer(model_of(spec), arguments, default_data_collator, callbacks=list(callbacks), **given)


def measuring(corpus=HELD_OUT, lengths=LENGTHS, **settings):
    return PerplexityCallback(corpus, lengths, targets=8, **settings)


def points(folder, name="perplexity.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@torch.no_grad()
def nll_of(model, length):
    """Of the last 8 tokens of the two texts that are long enough, each in a forward of its own."""
    found = []
    for document in HELD_OUT[0], HELD_OUT[2]:
        ids = torch.tensor(byte_tokenizer()(document["text"])["input_ids"])
        for end in ends(len(ids)):
            context = ids[end - length - 1 : end]
            found.append(cross_entropy(model(context[None, :-1]).logits[0, -8:].float(), context[-8:]))
    return torch.stack(found).mean().item()


def ends(count):
    """Where 16 windows at most end in a document, spread from its end to where the longest context begins."""
    needed = LENGTHS[-1] + 1
    most = 1 + (count - needed) // 8
    return [count - i * (count - needed) // max(1, most - 1) for i in range(most)]


@pytest.mark.one_in(2)
@schemes
def test_the_training_ends_as_one_without_bit_for_bit(spec, tmp_path):
    ends = []
    for callbacks in (
        (),
        (measuring(every=3, windows_per_document=1), measuring(lengths=[8], every="eval", documents=1)),
    ):
        trainer = trainer_of(tmp_path, spec, callbacks, eval_strategy="steps", eval_steps=3)
        modes = [module.training for module in trainer.model.modules()]
        trainer.train()
        weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        logs = [{key: log[key] for key in ("loss", "grad_norm") if key in log} for log in trainer.state.log_history]
        ends.append((weights, torch.get_rng_state(), logs, modes != [m.training for m in trainer.model.modules()]))
    (weights, state, logs, changed), (others, other_state, other_logs, also_changed) = ends
    assert all(torch.equal(value, others[name]) for name, value in weights.items())
    assert torch.equal(state, other_state)
    assert (logs, changed) == (other_logs, also_changed)


@schemes
def test_what_is_measured_is_the_loss_of_the_model_as_it_is(spec, tmp_path):
    trainer = trainer_of(tmp_path, spec, [measuring()])
    trainer.model.eval()
    expected = {0: [nll_of(trainer.model, length) for length in LENGTHS]}
    trainer.train()
    trainer.model.eval()
    expected[4] = [nll_of(trainer.model, length) for length in LENGTHS]
    found = points(tmp_path)
    assert [(point["step"], point["length"]) for point in found] == [(s, n) for s in (0, 4) for n in LENGTHS]
    assert [point["nll"] for point in found] == pytest.approx([*expected[0], *expected[4]], abs=1e-4)
    assert expected[0] != pytest.approx(expected[4], abs=1e-2)
    assert all(point["perplexity"] == pytest.approx(math.exp(point["nll"])) for point in found)
    assert {point["line"] for point in found} == {"plain" if spec is None else found[0]["line"]}


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, [0, 4]),
        ({"start": False}, [4]),
        ({"every": 3}, [0, 3, 4]),
        ({"every": "eval"}, [0, 2, 4]),
        ({"every": "save", "start": False}, [3, 4]),
    ],
    ids=str,
)
def test_when_it_is_measured(settings, steps, tmp_path):
    callback = measuring(lengths=[8, 32], points=tmp_path / "mine" / "points.jsonl", line="mine", **settings)
    schedule = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 3}
    trainer_of(tmp_path / "run", "yarn:factor=4", [callback], **schedule).train()
    found = points(tmp_path / "mine", "points.jsonl")
    assert [point["step"] for point in found if point["length"] == 32] == steps
    assert {point["line"] for point in found} == {"mine"}


class Tracker(TrainerCallback):
    """What a tracker is told."""

    def __init__(self):
        self.told = {}

    def on_log(self, args, state, control, logs=None, **_):
        self.told.setdefault(state.global_step, {}).update(logs)


def test_trackers_are_told_and_no_log_of_the_trainer_is_lost(tmp_path):
    tracker = Tracker()
    trainer = trainer_of(tmp_path, "rerope:window=6", [tracker], logging_steps=1)
    trainer.add_callback(measuring(every=2, log=trainer.log))
    trainer.train()
    assert all("loss" in tracker.told[step] for step in range(1, 5))
    for point in points(tmp_path):
        assert tracker.told[point["step"]][f"eval_perplexity_{point['length']}"] == point["perplexity"]
    assert "eval_perplexity_16" not in tracker.told[1] | tracker.told[3]


def test_the_best_checkpoint_is_that_of_the_best_perplexity(tmp_path):
    schedule = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_perplexity_64", "greater_is_better": False}
    trainer = trainer_of(
        tmp_path, "rerope:window=6", [measuring(every="eval", documents=1, windows_per_document=1)], **schedule, **best
    )
    trainer.train()
    found = {point["perplexity"]: point["step"] for point in points(tmp_path) if point["length"] == 64}
    del found[next(iter(found))]  # before the training nothing is saved
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{found[min(found)]}")


@pytest.mark.parametrize("kind", ["texts", "tokens", "dataset", "file"])
def test_texts_tokens_and_files_are_the_same(kind, tmp_path):
    (tmp_path / "text.txt").write_text(text := HELD_OUT[0]["text"])
    ids = byte_tokenizer()(text)["input_ids"]
    corpus = {
        "texts": [text],
        "tokens": [{"input_ids": torch.tensor(ids)}],
        "dataset": Dataset.from_dict({"input_ids": [ids]}),
        "file": tmp_path / "text.txt",
    }[kind]
    tokenizer = byte_tokenizer() if kind in ("texts", "file") else None
    (found,) = measuring(corpus, [32], tokenizer=tokenizer).measure(model := tiny_llama(), "plain", 0)
    (expected,) = measuring(HELD_OUT[:1], [32], tokenizer=byte_tokenizer()).measure(model, "plain", 0)
    assert found.nll == expected.nll


def test_arguments_that_are_not_allowed_are_named(tmp_path):
    for every in (0, -1, "epoch", 1.5):
        with pytest.raises(EvaluationError, match=f"every={every!r} is not allowed"):
            measuring(every=every)
    with pytest.raises(EvaluationError, match="lengths 32, 16: they must ascend"):
        measuring(lengths=[32, 16])
    with pytest.raises(EvaluationError, match="row 1 of the corpus has body; text or input_ids is needed"):
        measuring([{"text": ""}, {"body": ""}])
    with pytest.raises(EvaluationError, match="tokenizer=None: texts need one"):
        measuring().measure(tiny_llama(), "plain", 0)
    with pytest.raises(EvaluationError, match="a context of 4096 tokens needs documents of 4097 tokens"):
        trainer_of(tmp_path, None, [measuring(lengths=[4096])]).train()
    (tmp_path / "perplexity.jsonl").write_text("{}\n")
    with pytest.raises(EvaluationError, match=r"perplexity\.jsonl, line 1, is not a result row"):
        trainer_of(tmp_path, None, [measuring()]).train()


def train(rank, folder):
    trainer_of(folder, "rerope:window=6", [measuring(every=2)], per_device_train_batch_size=1).train()


@pytest.mark.slow
def test_two_processes_write_what_one_writes(tmp_path):
    assert run_two(train, tmp_path / "two") == [0, 0]
    model = model_of("rerope:window=6").eval()
    found = points(tmp_path / "two")
    assert [(point["step"], point["length"]) for point in found] == [(s, n) for s in (0, 2, 4) for n in LENGTHS]
    assert [point["nll"] for point in found[:2]] == pytest.approx([nll_of(model, n) for n in LENGTHS], abs=1e-4)
