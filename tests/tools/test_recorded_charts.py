"""The charts of the pages, drawn from the recorded rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rope_patch.evaluation.tables import Grid
from tools import recorded_charts

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("chart", recorded_charts.CHARTS, ids=lambda chart: chart.stem)
def test_a_chart_is_on_a_page_and_drawn_from_its_rows(chart, tmp_path):
    rows, settings = recorded_charts.CHARTS[chart]
    drawn = recorded_charts.charts.figure(rows(), **settings)
    words = " ".join(text.get_text() for text in drawn.findobj(lambda artist: hasattr(artist, "get_text")))
    assert chart.is_file()
    assert f"{chart.parent.name}/{chart.name}" in "".join(page.read_text() for page in ROOT.glob("docs/**/*.md"))
    assert "sliding window" in words or {row.line for row in rows()} == {"plain"}
    assert not re.search(r"attention cut|text cut|Model: ,", words)


def test_the_table_of_drope_is_that_of_its_chart():
    grid = Grid.from_rows(recorded_charts.drope())
    names = {
        ("plain", 0): "plain checkpoint",
        ("nope", 0): "NoPE, not trained",
        ("nope", 40): "NoPE, recalibrated at L",
        ("nope+logn", 40): "NoPE, recalibrated at L, with log-n",
        ("yarn:factor=4", 0): "YaRN (factor 4), not trained",
        ("yarn:factor=4", 40): "YaRN (factor 4), trained at 4L",
    }
    page = (ROOT / "docs/finetuning.md").read_text()
    found = {(one.line, one.step or 0): one for one in grid.series}
    for key, name in names.items():
        cells = []
        for length in grid.lengths:
            difference, error = grid.apart(found[key], length)
            apart = f" ({difference:+.3f} ± {error:.3f})" if abs(difference) > 1e-6 else ""
            cells.append(f"{grid.row(found[key], length).loss:.3f}{apart}")
        assert f"| {name} | {' | '.join(cells)} |" in page
