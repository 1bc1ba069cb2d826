"""`rope-patch COMMAND`: what it prints, and what it costs to ask."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rope_patch
from rope_patch.cli import COMMANDS, main
from tests.evaluation.conftest import checkpoint  # noqa: F401  # a fixture
from tests.lists import PAGE, with_lists

ROOT = Path(__file__).parents[2]


def cpu_seconds(*words: str) -> tuple[float, subprocess.CompletedProcess[str]]:
    before = os.times()
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT)
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return spent, done


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("--help", 0),
        ("--version", 0),
        ("list", 0),
        ("list YaRN", 0),
        ("list yarm", 2),
        ("perplexity --lengths 4y", 2),
        ("perplexity --help", 0),
        ("perplexity --modle x", 2),
        ("lst", 2),
    ],
)
def test_explaining_itself_takes_less_than_a_second(words, status):
    seconds, done = cpu_seconds("-m", "rope_patch.cli", *words.split())
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert seconds < 1


@pytest.mark.parametrize("module", ["rope_patch", "rope_patch.cli"])
def test_modules_that_run_as_the_command(module):
    _, done = cpu_seconds("-m", module, "--version")
    assert (done.stdout, done.returncode) == (f"rope-patch {rope_patch.__version__}\n", 0)


def test_the_public_names_are_all_that_dir_lists():
    assert dir(rope_patch) == sorted(rope_patch.__all__)
    assert {"patch", "unpatch", "YaRN", "UnknownScheme", "__version__"} <= set(dir(rope_patch))
    assert not hasattr(rope_patch, "pach")


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for command in COMMANDS:
        (line,) = [line for line in shown.splitlines() if line.startswith(f"  {command} ")]
        assert len(line.split()) > 3
    assert main(["perplexty"]) == 2
    assert "did you mean 'perplexity'" in capsys.readouterr().err


def test_list_names_every_scheme(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert main(["list", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in entries] == rope_patch.list_schemes()
    assert main(["list", *rope_patch.list_schemes()]) == 0
    tables = capsys.readouterr().out.split("\n\n")
    for entry, line, table in zip(entries, lines, tables, strict=True):
        assert line.split()[:2] == [entry["name"], entry["class"]]
        assert len(entry["summary"].split()) > 3
        assert line.endswith(entry["summary"])
        assert len(line) <= 120, f"the summary of {entry['name']} is too long for a line of the list"
        assert entry["allowed"].keys() == entry["fields"].keys()
        assert all(f"{field}: {words}" in table for field, words in entry["allowed"].items())
        assert entry["slots"]
        assert entry["equation"] in table
        assert entry["link"] in table
        assert entry["year"] > 2000
    yarn = next(entry for entry in entries if entry["name"] == "yarn")
    assert yarn["fields"]["factor"] == "required"
    assert yarn["class"] == "YaRN"
    assert yarn["allowed"]["factor"] == "a number of at least 1"
    assert yarn["allowed"]["beta_fast"] == "a number of at least beta_slow"


def test_the_table_of_schemes_in_the_reference_is_the_one_the_command_prints():
    page = PAGE.read_text(encoding="utf-8")
    assert all(f"\n| [`{name}`](schemes/" in page for name in rope_patch.list_schemes())
    assert with_lists(page) == page, "`make lists` writes the table anew"


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


def test_export_tells_and_writes(checkpoint, tmp_path, capsys):  # noqa: F811
    words = ["export", str(checkpoint), "--scheme", "yarn:factor=4"]
    assert main([*words, "--json"]) == 0
    changed = json.loads(capsys.readouterr().out)
    assert "yarn" in json.dumps(changed)
    assert main([*words, "--output", str(tmp_path / "yarn4")]) == 0
    assert "vLLM" in capsys.readouterr().out
    assert "yarn" in (tmp_path / "yarn4" / "config.json").read_text()
    assert main(["export", str(checkpoint), "--scheme", "rerope:window=8"]) == 2
    assert (
        "`rope-patch serve DIR --scheme rerope:window=8` serves it, and vLLM does with the plugin"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_commands_and_options(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(command in script for command in COMMANDS)
    assert "--lengths" in script


def test_without_the_parser_the_extra_is_named(tmp_path):
    (tmp_path / "tyro.py").write_text("raise ImportError")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from rope_patch.cli import main; sys.exit(main(['list']))"
    )
    done = cpu_seconds("-c", code)[1]
    assert done.returncode == 2
    assert 'pip install ".[cli]" in a checkout of rope_patch' in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wheel_has_no_tools_and_answers_in_one_line(tmp_path, monkeypatch, capsys):
    for command in ("plot", "checkpoint"):
        monkeypatch.setitem(COMMANDS, command, tmp_path / COMMANDS[command].name)
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "\n  perplexity " in shown
    assert "\n  plot " not in shown
    for command in ("plot", "checkpoint"):
        assert main([command, "--help"]) == 2
        captured = capsys.readouterr()
        assert captured.err == f"rope-patch: {command} comes with the repository; there, run `pip install -e .`\n"
        assert captured.out == ""
    assert main(["plt"]) == 2
    assert "'plot'" not in capsys.readouterr().err
