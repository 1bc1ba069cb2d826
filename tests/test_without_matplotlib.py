"""matplotlib is an extra: without it everything is importable and measured, and only the picture is left out."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rope_patch.errors import MissingPackage, RopePatchError
from rope_patch.evaluation import charts
from tests.evaluation.conftest import checkpoint, documents  # noqa: F401
from tests.test_architecture import MODULES

SENTENCE = 'the picture needs matplotlib: pip install ".[plots]" in a checkout of rope_patch'

WITHOUT = """
import importlib, json, sys
sys.modules["matplotlib"] = None  # what an import finds where it is not installed
modules, words, picture = json.loads(sys.argv[1])
for module in modules:
    importlib.import_module(module)

from rope_patch.cli import main

print(json.dumps([main(words), main(["plot", "sinusoidal", "--output", picture])]))
"""


def test_everything_but_the_pictures(tmp_path, checkpoint):  # noqa: F811
    text, output = tmp_path / "text.txt", tmp_path / "out"
    text.write_text(documents(70)[0]["text"])
    words = ["perplexity", "--model", str(checkpoint), "--lengths", "16,32", "--targets", "8", "--device", "cpu"]
    words += ["--text", str(text), "--output", str(output), "--json"]
    modules = [name for name in MODULES if not name.startswith("rope_patch.serving.")]  # plugins, which import servers
    given = json.dumps([modules, words, str(output / "picture.png")])
    done = subprocess.run([sys.executable, "-c", WITHOUT, given], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [0, 2]
    assert done.stderr.count(SENTENCE) == 2
    assert "Traceback" not in done.stderr
    assert [path.name for path in output.iterdir()] == ["perplexity.jsonl"]


def test_drawing_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError) as raised:
        charts.blank(1, 1)
    assert isinstance(raised.value, MissingPackage)
    assert isinstance(raised.value, RopePatchError)
    assert str(raised.value) == SENTENCE
