"""A fine-tuning from end to end: layouts, warm start, what it says of wrong input, and what it leaves behind."""

from __future__ import annotations

import gc
import json
import sys
import weakref

import pytest
import torch
import yaml
from accelerate import tracking

import rope_patch
from rope_patch.cli import main
from rope_patch.finetuning import run as running
from rope_patch.finetuning import trackers
from rope_patch.finetuning.experiment import run
from rope_patch.finetuning.run import _Trainer
from rope_patch.patching import find_handle
from rope_patch.training.loop import Diverged, read_log
from tests.evaluation.conftest import byte_tokenizer, documents, tiny_llama

from .conftest import Killed
from .kill import weights

SCHEME = "yarn:factor=2"


@pytest.mark.parametrize("layout", ["packed", "padded", "pose"])
@pytest.mark.parametrize("streaming", [False, True])
def test_every_layout_learns(layout, streaming, describe):
    outcome = run(describe(layout=layout, streaming=streaming, steps=12, learning_rate=1e-2))
    rows = read_log(outcome.checkpoints[SCHEME].parent)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert rows[-1]["train_nll"] < rows[0]["train_nll"]
    assert "nll" in rows[-1]


def test_measurements_on_the_way(describe):
    outcome = run(describe(evaluate_every=2, lengths=(16, 24, 32)))
    assert [p.step for p in outcome.points if p.scheme == SCHEME] == [0, 2, 4]
    assert all(list(p.nll) == [16, 24, 32] for p in outcome.points)
    assert json.loads(outcome.results.read_text().splitlines()[0])["targets"] == 8


def test_plain_is_trained_as_it_is(describe):
    outcome = run(describe(schemes=("plain",)))
    assert [(p.scheme, p.step) for p in outcome.points] == [("plain", 0), ("window", 0), ("plain", 4)]
    assert find_handle(rope_patch.from_pretrained(outcome.checkpoints["plain"])) is None


def test_a_length_below_the_training_length(describe):
    outcome = run(describe(length=8, lengths=(16,), schemes=("rerope:window=4",), allow_short=True))
    assert outcome.points[-1].step == 4


@pytest.mark.parametrize("killed_at", [1, 3])
def test_warm_start(killed_at, describe, kill_at, monkeypatch, tmp_path):
    schemes, losses_at = [], _Trainer._losses_at

    def watched(trainer, step):
        for loss in losses_at(trainer, step):
            schemes.append((step, str(find_handle(trainer.model).scheme)))
            yield loss

    settings = {"warm_start_steps": 2, "schemes": ("yarn:factor=2",), "evaluate_every": 1}
    with monkeypatch.context() as patched:
        patched.setattr(_Trainer, "_losses_at", watched)
        expected = run(describe(**settings, output=str(tmp_path / "undisturbed")))
    assert [scheme.split(":")[0] for _, scheme in schemes] == ["pi", "pi", "yarn", "yarn"]
    kill_at(killed_at)
    with pytest.raises(Killed):
        run(describe(**settings, save_every_seconds=0))
    found = run(describe(**settings))
    assert found.points == expected.points
    ours, theirs = (weights(outcome.checkpoints[SCHEME].parent) for outcome in (found, expected))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert str(find_handle(rope_patch.from_pretrained(found.checkpoints[SCHEME])).scheme).startswith("yarn")


def test_nothing_is_left_behind(describe, monkeypatch):
    references, load = [], running._load

    def keep_weakly(task):
        model = load(task)
        references.append(weakref.ref(model))
        return model

    monkeypatch.setattr(running, "_load", keep_weakly)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    for method in ("full", "lora"):
        run(describe(method=method, dropout=0.1, check_memory=True, output=describe().output + method))
    assert torch.equal(torch.get_rng_state(), before)
    gc.collect()
    assert len(references) == 4
    assert all(reference() is None for reference in references)
    assert torch.is_grad_enabled()


