"""The table and the charts show what was measured."""

from __future__ import annotations

import json
import math

import pytest
from rich.console import Console

from rope_patch.errors import EvaluationError
from rope_patch.finetuning import chart
from rope_patch.finetuning.history import Point
from rope_patch.finetuning.report import Story, as_json, print_table


def point(scheme, step, *nll, **changed):
    fields = {"training_length": 256, "scored_tokens": 64, "documents": 2, "weights": "w", **changed}
    return Point(scheme, step, dict(zip((256, 512), nll, strict=False)), **fields)


POINTS = [
    point("plain", 0, 1.5, 4.0),
    point("yarn:factor=2", 8, 1.6, 1.4),
    point("yarn:factor=2", 0, 1.7, 2.0),
    point("window", 0, 1.5, 1.8),
]


def test_references_first_then_in_the_order_of_the_steps():
    assert [(p.scheme, p.step) for p in Story.of(POINTS).points] == [
        ("plain", 0),
        ("window", 0),
        ("yarn:factor=2", 0),
        ("yarn:factor=2", 8),
    ]


def test_the_table(capsys):
    print_table([*POINTS, point("pi:factor=2", 0, math.nan, math.nan)], Console(width=120, color_system=None))
    out = capsys.readouterr().out
    (last,) = [line for line in out.splitlines() if "after 8 steps" in line]
    assert "1.600" in last
    assert "1.400*" in last
    assert out.count("1.500*") == 2
    assert "nan" not in out.lower() or "nan*" not in out.lower()
    assert "64 targets of 2 held-out documents" in out


def test_a_point_survives_its_line():
    for each in POINTS:
        assert Point.from_json(each.to_json()) == each
    broken = point("plain", 0, math.nan, 1.0)
    assert json.loads(broken.to_json())["nll"]["256"] is None
    assert math.isnan(Point.from_json(broken.to_json()).nll[256])
    assert json.loads(as_json([broken]))[0]["nll"] == {"256": None, "512": 1.0}
    with pytest.raises(ValueError, match="not the fields of a point"):
        Point.from_json("{}")


@pytest.mark.parametrize("field", ["training_length", "scored_tokens", "documents"])
def test_what_was_measured_otherwise_shares_no_table(field):
    with pytest.raises(EvaluationError, match=f"different {field}"):
        Story.of([*POINTS, point("pi:factor=2", 0, 1.0, 1.0, **{field: 7})])


def test_the_chart_says_every_line_and_its_numbers():
    drawn = chart.figure(POINTS, 512)
    lines, legend, close_up = drawn.axes
    assert len([line for line in lines.lines if len(line.get_xdata()) == 2 and line.get_label() != "_"]) >= 4
    (cut,) = (point.nll for point in POINTS if point.scheme == "window")
    above = [list(line.get_ydata()) for line in close_up.lines[:-1]]
    expected = [[nll - cut[n] for n, nll in point.nll.items()] for point in Story.of(POINTS).points]
    assert all(line in expected for line in above)
    assert [0.0, 0.0] in above
    texts = [text.get_text() for text in legend.texts]
    for part in ("plain checkpoint", "attention cut at L", "yarn factor=2, before", "yarn factor=2, after 8 steps"):
        assert part in texts
    assert "1.400" in texts


def test_the_curves(tmp_path):
    rows = [{"step": 1, "train_nll": 3.0}, {"step": 2, "train_nll": 2.0, "nll": {"256": 1.0, "512": 2.5}}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (axes,) = chart.curves({"yarn:factor=2": tmp_path}, 512).axes
    training, held_out = axes.lines
    assert (list(training.get_xdata()), list(training.get_ydata())) == ([1, 2], [3.0, 2.0])
    assert (list(held_out.get_xdata()), list(held_out.get_ydata())) == ([2], [2.5])
    assert chart.save_curves({}, 512, tmp_path / "none.png").exists()
