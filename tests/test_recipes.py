"""The recipes beside the measurement: what they write is what they say."""

from __future__ import annotations

import ast
import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch import native_scheme
from rope_patch.cli import main
from rope_patch.cli.options import parse
from rope_patch.data import corpora
from rope_patch.data.corpora import load_text
from rope_patch.evaluation.row import Rows
from rope_patch.patching import find_handle
from tests.recipes import load_recipe, run_script
from tests.runs import assert_close, logits
from tools import as_baichuan, longlora, pretrain_tiny, pretrain_tiny_t5

ROOT = Path(__file__).parents[1]
RECIPES, TOOLS = ROOT / "recipes", ROOT / "tools"
TEXTS = {"train": ROOT / "rope_patch" / "schemes", "held_out": ROOT / "rope_patch" / "cli"}


def test_a_recipe_is_a_script():
    words = [sys.executable, RECIPES / "perplexity.py", "--help"]
    assert "usage: perplexity.py" in subprocess.run(words, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("kind", ["rope", "alibi"])
def test_the_small_llama_in_the_layout_of_baichuan(kind, tmp_path):
    assert run_script(as_baichuan, [tmp_path, *["--alibi"] * (kind == "alibi")]) == 0
    model = rope_patch.from_pretrained(tmp_path).eval()
    assert type(model).__name__ == ("BaichuanForCausalLM" if kind == "alibi" else "BaiChuanForCausalLM")
    assert native_scheme(model).name == kind
    llama = AutoModelForCausalLM.from_pretrained(RECIPES / "assets" / "tiny-llama").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = torch.tensor([tokenizer("def patch(model, scheme):\n    return model")["input_ids"]])
    if kind == "alibi":
        rope_patch.patch(llama, "alibi")
    assert_close(logits(model, ids), logits(llama, ids), 2e-4)


@pytest.mark.parametrize("tool", [pretrain_tiny, pretrain_tiny_t5], ids=["llama", "t5"])
def test_pretraining_takes_a_step_and_writes_a_checkpoint(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "load_corpus", lambda split: load_text(str(TEXTS[split])))  # read in a second
    path = (TOOLS / "configs" / Path(tool.__file__).name).with_suffix(".yaml")
    config = yaml.safe_load(path.read_text())
    config |= {"output": str(tmp_path), "steps": 2, "batch_size": 1, "evaluate_every": 2, "context": 64}
    config |= {"vocab_size": 512, "repeat_span": [4, 8]} if "vocab_size" in config else {}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert run_script(tool, [tmp_path / "config.yaml"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "checkpoint" / "training_log.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 2
    model = rope_patch.from_pretrained(tmp_path / "checkpoint")
    assert sum(p.numel() for p in model.parameters()) > 1e6
    assert AutoTokenizer.from_pretrained(tmp_path / "checkpoint")("def f(x):").input_ids
    assert (tmp_path / "checkpoint" / "loss.png").is_file()


OF_LIBRARY = {"passkey", "perplexity"}
"""Modules of the library that a recipe is named after."""

RECIPE_OF = {"compare": "compare_encodings", "passkey": "passkey", "sweep": "sweep", "finetune": "finetune"}
RECIPE_OF |= {"drope": "finetune"}
TOOL_OF = {"pretrain_tiny": pretrain_tiny, "pretrain_gpu": pretrain_tiny, "pretrain_tiny_t5": pretrain_tiny_t5}
TOOL_OF |= {"longlora": longlora}


@pytest.mark.parametrize("path", sorted((RECIPES / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_is_one_of_its_recipe(path, capsys):
    if path.stem == "demo":
        assert main(["measure", str(path), "--dry-run"]) == 0
        assert capsys.readouterr().out.count("--output runs/demo/") == 2
        return
    recipe = load_recipe(RECIPE_OF.get(path.stem.partition("_")[0], "perplexity"))
    assert parse(recipe.Options, [str(path)]).output.startswith("runs/")


@pytest.mark.parametrize("path", sorted((TOOLS / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_is_one_of_its_tool(path):
    assert parse(TOOL_OF[path.stem].Options, [str(path)]).output.startswith("runs/")


def test_the_smallest_fine_tuning_runs_as_it_is_wherever_it_is_copied(tmp_path, monkeypatch, capsys):
    assert len((RECIPES / "finetune_minimal.py").read_text().splitlines()) <= 60
    copied = shutil.copy(RECIPES / "finetune_minimal.py", tmp_path)
    texts = {**TEXTS, "held_out": TEXTS["held_out"] / "export.py"}  # one short document, measured in a second
    monkeypatch.setattr(corpora, "load_corpus", lambda split: load_text(str(texts[split])))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(copied, run_name="__main__")
    assert "YaRN, factor = 4, before" in capsys.readouterr().out
    points = Rows(tmp_path / "runs" / "finetune_minimal" / "perplexity.jsonl").rows
    losses = {(point.step, point.length): point.nll for point in points}
    assert losses[6, 1024] < losses[0, 1024]
    model = rope_patch.from_pretrained(tmp_path / "runs" / "finetune_minimal" / "checkpoint")
    assert find_handle(model).scheme.name == "yarn"


SCRIPTS = [*sorted(RECIPES.glob("*.py")), *sorted(TOOLS.glob("*.py"))]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_script_needs_a_recipe_beside_it(path):
    """It imports no other recipe and loads none, so that a copy runs anywhere."""
    imported, called = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call):
            called.add(ast.unparse(node.func).rpartition(".")[2])
    parts = {part for name in imported for part in name.split(".")}
    assert not parts & {"recipes", "importlib", "runpy", *(recipe.stem for recipe in RECIPES.glob("*.py"))} - OF_LIBRARY
    assert not called & {"load_recipe", "exec", "__import__", "import_module"}
    assert path.parent == TOOLS or "tools" not in {name.split(".")[0] for name in imported}


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.py")), ids=lambda path: path.stem)
def test_every_recipe_is_read_from_top_to_bottom(path):
    """One script of a length that is read, with its commands at the top."""
    source = path.read_text()
    assert len(source.splitlines()) <= 520
    assert f"recipes/{path.name}" in source.partition('"""')[2].partition('"""')[0]