class Recorded(tracking.GeneralTracker):
    """A tracker that remembers."""

    name = "recorded"
    requires_logging_directory = True
    made: list[Recorded] = []  # noqa: RUF012

    def __init__(self, run_name, logging_dir):
        super().__init__()
        self.told, self.run_name, self.logging_dir = [], run_name, logging_dir
        self.made.append(self)

    @property
    def tracker(self):
        return self

    def start(self):
        self.told.append("start")

    def store_init_configuration(self, values):
        self.told.append(values)

    def log(self, values, step=None):
        self.told.append((step, values))

    def finish(self):
        self.told.append("finish")


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "recorded", Recorded)
    monkeypatch.setattr(trackers, "get_available_trackers", lambda: ["recorded"])
    monkeypatch.setattr(Recorded, "made", [])
    return Recorded.made


def test_trackers_hear_what_the_log_says(recorded, describe, tmp_path):
    run(describe(report_to=("recorded",), evaluate_every=2))
    (tracker,) = recorded
    start, settings, *rows, finish = tracker.told
    assert (start, finish) == ("start", "finish")
    assert tracker.logging_dir == str(tmp_path / "out" / "yarn-factor-2")
    assert settings["learning_rate"] == 1e-3
    assert all(isinstance(value, int | float | str | bool) for value in settings.values())
    assert [step for step, _ in rows] == [1, 2, 3, 4]
    assert set(rows[1][1]) == {"tokens", "train_nll", "learning_rate", "seconds", "nll/16", "nll/32"}


def test_trackers_are_closed_when_the_loss_is_no_number(recorded, describe):
    with pytest.raises(Diverged):
        run(describe(report_to=("recorded",), learning_rate=1e30))
    assert recorded[0].told[-1] == "finish"


@pytest.fixture
def words(describe, tmp_path):
    """The command line that works, with changed settings."""

    def make(*options, **changed):
        given = {**vars(describe()), **changed}
        config = tmp_path / "config.yaml"
        config.write_text(yaml.safe_dump(json.loads(json.dumps({k: v for k, v in given.items() if v is not None}))))
        return ["finetune", str(config), *options]

    return make


def test_the_command_line(words, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "160")
    options = ["--set", "steps=2", "evaluate_every=1", "--method", "lora", "--merge", "--lengths", "16,32"]
    assert main(words(*options)) == 0
    out = capsys.readouterr().out
    for part in ("plain checkpoint", "after 1 step ", "after 2 steps", "checkpoint", "finetune.png", "loss.png"):
        assert part in out
    assert (tmp_path / "out" / "finetune.png").stat().st_size > 20_000
    assert main([*words(*options), "--json"]) == 0
    assert [point["step"] for point in json.loads(capsys.readouterr().out)] == [0, 0, 0, 1, 2]


def refused(words, capsys):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.out == ""
    complaint = captured.err.strip().splitlines()[-1]
    assert complaint.startswith("rope-patch: ")
    return complaint


