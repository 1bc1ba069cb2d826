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
