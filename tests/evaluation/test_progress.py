"""How long a measurement will take: the estimate on timings that are known, and what of it is shown where."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rope_patch.evaluation.progress import Progress
from rope_patch.evaluation.row import Rows
from rope_patch.evaluation.run import run
from rope_patch.evaluation.tasks.task import Cell, Task

from .conftest import byte_tokenizer, documents, measure, tiny_llama

CELLS = [[length] * 4 for length in (256, 512, 1024, 2048, 4096)]
ROOT = Path(__file__).parents[2]
LINE = re.compile(r"(\d+) of (\d+): (.+); \d\d:\d\d elapsed, about \d\d:\d\d left")


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves on."""
    moved = SimpleNamespace(now=100.0)
    monkeypatch.setattr("tqdm.std.time", lambda: moved.now)
    return moved


def read(clock, bar, cell, seconds):
    """Read the contexts of a cell, each in `seconds` of its length."""
    bar.begin(f"{cell[0]}")
    for length in cell:
        clock.now += seconds(length)
        bar.update(length)


def multiplications(length):
    """Of a layer of the tiny model, 32 wide: 12 * 32^2 in its weights for each token, 32 n in its attention."""
    return 1e-8 * length * (12 * 32**2 + 32 * length)


@pytest.mark.parametrize("read_before", [1, 3])
def test_the_estimate_knows_that_attention_is_quadratic(read_before, clock):
    with Progress(tiny_llama(), CELLS) as bar:
        for cell in CELLS[:read_before]:
            read(clock, bar, cell, multiplications)
        left = bar.left()
    remaining = sum(multiplications(length) for cell in CELLS[read_before:] for length in cell)
    linear = (clock.now - 100) * sum(map(sum, CELLS[read_before:])) / sum(map(sum, CELLS[:read_before]))
    assert left == pytest.approx(remaining)
    assert remaining > 2 * linear


def test_cells_of_an_earlier_run_are_not_reckoned_with(clock):
    with Progress(tiny_llama(), [[256]] * 5) as bar:
        for number in range(2):
            bar.begin(f"{number}")
            bar.skip()
        read(clock, bar, [256], lambda n: 1.0)
        assert bar.left() == pytest.approx(2)
        bar.begin("known, too")
        bar.skip()
        assert bar.left() == pytest.approx(1)


def test_measurements_that_follow_count(clock):
    for ahead, left in ((2, 5), (1, 3), (0, 1)):
        with Progress(tiny_llama(), [[256], [256]], ahead) as bar:
            read(clock, bar, [256], lambda n: 1.0)
            assert bar.left() == pytest.approx(left)


def measured(results=None):
    return measure(tiny_llama(), byte_tokenizer(), documents(45, 50), ["plain", "window"], [16, 32], results=results)


class Sharing(Task):
    """Two cells with an item in common."""

    name = "sharing"

    def cells(self, length):
        common = [0] * 60
        return [Cell([{"prompts": str(own)}], [common, [0] * own]) for own in (40, 7)]

    def score(self, model, item):
        return 1.0


def test_the_speed_of_a_cell_is_that_of_what_was_read_for_it(monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr("rope_patch.evaluation.run.time", SimpleNamespace(perf_counter=lambda: 2.0 * next(ticks)))
    rows = run(tiny_llama(), Sharing(), ["plain"], [16])
    assert [(row.seconds, row.tokens_per_second) for row in rows] == [(2.0, 50.0), (2.0, 3.5)]


def test_a_line_for_each_row_that_is_measured_the_shortest_first_and_none_for_others(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    losses = [f"{row.nll:.3f}" for row in measured(Rows(tmp_path / "rows.jsonl"))]
    lines = [LINE.fullmatch(line) for line in capsys.readouterr().err.splitlines()]
    assert [line.groups() for line in lines] == [
        ("1", "4", f"plain checkpoint at 16: loss {losses[0]}"),
        ("2", "4", f"sliding window at 16: loss {losses[2]}"),
        ("3", "4", f"plain checkpoint at 32: loss {losses[1]}"),
        ("4", "4", f"sliding window at 32: loss {losses[3]}"),
    ]
    measured(Rows(tmp_path / "rows.jsonl"))
    assert capsys.readouterr() == ("", "")


def test_a_notebook_that_took_stderr_over_is_left_alone(capsys):
    measured()
    assert capsys.readouterr() == ("", "")


def test_a_terminal_has_a_bar_and_no_lines(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    measured()
    assert re.search(r"\d%\|[^|]*\| \d\d:\d\d<", terminal.getvalue())
    assert "elapsed, about" not in terminal.getvalue()


def test_in_a_log_there_are_lines_and_no_bars(checkpoint, tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps(document) + "\n" for document in documents(90, 80)))
    words = ["--model", checkpoint, "--task", "spans", "--lengths", "16,32", "--depths", "2", "--span", "4", "--json"]
    words += ["--text", text, "--output", tmp_path / "runs", "--device", "cpu", "--trials", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, ROOT / "recipes" / "passkey.py", *words, "--scheme", "yarn:factor=2"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, env=environment, check=True)
    assert len(json.loads(done.stdout)) == 3 * 2 * 2
    said = (tmp_path / "log").read_text()
    assert "\r" not in said
    assert "%|" not in said
    assert "it/s" not in said
    lines = [line for line in said.splitlines() if LINE.fullmatch(line)]
    assert len(lines) == 3 * 2 * 2
    assert lines[-1].endswith("about 00:00 left")
    assert all("% right; " in line for line in lines)
