"""Retrieval from a description, on the command line and from its recipe."""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

import rope_patch
from rope_patch.cli import passkey
from rope_patch.cli.common import run_politely
from rope_patch.errors import EvaluationError
from rope_patch.evaluation.retrieval.experiment import Retrieval
from rope_patch.mounting.parameters import learned_parameters

from .conftest import byte_tokenizer, documents

RECIPES = Path(__file__).parents[2] / "recipes"


def main(words):
    parser = argparse.ArgumentParser()
    passkey.add(parser.add_subparsers())
    arguments = parser.parse_args(words)
    return run_politely(lambda: arguments.run(arguments))


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for document in documents(90, 110, 20):
        (folder / f"{document['name']}.txt").write_text(document["text"])
    return folder


@pytest.fixture
def words(checkpoint, texts, tmp_path):
    """The command line that works; each test breaks one word of it."""

    def make(**changed):
        options = {
            "--model": checkpoint,
            "--task": "spans",
            "--scheme": "rerope:window=8+logn",
            "--lengths": "16,64",
            "--depths": "3",
            "--trials": "2",
            "--span": "6",
            "--text": texts,
            "--output": tmp_path / "out",
            "--device": "cpu",
        }
        options |= {f"--{name.replace('_', '-')}": value for name, value in changed.items()}
        spelled = [str(word) for name, value in options.items() if value is not None for word in (name, value)]
        return ["passkey", *spelled]

    return make


