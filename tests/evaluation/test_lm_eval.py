"""The recipe for lm-evaluation-harness, with a stand-in where the harness is not installed."""

from __future__ import annotations

import math
import sys
from types import ModuleType

import pytest

from rope_patch.patching import find_handle
from tests.recipes import run_recipe


def recipe(*words):
    return run_recipe("lm_eval_patched", words)


class Wrapped:
    """What the harness makes of a loaded model."""

    def __init__(self, pretrained, tokenizer, max_length, batch_size):
        self.model, self.max_length = pretrained, max_length


@pytest.fixture
def harness(monkeypatch):
    """Records what it is asked, and finds two bits per byte."""
    lm_eval, models, huggingface = map(ModuleType, ("lm_eval", "lm_eval.models", "lm_eval.models.huggingface"))
    asked = {}

    def simple_evaluate(model, tasks, **settings):
        asked.update(scheme=str(find_handle(model.model).scheme), tasks=tasks, model=model.model)
        return {"results": {tasks[0]["task"]: {"byte_perplexity,none": 4.0, "bits_per_byte,none": 2.0}}}

    lm_eval.simple_evaluate, huggingface.HFLM = simple_evaluate, Wrapped
    for module in (lm_eval, models, huggingface):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return asked


def test_without_the_harness_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert recipe("--tasks", "wikitext") == 2
    said = capsys.readouterr().err.splitlines()
    assert said == ["rope-patch: this recipe needs lm_eval: pip install lm_eval"]


def test_the_harness_gets_a_patched_model_and_a_local_text(harness, checkpoint, tmp_path, capsys):
    text = tmp_path / "book.txt"
    text.write_text("a text of bytes")
    words = ["--model", checkpoint, "--scheme", "pi:factor=2", "--text", text, "--max-length", 16, "--device", "cpu"]
    assert recipe(*words) == 0
    assert harness["scheme"] == "pi:factor=2"
    assert harness["tasks"][0]["dataset_kwargs"]["data_files"] == {"test": str(text)}
    assert find_handle(harness["model"]) is None  # taken back
    assert f"{math.log(4):.4f}" in capsys.readouterr().out  # one token per byte, so nats per token are nats per byte


def test_nothing_to_evaluate_is_said(harness, capsys):
    assert recipe() == 2
    assert "give --tasks such as wikitext, or --text FILE" in capsys.readouterr().err
    assert recipe("--text", "nowhere.txt") == 2
    assert "there is no text file 'nowhere.txt'" in capsys.readouterr().err


@pytest.fixture
def ruler_harness(harness, monkeypatch):
    """With the group ruler, whose example has as many words as the test sets."""
    for name in ("lm_eval.tasks", "lm_eval.tasks.ruler", "lm_eval.tasks.ruler.vt_utils", "wonderwords", "nltk"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["lm_eval.tasks.ruler"].vt_utils = sys.modules["lm_eval.tasks.ruler.vt_utils"]
    harness["words"] = 300

    def generate_input_output(lines, chains, hops, is_icl):
        return "x" * harness["words"], ["A"]

    def simple_evaluate(model, tasks, **settings):
        harness.update(settings, window=model.max_length, tasks=tasks)
        if "niah_single_2" in tasks:
            raise ConnectionError("Couldn't reach 'essays'")
        return {"results": {tasks[0]: {"4096,none": -1.0, "1024,none": 0.25, "2048,none": 0.5}}}

    sys.modules["lm_eval.tasks.ruler.vt_utils"].generate_input_output = generate_input_output
    monkeypatch.setattr("lm_eval.simple_evaluate", simple_evaluate)
    return harness


def test_ruler_takes_as_many_samples_of_each_length_and_leaves_room_for_answers(ruler_harness, checkpoint, capsys):
    words = ["--model", checkpoint, "--tasks", "ruler_fwe", "ruler_vt", "--lengths", "1024,2048", "--limit", 2]
    assert recipe(*words, "--device", "cpu") == 0
    assert ruler_harness["metadata"] == {"max_seq_lengths": [1024, 2048], "tokenizer": str(checkpoint)}
    assert ruler_harness["samples"]["ruler_vt"] == [0, 1, 500, 501]
    assert "limit" not in ruler_harness
    assert ruler_harness["window"] == 2048 + 128
    out = capsys.readouterr().out
    assert "1024               0.2500" in out
    assert "4096" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["niah_single_2", "--lengths", "1024"],
            "Couldn't reach 'essays'; made without a download: --tasks niah_single_1",
        ),
        (["ruler_vt", "--lengths", "600"], "ruler_vt: its shortest prompt takes 672 tokens, and 600 are allowed"),
        (["ruler_fwe", "--lengths", "512"], "length 512: the shortest prompt of task 'fwe'"),
        (["ruler_fwe", "wikitext"], "tasks wikitext: give them a run of their own"),
        (["wikitext", "--lengths", "512"], "lengths are those of the tasks of ruler"),
    ],
)
def test_what_ruler_cannot_do_is_one_line(words, message, ruler_harness, checkpoint, capsys):
    assert recipe("--model", checkpoint, "--device", "cpu", "--tasks", *words) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_an_example_that_the_harness_would_never_fit_is_one_line(ruler_harness, checkpoint, capsys):
    ruler_harness["words"] = 500
    assert recipe("--model", checkpoint, "--tasks", "ruler_vt", "--lengths", "4096") == 2
    assert "ruler_vt: its shortest prompt takes 536 tokens, and 500 are allowed" in capsys.readouterr().err
