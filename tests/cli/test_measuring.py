from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch

import rope_patch
from rope_patch.cli import main
from rope_patch.evaluation import perplexity
from rope_patch.evaluation.trained import Trained
from rope_patch.mounting.parameters import learned_parameters
from rope_patch.patching import find_handle
from tests.evaluation.conftest import byte_tokenizer, checkpoint, documents  # noqa: F401  # a fixture
from tests.runs import logits, tokens

RECIPE = Path(__file__).parents[2] / "recipes" / "perplexity.py"


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for document in documents(70, 80, 20):
        (folder / f"{document['name']}.txt").write_text(document["text"])
    return folder


@pytest.fixture
def words(checkpoint, texts, tmp_path):  # noqa: F811
    """The command line that works; each test breaks one word of it."""

    def make(**changed):
        options = {
            "--model": checkpoint,
            "--scheme": "rerope:window=8+logn",
            "--lengths": "16,32,64",
            "--targets": "8",
            "--text": texts,
            "--output": tmp_path / "out",
            "--device": "cpu",
        }
        options |= {f"--{name}": value for name, value in changed.items()}
        spelled = [str(word) for name, value in options.items() if value is not None for word in (name, value)]
        return ["perplexity", *spelled]

    return make


def test_perplexity_from_end_to_end(words, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(words()) == 0
    out = capsys.readouterr().out
    for name in ("plain checkpoint", "attention cut at L", "rerope window=8 + logn"):
        assert name in out
    assert str(tmp_path / "out" / "perplexity.png") in out
    assert "1 document too short for 64 tokens" in out
    assert (tmp_path / "out" / "perplexity.png").stat().st_size > 20_000
    written = [json.loads(line) for line in (tmp_path / "out" / "perplexity.jsonl").read_text().splitlines()]
    assert len(written) == 9

    monkeypatch.setattr(perplexity, "chunked_nll", None)  # the second time nothing is computed
    assert main([*words(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == written


def test_the_recipe_is_the_same_measurement(words, checkpoint, texts, tmp_path, capsys, monkeypatch):  # noqa: F811
    assert main(words()) == 0
    by_cli = (tmp_path / "out" / "perplexity.jsonl").read_text()
    config = tmp_path / "config.yaml"
    config.write_text(
        f"{{model: {checkpoint}, text: {texts}, lengths: [16, 32, 64], targets: 8, device: cpu, "
        f"schemes: ['rerope:window=8+logn'], output: {tmp_path / 'out'}}}"
    )
    monkeypatch.setattr(perplexity, "chunked_nll", None)
    monkeypatch.setattr(sys, "argv", ["perplexity.py", str(config)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(RECIPE), run_name="__main__")
    assert ended.value.code == 0
    assert (tmp_path / "out" / "perplexity.jsonl").read_text() == by_cli
    assert str(tmp_path / "out" / "perplexity.png") in capsys.readouterr().out


WRONG = {
    "there is no scheme 'yran'; did you mean 'yarn'?": {"scheme": "yran:factor=2"},
    "yarn needs factor": {"scheme": "yarn"},
    "factor=0.5 is not allowed": {"scheme": "pi:factor=0.5"},
    "window=0 is not allowed": {"scheme": "rerope:window=0"},
    "both own the slot 'frequencies'": {"scheme": "pi:factor=2+yarn:factor=2"},
    "lengths 32, 16: they must ascend": {"lengths": "32,16"},
    "whole numbers with commas": {"lengths": "16;32"},
    "more than the shortest length of 4": {"lengths": "4,16"},
    "the longest of 3 has 80": {"lengths": "16,128"},
    "protocol 'first'": {"protocol": "first"},
    "dtype 'float64': did you mean": {"dtype": "float64"},
    "device 'gpu7' cannot be used here": {"device": "gpu7"},
    "no text file or folder 'nowhere.txt'": {"text": "nowhere.txt"},
    "./nowhere is no checkpoint folder: there is nothing of that name": {"model": "./nowhere"},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_input_is_one_clear_line(message, words, capsys):
    assert main(words(**WRONG[message])) == 2
    captured = capsys.readouterr()
    complaint = captured.err.strip().splitlines()[-1]
    assert message in complaint
    assert complaint.startswith("rope-patch: ")
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_folders_that_are_no_checkpoint(words, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    headless = tmp_path / "headless"
    headless.mkdir()
    (headless / "config.json").write_text('{"model_type": "llama"}')
    for name, message in {
        "empty": "is no checkpoint folder: it is a folder without config.json",
        "file": "is no checkpoint folder: it is a file",
        "broken": "cannot load a language model from",
        "headless": "cannot load a language model from",
    }.items():
        assert main(words(model=tmp_path / name)) == 2
        complaint = capsys.readouterr().err.strip().splitlines()[-1]
        assert message in complaint
        assert str(tmp_path / name) in complaint


def test_an_output_that_cannot_be_written_is_found_before_the_model_is_loaded(words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("rope_patch.evaluation.measurement.load_model", None)
    (tmp_path / "taken").write_text("a file where the folder should be")
    assert main(words(output=tmp_path / "taken")) == 2
    assert "taken" in capsys.readouterr().err

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main(words(output=tmp_path / "full")) == 2
    assert "No space left on device" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_output_folder(words, tmp_path, capsys):
    (tmp_path / "fixed").mkdir(mode=0o555)
    assert main(words(output=tmp_path / "fixed")) == 2
    assert "Permission denied" in capsys.readouterr().err


def test_of_several_processes_the_first_says_what_is_wrong(words, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, complaints in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        assert main(words(lengths="32,16")) == 2
        assert capsys.readouterr().err.count("they must ascend") == complaints
    monkeypatch.setenv("WORLD_SIZE", "1")  # a rank that something else left behind
    assert main(words(lengths="32,16")) == 2
    assert "they must ascend" in capsys.readouterr().err


def test_a_checkpoint_saved_under_a_scheme_is_measured_without_it(words, checkpoint, tmp_path, capsys):  # noqa: F811
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


def test_what_a_checkpoint_learned_is_measured_where_a_line_names_its_scheme(words, checkpoint, tmp_path, capsys):  # noqa: F811
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
        return {row["length"]: row["nll"] for row in rows if row["scheme"]["name"] == "compose"}

    trained, untrained = measured(folder), measured(checkpoint)
    assert trained.keys() == untrained.keys()
    assert all(abs(trained[length] - untrained[length]) > 1e-3 for length in trained)

    loaded = rope_patch.from_pretrained(folder)
    kept = Trained.under(find_handle(loaded))
    rope_patch.unpatch(loaded)
    with rope_patch.patch(loaded, spec):
        assert not torch.equal(logits(loaded, tokens()), logits(model, tokens()))
        kept.restore(loaded)
        assert torch.equal(logits(loaded, tokens()), logits(model, tokens()))