def test_spans_from_end_to_end(words, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(words()) == 0
    out = capsys.readouterr().out
    for name in ("plain checkpoint", "attention cut at L", "rerope window=8 + logn", "synthetic"):
        assert name in out
    assert str(tmp_path / "out" / "spans.png") in out
    assert (tmp_path / "out" / "spans.png").stat().st_size > 20_000
    written = [json.loads(line) for line in (tmp_path / "out" / "spans.jsonl").read_text().splitlines()]
    assert len(written) == 3 * 2 * 3
    assert main([*words(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == written


def test_the_passkey_from_end_to_end(words, tmp_path, capsys):
    assert main([*words(task="passkey", text=None, lengths="320", depths="0,1", batch_size=2), "--no-references"]) == 0
    assert "Passkey retrieval" in capsys.readouterr().out
    assert len((tmp_path / "out" / "passkey.jsonl").read_text().splitlines()) == 2


def test_the_recipe_is_the_same_measurement(words, checkpoint, texts, tmp_path, capsys, monkeypatch):
    assert main(words()) == 0
    by_cli = (tmp_path / "out" / "spans.jsonl").read_text()
    config = tmp_path / "config.yaml"
    config.write_text(
        f"{{model: {checkpoint}, task: spans, text: {texts}, lengths: [16, 64], depths: 3, trials: 2, span: 6, "
        f"device: cpu, schemes: ['rerope:window=8+logn'], output: {tmp_path / 'out'}}}"
    )
    monkeypatch.setattr(sys, "argv", ["passkey.py", str(config)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(RECIPES / "passkey.py"), run_name="__main__")
    assert ended.value.code == 0
    assert (tmp_path / "out" / "spans.jsonl").read_text() == by_cli


@pytest.mark.parametrize("name", ["passkey_tiny", "passkey_llama"])
def test_the_configs_are_descriptions(name):
    retrieval = Retrieval.from_yaml(RECIPES / "configs" / f"{name}.yaml")
    assert retrieval.lines[:2] == ("plain", "window")
    assert retrieval.task == ("spans" if name == "passkey_tiny" else "passkey")


def test_depths_are_a_number_or_a_list():
    assert Retrieval((64,)).shares == Retrieval((64,), depths=5).shares == (0, 0.25, 0.5, 0.75, 1)
    assert Retrieval((64,), depths=1).shares == (0.5,)
    assert Retrieval((64,), depths=[0, 0.1]).shares == (0, 0.1)
    assert Retrieval((64,)).lines == ("plain", "window")
    assert Retrieval((64,), schemes=("window",), references=False).lines == ("window",)


WRONG = {
    "depths=0 is not allowed": {"depths": 0},
    "depths=True is not allowed": {"depths": True},
    "depths=('half',) is not allowed": {"depths": ["half"]},
    "depths 0.5, 0.1: they must ascend": {"depths": (0.5, 0.1)},
    "trials=0 is not allowed": {"trials": 0},
    "batch_size=0 is not allowed": {"batch_size": 0},
    "task 'passkeys': did you mean 'passkey'": {"task": "passkeys"},
    "the filler of task 'passkey' is part of it": {"text": "book.txt"},
    "give one of them": {"task": "spans", "text": "book.txt", "dataset": "pg19"},
}


@pytest.mark.parametrize("message", WRONG)
def test_a_description_that_cannot_be_meant_is_refused(message):
    with pytest.raises(EvaluationError) as raised:
        Retrieval((64,), **WRONG[message])
    assert message in str(raised.value)


COMPLAINTS = {
    "there is no scheme 'yran'; did you mean 'yarn'?": {"scheme": "yran:factor=2"},
    "lengths 64, 16: they must ascend": {"lengths": "64,16"},
    "whole numbers with commas": {"lengths": "16;32"},
    "depths 'deep': how many, such as 5": {"depths": "deep"},
    "depths 0, 2: every depth is a share": {"depths": "0,2"},
    "length 8: a span of 6 tokens twice": {"lengths": "8"},
    "the longest of 3 has 110": {"lengths": "16,128"},
    "no text file or folder 'nowhere.txt'": {"text": "nowhere.txt"},
    "./nowhere is no checkpoint folder": {"model": "./nowhere"},
    "length 64: the question of task 'passkey'": {"task": "passkey", "text": None, "lengths": "64"},
}


@pytest.mark.parametrize("message", COMPLAINTS)
def test_wrong_input_is_one_clear_line(message, words, capsys):
    assert main(words(**COMPLAINTS[message])) == 2
    captured = capsys.readouterr()
    complaint = captured.err.strip().splitlines()[-1]
    assert message in complaint
    assert complaint.startswith("rope-patch: ")
    assert captured.out == ""


def test_a_length_that_is_too_short_is_found_before_the_model_is_loaded(words, capsys, monkeypatch):
    monkeypatch.setattr("rope_patch.evaluation.measurement.load_model", None)
    assert main(words(lengths="8,64")) == 2
    assert "needs a length of at least" in capsys.readouterr().err


def test_a_checkpoint_saved_under_a_scheme_is_measured_without_it(words, checkpoint, tmp_path, capsys):
    assert main([*words(), "--json"]) == 0
    before = [row["nll"] for row in json.loads(capsys.readouterr().out)]
    model = rope_patch.from_pretrained(checkpoint)
    rope_patch.patch(model, "yarn", factor=4)
    model.save_pretrained(tmp_path / "saved")
    byte_tokenizer().save_pretrained(tmp_path / "saved")
    assert main([*words(model=tmp_path / "saved"), "--json"]) == 0
    captured = capsys.readouterr()
    assert [row["nll"] for row in json.loads(captured.out)] == before
    assert "saved under yarn" in captured.err


def test_what_a_checkpoint_learned_is_measured_where_a_line_names_its_scheme(words, checkpoint, tmp_path, capsys):
    folder, spec = tmp_path / "saved", "rope+kerple:initial_scale=1"
    model = rope_patch.from_pretrained(checkpoint)
    rope_patch.patch(model, spec)
    with torch.no_grad():
        for value in learned_parameters(model).values():
            value.mul_(3)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)

    def measured(folder):
        assert main([*words(model=folder, output=tmp_path / folder.name, scheme=spec), "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        return [row["nll"] for row in rows if row["scheme"]["name"] == "compose"]

    trained, untrained = measured(folder), measured(checkpoint)
    assert len(trained) == len(untrained) == 6
    assert all(abs(a - b) > 1e-3 for a, b in zip(trained, untrained, strict=True))
