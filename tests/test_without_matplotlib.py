"""matplotlib is an extra: without it everything is importable and measured, and only the picture is left out."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import pytest

from rope_patch.errors import MissingPackage, RopePatchError
from rope_patch.evaluation import figures
from tests.evaluation.conftest import checkpoint, documents  # noqa: F401
from tests.test_architecture import MODULES

SENTENCE = "the picture needs matplotlib: pip install 'rope-patch[plots]'"

WITHOUT = """
import importlib, json, sys
sys.modules["matplotlib"] = None  # what an import finds where it is not installed
modules, checkpoint, text, output = json.loads(sys.argv[1])
for module in modules:
    importlib.import_module(module)

from rope_patch.cli import main
from rope_patch.evaluation.experiment import Experiment, run

said = []
outcome = run(Experiment((16, 32), model=checkpoint, text=text, targets=8, device="cpu", output=output), said.append)
refused = main(["plot", "sinusoidal", "--output", output + "/picture.png"])
try:
    import rope_patch.plots
except ImportError as error:
    raised = [type(error).__name__, str(error)]
print(json.dumps([said, len(outcome.rows), outcome.picture, refused, raised]))
"""


def test_everything_but_the_pictures(tmp_path, checkpoint):  # noqa: F811
    text, output = tmp_path / "text.txt", tmp_path / "out"
    text.write_text(documents(70)[0]["text"])
    drawing = ("rope_patch.plots", "rope_patch.evaluation.perplexity_vs_length.perplexity_vs_length")
    modules = [module for module in MODULES if not module.startswith(drawing)]
    given = json.dumps([modules, str(checkpoint), str(text), str(output)])
    done = subprocess.run([sys.executable, "-c", WITHOUT, given], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said, rows, picture, refused, raised = json.loads(done.stdout.splitlines()[-1])
    assert said[-1] == SENTENCE
    assert said.count(SENTENCE) == 1
    assert (rows, picture, refused) == (4, None, 2)
    assert raised == ["MissingPackage", SENTENCE]
    assert "matplotlib: pip install 'rope-patch[plots]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in output.iterdir()] == ["perplexity.jsonl"]


def test_drawing_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError) as raised:
        figures.blank(1, 1)
    assert isinstance(raised.value, MissingPackage)
    assert isinstance(raised.value, RopePatchError)
    assert str(raised.value) == SENTENCE


def test_a_picture_takes_the_place_of_the_one_before_or_leaves_it(tmp_path, monkeypatch):
    def full(aside, **_):
        aside.write_bytes(before[:9])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = figures.save(figures.blank(1, 1), tmp_path / "picture.png")
    before = path.read_bytes()
    assert figures.save(figures.blank(1, 1), path).read_bytes() == before
    with pytest.raises(OSError, match=r"no folder/picture\.png"):
        figures.save(figures.blank(1, 1), tmp_path / "no folder" / "picture.png")
    drawn = figures.blank(1, 1)
    monkeypatch.setattr(drawn, "savefig", full)
    with pytest.raises(OSError, match=r"No space left on device.*picture\.png'"):
        figures.save(drawn, path)
    assert path.read_bytes() == before
    link = tmp_path / "link.png"
    link.symlink_to(path)
    figures.save(figures.blank(2, 1), link)
    assert link.is_symlink()
    assert path.read_bytes() != before
    assert sorted(found.name for found in tmp_path.iterdir()) == ["link.png", "picture.png"]
