"""Budgets in minutes: what they allow is known before the measuring, and a run that goes on reads the same texts."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from rope_patch.errors import EvaluationError
from rope_patch.evaluation import budget
from rope_patch.evaluation.budget import Part, fewer_documents, halves_within, seconds_of_a_line
from rope_patch.evaluation.tasks.task import Cell, Task
from tests.recipes import refuse, run_recipe

from .conftest import documents


class Windows(Task):
    """Two windows of each length, one of which all lengths share."""

    name = "windows"
    shared = [0] * 8

    def cells(self, length):
        return [Cell(rows=[{}], items=[self.shared, [0] * length])]


def test_a_line_takes_the_seconds_of_all_its_windows_once():
    rates = {16: 0.25, 64: 0.5}
    assert seconds_of_a_line(rates, Windows(), [16, 64]) == pytest.approx(16 * 0.25 + 64 * 0.5 + 8 * 0.5)


@pytest.mark.parametrize(
    ("documents", "chosen", "numbers"),
    [(20, False, [20, 10, 5, 4]), (20, True, [20]), (4, False, [4]), (2, False, [2])],
)
def test_fewer_documents(documents, chosen, numbers):
    assert fewer_documents(documents, chosen) == numbers


def within(minutes, numbers, said):
    """With six seconds of a line for each document: 5 lines are certain, 15 are wanted."""
    return halves_within(
        minutes, numbers, lambda number: number, lambda number: [Part(6.0 * number, 5, 15)], said.append
    )


@pytest.mark.parametrize(("minutes", "read"), [(30, 20), (29, 10), (15, 10), (7.5, 5), (6, 4), (2, 4)])
def test_as_many_documents_are_read_as_the_wanted_lines_allow(minutes, read):
    said = []
    assert within(minutes, [20, 10, 5, 4], said) == read
    assert (f"the budget allows {read} of 20 documents of each half" in said) == (read < 20)
    assert said[-1].startswith(f"about {read / 2:.2g} of the {minutes:.2g} minutes")


def test_a_budget_that_does_not_cover_the_least_is_refused_with_one_that_does():
    with pytest.raises(
        EvaluationError, match=r"4 documents.* take about 2 minutes, and 1.9 are left.*--budget-minutes 8"
    ):
        within(1.9, [20, 10, 5, 4], [])


@pytest.fixture
def words(checkpoint, tmp_path, monkeypatch):
    """A sweep of two schemes on eighteen documents, with windows that each take a tenth of a second."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for document in documents(*range(150, 330, 10)):
        (folder / f"{document['name']}.txt").write_text(document["text"])
    monkeypatch.setattr(
        budget, "seconds_per_token", lambda model, task, lengths: {each: 0.1 / each for each in lengths}
    )
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    asked = ["--target", "4x", "--model", checkpoint, "--text", folder, "--schemes", "yarn", "--targets", "8"]
    return [*asked, "--device", "cpu", "--json", "--output", tmp_path / "out", "--windows-per-document", "1"]


def test_a_sweep_reads_fewer_documents_within_a_budget_and_goes_on_with_them(words, capsys):
    assert run_recipe("sweep", [*words, "--budget-minutes", "0.3"]) == 0
    first = capsys.readouterr()
    assert "the budget allows 4 of 9 documents of each half" in first.err
    found = json.loads(first.out)
    assert {row["documents"] for row in found["rows"]} == {4}
    assert run_recipe("sweep", [*words, "--budget-minutes", "30"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["confirmation"] == found["confirmation"]


def test_a_sweep_refuses_a_budget_that_ends_before_the_first_scheme(words, capsys):
    refuse("sweep", [*words, "--budget-minutes", "0.01"], "the budget is not enough: with 4 documents", capsys)


def test_an_earlier_run_is_known_by_its_texts():
    rows = [SimpleNamespace(texts="a", documents=4), SimpleNamespace(texts="b", documents=9)]

    def task_of(number):
        return SimpleNamespace(cells=lambda length: [Cell(rows=[{"texts": {4: "a", 9: "other"}[number]}], items=[])])

    assert budget.documents_before(rows, 16, task_of) == 4
    assert budget.documents_before([], 16, task_of) is None