WRONG = {
    "has an unknown key 'lenght'; did you mean 'length'?": {"lenght": 32},
    "length=0 is not allowed": {"length": 0},
    "method='lroa' is not allowed; did you mean 'lora'?": {"method": "lroa"},
    "layout='packt' is not allowed": {"layout": "packt"},
    "there is no scheme 'yran'; did you mean 'yarn'?": {"schemes": ["yran:factor=2"]},
    "report_to='tensorbord': did you mean 'tensorboard'?": {"report_to": ["tensorbord"]},
    "report_to='wandb': its package is not installed": {"report_to": ["wandb"]},
    "which have to be there from the first step on": {"schemes": ["kerple"], "warm_start_steps": 2},
    "warm_start_steps=4 of steps=4: nothing would be left": {"warm_start_steps": 4},
    "no document reaches 97 tokens": {"length": 96, "schemes": ["yarn:factor=6"]},
    "there are no adapters to merge": {"merge": True},
    "learning_rate=0 is not allowed": {"learning_rate": 0},
    "alpha=0.0 is not allowed": {"alpha": 0.0},
    "dropout=1.0 is not allowed": {"dropout": 1.0},
    "step 2: the loss is": {"learning_rate": 1e30},
    "./nowhere is no checkpoint folder": {"model": "./nowhere"},
    "there is no file 'nowhere.txt'": {"text": "nowhere.txt"},
    "layout='pose' with length=16": {"layout": "pose", "length": 16, "schemes": ["rerope:window=8"]},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_settings_are_one_clear_line(message, words, capsys):
    assert message in refused(words(**WRONG[message]), capsys)


def test_short_documents_are_trained_on_when_asked(describe):
    assert run(describe(length=96, lengths=(16, 64), schemes=("yarn:factor=6",), allow_short=True)).checkpoints


@pytest.mark.parametrize("streaming", [False, True])
def test_a_broken_line(streaming, words, texts, capsys):
    lines = (texts / "train.jsonl").read_text().splitlines()
    (texts / "train.jsonl").write_text("\n".join([*lines[:2], '{"text": "cut', *lines[2:]]) + "\n")
    changed = {"streaming": streaming, "layout": "padded", "steps": 12}
    assert "train.jsonl, line 3: not JSON" in refused(words(**changed), capsys)
    assert main(words(**changed, on_bad_line="skip")) == 0
    assert "1 records were left out" in capsys.readouterr().err


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("content", ["", '{"text": ""}\n'])
def test_no_text(content, streaming, words, texts, capsys):
    (texts / "train.jsonl").write_text(content)
    assert "there is no text in" in refused(words(streaming=streaming), capsys)


def test_the_tokenizer_of_another_model(words, tmp_path, capsys):
    model = tiny_llama()
    model.resize_token_embeddings(60)
    model.save_pretrained(tmp_path / "small")
    byte_tokenizer().save_pretrained(tmp_path / "small")
    message = refused(words(model=str(tmp_path / "small"), schemes=["rerope:window=8"]), capsys)
    assert "the tokenizer with 257 tokens belongs to another model" in message


def test_an_output_that_cannot_be_written(words, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert "file" in refused(words(output=str(tmp_path / "file" / "out")), capsys)


def test_a_failed_first_try_does_not_claim_the_output(words, capsys):
    refused(words(length=96, schemes=["yarn:factor=6"]), capsys)
    assert main(words()) == 0
    capsys.readouterr()
    message = refused(words(length=48), capsys)
    assert "holds other runs (length was 32 and is 48); choose another output" in message


def test_not_enough_memory(words, monkeypatch, capsys):
    monkeypatch.setattr(running, "available", lambda _: 1000)
    monkeypatch.setattr(running, "measure", None)  # refused before anything is computed
    message = refused(words(check_memory=True), capsys)
    assert "a step of 2 x 32 tokens needs" in message
    assert "what helps: gradient checkpointing" in message


def test_an_encoder_with_a_decoder(words, tmp_path, capsys):
    from tests.models.t5_families import build

    build("t5").save_pretrained(tmp_path / "t5")
    byte_tokenizer().save_pretrained(tmp_path / "t5")
    assert "only decoders alone are trained" in refused(words(model=str(tmp_path / "t5"), schemes=["t5"]), capsys)


def test_peft_is_missing(words, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "peft", None)
    assert "method='lora' needs peft: pip install" in refused(words(method="lora"), capsys)


def test_a_batch_that_cannot_be_divided(words, monkeypatch, capsys):
    from rope_patch.finetuning import experiment

    monkeypatch.setattr(experiment, "world", lambda: 4)
    assert "batch_size=2 is not allowed; it must be a multiple of the 4 processes" in refused(words(), capsys)


def test_held_out_texts_that_are_too_short(words, texts, capsys):
    (texts / "held_out.txt").write_text(documents(20)[0]["text"])
    assert "the longest of 1 has 20" in refused(words(), capsys)
