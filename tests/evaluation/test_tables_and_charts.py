from __future__ import annotations

import io
import math
import sys

import pytest
from matplotlib.image import imread
from rich.console import Console

from rope_patch.errors import EvaluationError
from rope_patch.evaluation import charts, tables

from .rows import row

NLL = {
    "plain": [1.1, 2.6, 3.4],
    "window": [1.1, 1.15, 1.15],
    "pi:target=auto": [1.1, 2.5, 3.2],
    "rerope:window=128+logn": [1.11, 1.12, 1.13],
}
REGIMES = {"pi:target=auto": "fine-tune"}
ROWS = [
    row(line=line, length=256 * 2**i, nll=nll, regime=REGIMES.get(line, "training-free"))
    for line, values in NLL.items()
    for i, nll in enumerate(values)
]


def printed(rows, **settings):
    console = Console(file=io.StringIO(), **{"width": 100, **settings})
    tables.print_table(rows, console)
    return console.file.getvalue()


def line_of(text, name):
    return next(line for line in text.splitlines() if name in line)


def test_the_table_has_every_cell_and_stars_the_best():
    text = printed(ROWS)
    assert [float(w.rstrip("*")) for w in line_of(text, "rerope").split() if w[0].isdigit()] == [1.11, 1.12, 1.13]
    assert line_of(text, "rerope window=128 + logn").count("*") == 2
    assert line_of(text, "plain checkpoint").count("*") == 1  # two lines share the first column's best
    assert line_of(text, "attention cut at L").count("*") == 1
    assert "1L" in text
    assert "4L" in text


def test_the_table_says_what_was_measured():
    text = printed(ROWS)
    assert "same last 128 tokens of 12 windows from 12 documents" in text
    assert "pi target=auto †" in text
    assert "† made to be fine-tuned" in text
    assert "too short" not in text
    assert "2 documents too short for 256 tokens and left out" in printed([row(short_documents=2)])


@pytest.mark.parametrize("width", [40, 60, 200])
def test_the_table_keeps_to_its_width(width):
    assert max(map(len, printed(ROWS, width=width).splitlines())) <= width


def test_colours_only_where_there_is_a_terminal(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" not in printed(ROWS)
    coloured = printed(ROWS, force_terminal=True, color_system="standard")
    assert "32m" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert "32m" not in printed(ROWS, force_terminal=True, color_system="standard")


@pytest.mark.parametrize("field", ["protocol", "model", "weights", "texts", "dtype"])
@pytest.mark.parametrize("show", [tables.table, charts.figure])
def test_rows_that_cannot_be_compared_are_not_shown_together(show, field):
    with pytest.raises(EvaluationError, match=f"rows of different {field} cannot share"):
        show([row(), row(length=512, **{field: "another"})])


@pytest.mark.parametrize(("protocol", "what"), [("last", "targets"), ("sliding", "stride"), ("yarn_compat", "stride")])
@pytest.mark.parametrize("show", [tables.table, charts.figure])
def test_rows_of_another_stride_or_number_of_targets_are_not_shown_together(show, protocol, what):
    with pytest.raises(EvaluationError, match=f"rows of different {what} cannot share a table or a picture: 128, 256"):
        show([row(protocol=protocol, targets=128), row(protocol=protocol, targets=256, length=512)])


@pytest.mark.parametrize("protocol", ["by_position", "disjoint", "yarn_truncate"])
def test_rows_whose_targets_follow_the_length_are_shown_together(protocol):
    rows = [row(protocol=protocol, targets=length, length=length) for length in (256, 512)]
    assert f"protocol {protocol}" in " ".join(printed(rows, width=200).split())


def test_the_table_says_the_stride():
    rows = [row(protocol="sliding", targets=64, windows=40, line=line) for line in NLL]
    assert "windows that slide by 64 tokens from 12 documents" in printed(rows, width=200)
    assert "64 new tokens per window, windows unweighted" in printed(
        [row(protocol="yarn_compat", targets=64)], width=200
    )


@pytest.mark.parametrize("show", [tables.table, charts.figure])
def test_no_rows_are_an_error(show):
    with pytest.raises(EvaluationError, match="no rows"):
        show([])


def test_the_chart_draws_the_numbers():
    main, close_up = charts.figure(ROWS).axes
    lines = {tuple(line.get_ydata()): line for line in main.get_lines()}
    for line, values in NLL.items():
        assert tuple(map(math.exp, values)) in lines, line
    assert main.get_xscale() == main.get_yscale() == "log"
    assert [label.get_text() for label in close_up.get_xticklabels()] == ["1L\n256", "2L\n512", "4L\n1024"]
    for line, values in NLL.items():
        difference = [a - b for a, b in zip(values, NLL["window"], strict=True)]
        assert any(list(drawn.get_ydata()) == difference for drawn in close_up.get_lines()), line
    assert any(list(line.get_xdata()) == [1, 1] for line in main.get_lines())  # the training length
    assert lines[tuple(map(math.exp, NLL["plain"]))].get_linestyle() == "--"


def test_the_legend_is_the_table_ordered_as_the_lines_end():
    texts = [text.get_text().split() for text in charts.figure(ROWS).axes[0].get_legend().get_texts()]
    assert [" ".join(words[:-3]) for words in texts] == [
        "plain checkpoint",
        "pi target=auto †",
        "attention cut at L",
        "rerope window=128 + logn",
    ]
    assert texts[-1][-3:] == ["1.110", "1.120*", "1.130*"]


def test_lines_are_told_apart_by_more_than_colour():
    rows = [row(line=f"yarn:factor={i}", length=256, nll=1 + i / 10) for i in range(2, 16)]
    lines = charts.figure(rows).axes[0].get_lines()[1:]
    looks = [
        (line.get_color(), line.get_marker(), str(line.get_linestyle()), str(line._dash_pattern)) for line in lines
    ]
    assert len(set(looks)) == 14


@pytest.mark.parametrize(
    "rows",
    [
        ROWS,
        ROWS[:-1],  # a cell that is missing
        [row()],  # one point
        [row(line=line, nll=math.nan) for line in ("plain", "window")],
        [*ROWS, row(line="nope", length=512, nll=900.0, regime="from-scratch")],
    ],
    ids=["whole", "missing", "single", "nan", "overflow"],
)
def test_a_picture_is_written_without_pyplot(tmp_path, rows):
    state = "matplotlib.pyplot" in sys.modules
    path = charts.save(rows, tmp_path / "chart.png")
    picture = imread(path)
    assert picture.shape[1] > 2000
    assert picture[..., :3].std() > 0.02
    assert ("matplotlib.pyplot" in sys.modules) == state
    printed(rows)
