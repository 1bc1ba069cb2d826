"""`accelerate launch` with two processes: a recipe gives the rows of one process, or refuses by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rope_patch.cli.options import in_one_process
from rope_patch.errors import EvaluationError

ROOT = Path(__file__).parents[1]
FEW = ["--device", "cpu", "--documents", "2", "--windows-per-document", "1", "--targets", "16"]
WORKING = {
    "perplexity": ["--lengths", "256,512", "--scheme", "rerope:window=128", *FEW],
    "passkey": ["--task", "spans", "--lengths", "256,512", "--depths", "2", "--trials", "1", "--device", "cpu"],
    "sweep": ["--target", "2x", "--schemes", "yarn", *FEW],
    "search": ["--target", "2x", "--population", "4", "--generations", "1", *FEW],
    "finetune": ["--scheme", "yarn:target=auto", "--length", "512", "--steps", "2", "--batch-size", "2", *FEW],
}
REFUSED = {
    "compare_encodings": ["--encodings", "rope"],
    "serve": ["recipes/assets/tiny-llama"],
}


def launched(number, recipe, words):
    """The ended command. Without `--cpu`, which would start one process, accelerate starts as many as it is told."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launcher += ["--main_process_port", "0"]  # any that is free
    command = [*(launcher if number > 1 else [sys.executable]), f"recipes/{recipe}.py", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600)


def results(folder):
    """What was measured, by file: which rows, and their numbers."""
    named, numbers = ("line", "task", "length", "depth", "step"), ("nll", "accuracy")
    found = {}
    for file in sorted(folder.glob("*.jsonl")):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        found[file.name] = (
            [[row.get(name) for name in named] for row in rows],
            [row[name] for row in rows for name in numbers if row.get(name) is not None],
        )
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", WORKING)
def test_two_processes_write_the_rows_of_one(recipe, tmp_path):
    for number in (1, 2):
        ended = launched(number, recipe, [*WORKING[recipe], "--output", str(tmp_path / str(number))])
        assert ended.returncode == 0, ended.stderr[-2000:]
    alone, together = (results(tmp_path / str(number)) for number in (1, 2))
    assert alone
    assert alone.keys() == together.keys()
    for file, (rows, numbers) in alone.items():
        assert together[file] == (rows, pytest.approx(numbers, abs=1e-4))  # trained weights differ by rounding


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", REFUSED)
def test_others_refuse_by_name(recipe):
    ended = launched(2, recipe, REFUSED[recipe])
    assert ended.returncode != 0
    assert ended.stderr.count("runs in one process, but a launcher started 2") == 1, ended.stderr[-2000:]


def test_a_launcher_with_one_process_is_as_none(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    in_one_process("compare")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(EvaluationError, match="compare runs in one process, but a launcher started 2"):
        in_one_process("compare")
