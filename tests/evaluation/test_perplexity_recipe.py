"""`recipes/perplexity.py` from end to end, and every way in which it is asked for something that cannot be."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

import rope_patch
from rope_patch.cli.options import parse
from rope_patch.evaluation.measured_model import MeasuredModel, pop_scheme
from rope_patch.evaluation.protocols import protocol as shared
from rope_patch.evaluation.scheme_specs import scheme_at, with_references
from tests.recipes import load_recipe, refuse, run_recipe
from tests.runs import logits, tokens

from .conftest import LEARNED, folder_of_texts

CONFIGS = Path(__file__).parents[2] / "recipes" / "configs"


@pytest.fixture
def texts(tmp_path):
    return folder_of_texts(tmp_path / "texts", 70, 80, 20)


@pytest.fixture
def words(checkpoint, texts, tmp_path):
    """The command line that works; each test breaks one word of it."""

    def make(**changed):
        options = {
            "model": checkpoint,
            "scheme": "rerope:window=8+logn",
            "lengths": "16,32,64",
            "targets": 8,
            "text": texts,
            "output": tmp_path / "out",
            "device": "cpu",
            **changed,
        }
        return [word for name, value in options.items() for word in (f"--{name}", value)]

    return make


@pytest.mark.parametrize("name", ["perplexity_tiny", "baichuan", "t5"])
def test_the_configs_parse_and_show_what_they_must(name):
    options = parse(load_recipe("perplexity").Options, [str(CONFIGS / f"{name}.yaml")])
    lines = with_references(options.schemes)
    if name == "perplexity_tiny":
        assert [length // 256 for length in options.lengths] == [1, 2, 4, 8, 16]
        for length in options.lengths:
            names = [getattr(scheme_at(line, length), "name", "plain") for line in lines]
            assert {"plain", "window", "pi", "ntk", "yarn", "rerope", "compose", "self_extend"} <= set(names)


def test_references_are_among_the_lines_unless_they_are_not_wanted():
    assert with_references(["yarn:factor=2"]) == ("plain", "window", "yarn:factor=2")
    assert with_references(["yarn:factor=2", "plain"]) == ("window", "yarn:factor=2", "plain")
    assert with_references(["yarn:factor=2"], ()) == ("yarn:factor=2",)
    three = ("plain", "cut", "window")
    assert with_references(["yarn:factor=2"], three) == (*three, "yarn:factor=2")
    listed = ["yarn:factor=2", "plain", "window"]  # the cut follows the plain checkpoint, whose row at L it takes
    assert with_references(listed, three) == ("yarn:factor=2", "plain", "cut", "window")


def test_perplexity_from_end_to_end(words, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert run_recipe("perplexity", words()) == 0
    said = capsys.readouterr()
    for name in (
        "plain checkpoint",
        "truncated text",
        "sliding window",
        "ReRoPE, w = 8, log-n",
        "text: texts; ",
        "±",
    ):
        assert name in said.out
    assert str(tmp_path / "out" / "perplexity.png") in said.err
    assert "1 document too short for 64 tokens" in said.out
    assert (tmp_path / "out" / "perplexity.png").stat().st_size > 20_000
    written = [json.loads(line) for line in (tmp_path / "out" / "perplexity.jsonl").read_text().splitlines()]
    assert len(written) == 12
    assert said.out.splitlines()[-1].startswith("Next: rope-patch ")
    assert str(words()[1]) in said.out.splitlines()[-1]
    losses = {(row["line"], row["length"]): row["nll"] for row in written}
    assert {losses["cut", length] for length in (16, 32, 64)} == {losses["plain", 16]}  # L is 16

    monkeypatch.setattr(shared, "chunked_nll", None)  # the second time nothing is computed
    assert run_recipe("perplexity", [*words(), "--json"]) == 0
    again = capsys.readouterr()
    printed = json.loads(again.out)  # scheme by scheme, and measured with the shortest length first
    assert [row["line"] for row in printed] == [
        line for line in dict.fromkeys(row["line"] for row in printed) for _ in range(3)
    ]
    cut = [row for row in printed if row["line"] == "cut"]  # at L alone, for every length at once
    assert sorted(printed, key=lambda row: 16 if row in cut else row["length"]) == written
    assert "rope-patch: Next: rope-patch " in again.err


def test_whole_documents(words, capsys):
    asked = {"protocol": "sliding", "stride": 8, "tokens-per-document": 50, "lengths": "16,32"}
    whole = words(**asked)
    at = whole.index("--targets")
    assert run_recipe("perplexity", [*whole[:at], *whole[at + 2 :], "--no-references", "--json"]) == 0
    assert [row["scored_tokens"] for row in json.loads(capsys.readouterr().out)] == [98, 98]


def test_without_matplotlib_the_picture_alone_is_left_out(words, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run_recipe("perplexity", words(lengths="16")) == 0
    assert 'the picture needs matplotlib: pip install ".[plots]" in a checkout of rope_patch' in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["perplexity.jsonl"]


WRONG = {
    "there is no scheme 'yran'; did you mean 'yarn'": {"scheme": "yran:factor=2"},
    "yarn needs factor": {"scheme": "yarn"},
    "factor=0.5 is not allowed": {"scheme": "pi:factor=0.5"},
    "both own the slot 'frequencies'": {"scheme": "pi:factor=2+yarn:factor=2"},
    "lengths 32, 16: they must ascend": {"lengths": "32,16"},
    "a longer shortest length; for 4 times L, write 4x": {"lengths": "4,16"},
    "the longest of 3 has 80": {"lengths": "16,128"},
    "documents=0 is not allowed": {"documents": 0},
    "protocol 'first'": {"protocol": "first"},
    "dtype 'float64': did you mean": {"dtype": "float64"},
    "device 'gpu7' cannot be used here": {"device": "gpu7"},
    "there is no text file at 'nowhere.txt'": {"text": "nowhere.txt"},
    "use only one of them": {"dataset": "another"},
    "there is no checkpoint './nowhere': no folder or file has this name": {"model": "./nowhere"},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_input_is_one_clear_line(message, words, capsys):
    refuse("perplexity", words(**WRONG[message]), message, capsys)


def test_folders_that_are_no_checkpoint(words, tmp_path, capsys):
    for name, config in {"empty": None, "broken": "{", "headless": '{"model_type": "llama"}'}.items():
        (tmp_path / name).mkdir()
        if config:
            (tmp_path / name / "config.json").write_text(config)
    (tmp_path / "file").write_text("x")
    for name, message in {
        "empty": "the folder has no config.json",
        "file": "is not a checkpoint: it is neither a folder nor a GGUF file",
        "broken": "cannot be loaded",
        "headless": "cannot be loaded",
    }.items():
        assert run_recipe("perplexity", words(model=tmp_path / name)) == 2
        complaint = capsys.readouterr().err.strip().splitlines()[-1]
        assert message in complaint
        assert str(tmp_path / name) in complaint


def test_an_output_that_cannot_be_written_is_found_before_the_model_is_loaded(words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("rope_patch.saving.loading.load_model", None)
    (tmp_path / "taken").write_text("a file where the folder should be")
    assert run_recipe("perplexity", words(output=tmp_path / "taken")) == 2
    assert "taken" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_output_folder(words, tmp_path, capsys):
    (tmp_path / "fixed").mkdir(mode=0o555)
    assert run_recipe("perplexity", words(output=tmp_path / "fixed")) == 2
    assert "Permission denied" in capsys.readouterr().err


def test_a_checkpoint_saved_under_a_scheme_is_measured_without_it(words, saved, capsys):
    assert run_recipe("perplexity", [*words(), "--json"]) == 0
    before = [row["nll"] for row in json.loads(capsys.readouterr().out)]
    assert run_recipe("perplexity", [*words(model=saved), "--json"]) == 0
    captured = capsys.readouterr()
    assert [row["nll"] for row in json.loads(captured.out)] == before
    assert "saved under yarn" in captured.err


def test_what_a_checkpoint_learned_is_measured_with_its_scheme(words, checkpoint, trained, tmp_path, capsys):
    def measured(folder):
        told = words(model=folder, output=tmp_path / folder.name, scheme=LEARNED, lengths="32")
        assert run_recipe("perplexity", [*told, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        return next(row["nll"] for row in rows if row["scheme"]["name"] == "compose")

    assert abs(measured(trained) - measured(checkpoint)) > 1e-3

    model, loaded, said = rope_patch.from_pretrained(trained), rope_patch.from_pretrained(trained), []
    learned = pop_scheme(loaded, said.append)
    assert len(said) == 1
    with rope_patch.patch(loaded, LEARNED):
        assert not torch.equal(logits(loaded, tokens()), logits(model, tokens()))
    with MeasuredModel(loaded, learned).patched_with(rope_patch.get_scheme(LEARNED)):
        assert torch.equal(logits(loaded, tokens()), logits(model, tokens()))
