"""Means and spreads by hand, the table, and a chart of many encodings."""

from __future__ import annotations

import io
import json
import math
import warnings

import pytest
from rich.console import Console

from rope_patch.errors import EvaluationError
from rope_patch.training import chart, report
from rope_patch.training.records import CostRow
from tests.training.conftest import row


def some_rows():
    return [
        row("rope", 0, 16, 1.0),
        row("rope", 1, 16, 1.2),
        row("rope", 2, 16, 1.7),
        row("rope", 0, 32, 4.0),
        row("nope", 0, 16, 2.0),
        row("nope", 0, 32, 2.5),
        row("learned", 0, 16, 2.1, slots=["embedding"], encoding_parameters=512),
        row("learned", 0, 32, math.nan, slots=["embedding"], failure="UnsupportedPositions: position 16"),
    ]


def cost(encoding="learned"):
    numbers = {"tokens_per_second": 10.0, "relative_speed": 0.5, "slowest": 0.4, "fastest": 0.6}
    said = {"settings": "s", "device": "cpu", "threads": 1, "code": "c", "versions": {}, "commit": None}
    memory = {"memory_bytes": 3, "relative_memory": 1.5, "memory_kind": "saved for backward"}
    return CostRow(encoding=encoding, failure=None, repetitions=3, **numbers, **memory, **said)


def test_mean_and_spread():
    rope, nope, learned = report.summarise(some_rows()).entries
    assert rope.cells[16].mean == pytest.approx(1.3)
    assert rope.cells[16].spread == pytest.approx(math.sqrt((0.09 + 0.01 + 0.16) / 2))
    assert (rope.cells[32].seeds, math.isnan(rope.cells[32].spread)) == (1, True)
    assert (rope.below_baseline, nope.below_baseline, learned.below_baseline) == (True, None, False)
    assert (learned.slot, learned.parameters) == ("embedding", 512)
    assert math.isnan(learned.cells[32].mean)
    assert learned.failures == ("UnsupportedPositions: position 16",)


def test_markdown():
    lines = report.markdown(report.summarise(some_rows(), [cost()])).splitlines()
    assert lines[0] == "| encoding | slot | new parameters | 1L | 2L | below nope | speed | memory |"
    assert lines[2] == "| `rope` | frequencies | 0 | 1.300* ± 0.361 | 4.000 | yes | - | - |"
    assert lines[4] == "| `learned` | embedding | 512 | 2.100 | failed | no | 0.50x (0.40 to 0.60) | 1.50x |"
    assert any("bytes saved for backward over those of rope" in line for line in lines)
    assert lines[-1] == "- learned: UnsupportedPositions: position 16"


def test_the_table_fits_eighty_columns():
    console = Console(width=80, record=True, file=io.StringIO())
    summary = report.summarise(some_rows(), [cost()])
    report.print_table(summary, console)
    shown = console.export_text()
    assert "frequencies, 0" in shown
    assert "± 0.361" in shown
    assert "…" not in shown


def test_the_summary_is_json():
    data = json.loads(json.dumps(report.to_dict(report.summarise(some_rows()), {"rope": {"0": []}}), allow_nan=False))
    assert data["encodings"][0]["nll"]["32"] == {"mean": 4.0, "std": None, "seeds": 1}
    assert data["encodings"][2]["nll"]["32"]["mean"] is None
    assert data["encodings"][0]["curves"] == {"0": []}


def test_rows_that_do_not_belong_together():
    with pytest.raises(EvaluationError, match="no rows"):
        report.summarise([])
    with pytest.raises(EvaluationError, match="different settings"):
        report.summarise([row(), row("nope", settings="other")])


def test_rows_of_another_state_of_the_library_are_told():
    assert any("2 states of this library" in note for note in report.summarise([row(), row("nope", code="d")]).notes)
    assert not any("states" in note for note in report.summarise(some_rows()).notes)


def test_a_slot_of_several():
    assert report.panel_of(["bias", "values"]) == "values"
    assert report.panel_of(["frequencies", "query_scale"]) == "frequencies"
    assert report.panel_of(["bias", "frequencies"]) == "bias"


def test_a_row_survives_the_disk():
    failed = row(nll=math.nan, perplexity=math.nan, failure="why")
    again = type(failed).from_json(failed.to_json())
    assert math.isnan(again.nll)
    assert again.to_json() == failed.to_json()
    with pytest.raises(ValueError, match="fields"):
        type(failed).from_json('{"nll": 1}')


def test_twenty_encodings_in_a_chart(tmp_path):
    rows = []
    for index in range(24):
        slot = report.PANELS[min(3, index // 5)]
        name = ("rope", "nope")[index] if index < 2 else "alibi" if index == 5 else f"scheme_{index}:fields=many"
        for seed in (0, 1):
            for step, length in enumerate((16, 32, 64, 128)):
                nll = 1.3 + 0.01 * index + 0.01 * seed + step * (1.5 if index % 7 == 1 else 0.05)
                failure = "no" if (index, length) == (9, 128) else None
                rows.append(row(name, seed, length, math.nan if failure else nll, slots=[slot], failure=failure))
    summary = report.summarise(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = chart.save(summary, tmp_path / "chart.png")
        drawn = chart.figure(summary)
    assert path.stat().st_size > 50_000
    panels = [axes for axes in drawn.axes if axes.axison]
    assert [panel.get_title(loc="left") for panel in panels] == [f"slot: {slot}" for slot in report.PANELS]
    labels = [[text.get_text() for text in panel.texts] for panel in panels]
    assert all({"rope", "alibi"} <= set(words) for words in labels)
    assert any("↑" in word for word in labels[0])
    assert "scheme_9 fields=many (to 4L)" in labels[1]


def test_one_encoding_that_failed_throughout(tmp_path):
    summary = report.summarise([row(nll=math.nan, failure="why")])
    assert chart.save(summary, tmp_path / "chart.png").is_file()
    assert "failed" in report.markdown(summary)
