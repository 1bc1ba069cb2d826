from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import rope_patch
from rope_patch.cli import main
from tests.evaluation.conftest import checkpoint  # noqa: F401  # a fixture


def test_list_names_every_scheme(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    assert main(["list"]) == 0
    table = capsys.readouterr().out
    assert main(["list", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in entries] == rope_patch.list_schemes()
    for entry in entries:
        assert entry["name"] in table
        assert entry["slots"]
        assert entry["equation"]
        assert entry["year"] > 2000
    yarn = next(entry for entry in entries if entry["name"] == "yarn")
    assert yarn["fields"]["factor"] == "required"
    assert yarn["class"] == "YaRN"


def test_describe(checkpoint, capsys):  # noqa: F811
    assert main(["describe", "--model", str(checkpoint)]) == 0
    assert "not patched" in capsys.readouterr().out
    assert main(["describe", "--model", str(checkpoint), "--scheme", "rerope:window=8+logn"]) == 0
    assert "mounted late" in capsys.readouterr().out
    assert main(["describe", "--model", str(checkpoint), "--scheme", "pi:factor=2", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["scheme"] == {"name": "pi", "factor": 2}
    assert described["mount"] == "rotary"
    assert main(["describe", "--model", str(checkpoint), "--scheme", "pi:faktor=2"]) == 2
    assert "did you mean 'factor'" in capsys.readouterr().err


def test_importing_the_package_leaves_the_heavy_parts_out():
    heavy = ["datasets", "matplotlib", "rope_patch.evaluation.perplexity", "rope_patch.evaluation.experiment"]
    code = f"import rope_patch, rope_patch.cli, sys; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_table_of_schemes_in_the_readme_is_the_one_the_command_prints(capsys):
    assert main(["list", "--markdown"]) == 0
    readme = Path(__file__).parents[2] / "README.md"
    assert capsys.readouterr().out.strip() in readme.read_text(encoding="utf-8")
