from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from rope_patch.cli.showing import show_outcome
from rope_patch.evaluation import report
from rope_patch.evaluation.report import NumberTable
from tests.evaluation.rows import row

NUMBERS = [f"{number}.{number}{number}{number}" for number in range(9)]


def printed(table, width):
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_columns_without_room_go_on_below(width):
    table = NumberTable({"scheme": 12}, [str(2**n) for n in range(9)])
    table.add_row("rerope window=128 + logn", *NUMBERS)
    text = printed(table, width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    if width > 20:  # below, figures fold
        assert all(number in text for number in NUMBERS)
    assert text.count("scheme") == {20: 9, 40: 3, 60: 2, 80: 2, 200: 1}[width]


def test_a_row_is_beside_its_name_in_every_part():
    table = NumberTable({"scheme": 12}, ["a", "b", "c"])
    table.add_row("one", "1.111", "2.222", "3.333")
    table.add_row("two", "4.444", "5.555", "6.666")
    found = [line.replace("│", " ").split() for line in printed(table, 36).splitlines() if "│" in line]
    assert found == [["one", "1.111", "2.222"], ["two", "4.444", "5.555"], ["one", "3.333"], ["two", "6.666"]]


@pytest.mark.parametrize("width", [25, 40])
def test_no_figure_is_lost_in_a_narrow_terminal(width):
    rows = [row(line=line, length=256 * 2**i, nll=1.001 + i) for line in ("plain", "window") for i in range(5)]
    text = printed(report.table(rows), width)
    assert all(f"{1.001 + i:.3f}" in text for i in range(5))


@pytest.mark.parametrize("picture", ["out/picture.png", None])
def test_a_picture_that_was_not_drawn_is_not_named(picture, capsys):
    show_outcome(SimpleNamespace(results="out/rows.jsonl", picture=picture), lambda console: console.print("table"))
    assert capsys.readouterr().out.splitlines() == [
        "table",
        "rows     out/rows.jsonl",
        *([f"picture  {picture}"] if picture else []),
    ]
