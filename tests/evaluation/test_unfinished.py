"""A row whose contexts take minutes each goes on behind the last of them."""

from __future__ import annotations

import json

import pytest

from rope_patch.errors import EvaluationError
from rope_patch.evaluation import unfinished
from rope_patch.evaluation.protocols.last import Last
from rope_patch.evaluation.row import Rows
from rope_patch.evaluation.unfinished import Unfinished
from tests.evaluation.conftest import byte_tokenizer, documents, measure, tiny_llama


@pytest.fixture
def scored(monkeypatch):
    """The lengths of the contexts that are read; the fifth one is interrupted, once."""
    lengths, score = [], Last.score

    def interrupted(task, model, item):
        lengths.append(item.length)
        if len(lengths) == 5:
            raise KeyboardInterrupt
        return score(task, model, item)

    monkeypatch.setattr(Last, "score", interrupted)
    return lengths


def measured(rows=None):
    schemes, lengths = ["plain", "yarn:factor=2"], [16, 32]
    settings = {"results": rows, "windows_per_document": 1}
    return measure(tiny_llama(), byte_tokenizer(), documents(45, 50, 55), schemes, lengths, **settings)


def losses(rows):
    return [(row.line, row.length, row.nll, row.nll_by_document) for row in rows]


def test_a_stop_costs_one_context(scored, tmp_path, monkeypatch):
    monkeypatch.setattr(unfinished, "WORTH", 0.0)
    path = tmp_path / "rows.jsonl"
    with pytest.raises(KeyboardInterrupt):
        measured(Rows(path))
    assert [row.length for row in Rows(path).rows] == [16]  # of three contexts; the next row has one
    (line,) = (tmp_path / "rows.unfinished.jsonl").read_text().splitlines()
    assert json.loads(line)["item"] == 0
    found = measured(Rows(path))
    assert scored == [16, 16, 16, 16, 16, 16, 16, *6 * [32]]
    assert not (tmp_path / "rows.unfinished.jsonl").exists()
    assert losses(found) == losses(measured())
    assert [row.seconds is None for row in found] == [False, False, True, False]  # a part of it passed in another run


def test_what_takes_no_time_is_not_kept(scored, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        measured(Rows(tmp_path / "rows.jsonl"))
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_another_row_and_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "rows.unfinished.jsonl"
    line = {"key": "a", "item": 0, "losses": [1.5, 0.1]}
    path.write_text(json.dumps(line) + "\n" + json.dumps({**line, "key": "b"}) + '\n{"key": "a", "it')
    kept = Unfinished(tmp_path / "rows.jsonl")
    assert kept.scored("a", 0, lambda: 1 / 0).tolist() == [1.5, 0.1]
    assert kept.scored("a", 1, lambda: 7) == 7
    kept.forget("a")
    assert [json.loads(each)["key"] for each in path.read_text().splitlines()] == ["b"]
    Unfinished(tmp_path / "rows.jsonl").forget("b")
    assert not path.exists()


def test_a_file_of_something_else(tmp_path):
    (tmp_path / "rows.unfinished.jsonl").write_text("[1]\n")
    with pytest.raises(EvaluationError, match=r"rows.unfinished.jsonl, line 1"):
        Unfinished(tmp_path / "rows.jsonl")
