"""Retrieval and a sweep by two processes: the figures of one. `work` is what each of the two does."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rope_patch.cli.common import run_politely
from rope_patch.errors import EvaluationError
from rope_patch.evaluation import measurement, sharing
from rope_patch.evaluation import sweep as sweeping
from rope_patch.evaluation.retrieval import experiment as retrieving
from rope_patch.evaluation.retrieval import spans
from rope_patch.evaluation.retrieval.experiment import Retrieval
from rope_patch.evaluation.sweep import Sweep
from rope_patch.evaluation.sweep_report import to_dict

from ..processes import run_two
from .conftest import documents


def retrieved(checkpoint, folder, say=measurement.silent, **changed):
    settings = {"model": str(checkpoint), "device": "cpu", "output": str(folder / "retrieval"), "depths": 2}
    settings |= {"task": "spans", "text": f"{folder}/*.txt", "span": 6, "trials": 3, **changed}
    return retrieving.run(Retrieval((16, 64), ("rerope:window=8+logn",), **settings), say)


def swept(checkpoint, folder, say=measurement.silent):
    settings = {"model": str(checkpoint), "device": "cpu", "output": str(folder / "sweep"), "text": str(folder)}
    settings |= {"schemes": ("rerope",), "targets": 8, "budget_measurements": 4, "budget_minutes": 10}
    return sweeping.run(Sweep("2x", **settings), say)


def lasting(rows):
    """Rows without what the clock says, and without the sources, which somebody may be editing meanwhile."""
    passing = ("seconds", "tokens_per_second", "code", "commit")
    return [{name: value for name, value in json.loads(row.to_json()).items() if name not in passing} for row in rows]


def in_json(outcome):
    """What a sweep found, without the places."""
    return {key: value for key, value in to_dict(outcome).items() if key not in ("results", "picture")}


def fail_elsewhere():
    if not sharing.is_main():
        raise EvaluationError("no room on the second device")


def work(rank: int, checkpoint: Path, folder: Path) -> None:
    said, passes = [], []
    last_logits = spans._last_logits
    spans._last_logits = lambda *arguments: passes.append(1) or last_logits(*arguments)
    rows = retrieved(checkpoint, folder, said.append).rows
    if not sharing.is_main():  # its clock says that every budget is used up
        sweeping.time = SimpleNamespace(monotonic=itertools.count(0, 10**6).__next__)
    outcome = swept(checkpoint, folder, said.append)
    found = {
        "said": said,
        "passes": len(passes),
        "retrieval": lasting(rows),
        "again": lasting(retrieved(checkpoint, folder).rows),
        "sweep": lasting(outcome.rows),
        "found": in_json(outcome),
        "status": run_politely(lambda: measurement._on_all(fail_elsewhere)),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def texts():
    return documents(90, 110, 100)


def write(texts, folder):
    for document in texts:
        (folder / f"{document['name']}.txt").write_text(document["text"])
    return folder


@pytest.fixture(scope="module")
def together(checkpoint, texts, tmp_path_factory):
    """What each of two processes found, and what they wrote."""
    folder = write(texts, tmp_path_factory.mktemp("together"))
    assert run_two(work, checkpoint, folder) == [0, 0]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)], folder


@pytest.fixture
def alone(texts, tmp_path):
    """Texts for one process that computes with one thread, as the two do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield write(texts, tmp_path)
    torch.set_num_threads(threads)


def test_two_processes_retrieve_what_one_does(together, alone, checkpoint):
    rows = lasting(retrieved(checkpoint, alone).rows)
    for found in together[0]:
        assert found["retrieval"] == found["again"] == rows


def test_the_two_divide_the_prompts(together):
    questions = 3 * 2 * 3  # schemes, lengths, and of each the control and two depths
    assert [found["passes"] for found in together[0]] == [2 * questions] * 2  # of three trials


def test_two_processes_sweep_as_one_does(together, alone, checkpoint):
    outcome = swept(checkpoint, alone)
    assert outcome.recommended is not None
    for found in together[0]:
        assert found["sweep"] == lasting(outcome.rows)
        assert found["found"] == in_json(outcome)


def test_one_of_the_two_writes_draws_and_speaks(together):
    (first, second), folder = together
    assert len((folder / "retrieval" / "spans.jsonl").read_text().splitlines()) == len(first["retrieval"])
    assert (folder / "retrieval" / "spans.png").is_file()
    assert (folder / "sweep" / "sweep.png").is_file()
    assert any("task spans" in sentence for sentence in first["said"])
    assert second["said"] == []


def test_what_fails_on_one_process_alone_ends_both(together):
    assert [found["status"] for found in together[0]] == [2, 2]
