"""How long a measurement will take: the guess on timings that are known, and what of it is shown where."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rope_patch.evaluation import processes
from rope_patch.evaluation.processes import Progress, in_turn
from rope_patch.evaluation.row import Rows

from .conftest import byte_tokenizer, documents, measure, tiny_llama

ROWS = [[length] * 4 for length in (256, 512, 1024, 2048, 4096)]
LINE = re.compile(r"(\d+) of (\d+): (.+); \d\d:\d\d elapsed, about \d\d:\d\d left")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves on."""
    moved = SimpleNamespace(now=100.0)
    monkeypatch.setattr(processes, "time", SimpleNamespace(perf_counter=lambda: moved.now))
    return moved


def read(clock, bar, row, seconds):
    """Read a row of contexts, each in `seconds` of its length."""
    bar.begin(f"{row[0]}")
    for length in row:
        clock.now += seconds(length)
        bar.update([length])


TIMINGS = {
    "quadratic": lambda n: 3e-6 * n**2,
    "both": lambda n: 1e-3 * n + 2e-6 * n**2,
    "linear": lambda n: 5e-4 * n,
}


@pytest.mark.parametrize("kind", TIMINGS)
def test_the_guess_knows_that_attention_is_quadratic(kind, clock):
    seconds = TIMINGS[kind]
    with Progress(tiny_llama(), ROWS) as bar:
        for row in ROWS[:3]:
            read(clock, bar, row, seconds)
        guess = bar.guess()
    remaining = sum(seconds(length) for row in ROWS[3:] for length in row)
    linear = (clock.now - 100) * sum(map(sum, ROWS[3:])) / sum(map(sum, ROWS[:3]))
    assert guess == pytest.approx(remaining, rel=0.2)
    assert (remaining > 2 * linear) == (kind != "linear")


def test_before_a_second_length_the_model_tells_how_quadratic_it_is(clock):
    model = tiny_llama()  # 32 wide: 12 * 32^2 multiplications in the weights of a layer, 32 n in its attention
    with Progress(model, ROWS) as bar:
        read(clock, bar, ROWS[0], lambda n: 1e-8 * n * (12 * 32**2 + 32 * n))
        remaining = sum(1e-8 * n * (12 * 32**2 + 32 * n) for row in ROWS[1:] for n in row)
        assert bar.guess() == pytest.approx(remaining, rel=0.01)


def test_lengths_that_hardly_differ_decide_nothing(clock):
    with Progress(tiny_llama(), [[256] * 8 + [250], [1024] * 4]) as bar:
        read(clock, bar, [256] * 8, lambda n: 0.256)
        read(clock, bar, [250], lambda n: 0.4)  # a hiccup
        assert 0.9 * 1.024 * 4 < bar.guess() < 1.2 * 4.096 * 4  # between linear and quadratic


def test_rows_of_an_earlier_run_are_not_reckoned_with(clock):
    with Progress(tiny_llama(), [[256]] * 5) as bar:
        for number in range(2):
            bar.begin(f"{number}")  # and never updated
            clock.now += 1000  # what passes before a row begins is not its own
        read(clock, bar, [256], lambda n: 1.0)
        assert bar.guess() == pytest.approx(2)
        bar.begin("known, too")
        bar.begin("the last")
        assert bar.guess() == pytest.approx(1)


def test_what_is_still_to_come_in_a_round_counts(clock):
    guesses = []
    for _ in in_turn("abc"):
        with Progress(tiny_llama(), [[256], [256]]) as bar:
            read(clock, bar, [256], lambda n: 1.0)
            guesses.append(bar.guess())
    assert guesses == pytest.approx([5, 3, 1])
    with Progress(tiny_llama(), [[256], [256]]) as bar:
        read(clock, bar, [256], lambda n: 1.0)
        assert bar.guess() == pytest.approx(1)


def test_a_round_that_is_broken_off_leaves_nothing_behind(clock):
    for _ in in_turn("abc"):
        break
    with Progress(tiny_llama(), [[256], [256]]) as bar:
        read(clock, bar, [256], lambda n: 1.0)
        assert bar.guess() == pytest.approx(1)


def measured(results=None):
    measure(tiny_llama(), byte_tokenizer(), documents(45, 50), ["plain", "window"], [16, 32], results=results)


def test_a_line_for_each_row_that_is_measured_and_none_for_others(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    measured(Rows(tmp_path / "rows.jsonl"))
    lines = [LINE.fullmatch(line) for line in capsys.readouterr().err.splitlines()]
    assert [line.groups() for line in lines] == [
        ("1", "4", "plain checkpoint at 16"),
        ("2", "4", "plain checkpoint at 32"),
        ("3", "4", "attention cut at L at 16"),
        ("4", "4", "attention cut at L at 32"),
    ]
    measured(Rows(tmp_path / "rows.jsonl"))
    assert capsys.readouterr() == ("", "")


def test_a_notebook_that_took_stderr_over_is_left_alone(capsys):
    measured()
    assert capsys.readouterr() == ("", "")


def test_in_a_log_there_are_lines_and_no_bars(checkpoint, tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps(document) + "\n" for document in documents(90, 80)))
    words = ["--model", checkpoint, "--task", "spans", "--lengths", "16,32", "--depths", "2", "--span", "4", "--json"]
    words += [
        "--text",
        text,
        "--output",
        tmp_path / "out",
        "--device",
        "cpu",
        "--trials",
        "1",
        "--scheme",
        "yarn:factor=2",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, ROOT / "recipes" / "passkey.py", *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, env=environment, check=True)
    assert len(json.loads(done.stdout)) == 3 * 2 * 2
    said = (tmp_path / "log").read_text()
    assert "\r" not in said
    assert "%|" not in said
    assert "it/s" not in said
    lines = [line for line in said.splitlines() if LINE.fullmatch(line)]
    assert len(lines) == 3 * 2 * 2
    assert lines[-1].endswith("about 00:00 left")
