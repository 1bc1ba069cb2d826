from __future__ import annotations

import io
import math
import shutil
import sys
from dataclasses import replace

import pytest
from matplotlib.colors import to_hex
from matplotlib.image import imread
from rich.console import Console

from rope_patch.errors import EvaluationError
from rope_patch.evaluation import charts, tables
from rope_patch.evaluation.row import Rows
from tests.plots.look import check_look

from .rows import row
from .test_rows import RESULTS

NLL = {
    "plain": [1.2, 2.6, 3.4],
    "window": [1.1, 1.15, 1.15],
    "pi:target=auto": [1.1, 2.5, 3.2],
    "rerope:window=128+logn": [1.11, 1.12, 1.13],
}
REGIMES = {"pi:target=auto": "fine-tune"}
SPREAD = {"rerope:window=128+logn": 0.3}  # of the losses of documents, where it is not that of all other lines


def by_document(line, nll):
    """12 documents, hard and easy ones in turn."""
    return [nll + side * SPREAD.get(line, 0.2) for side in (-1, 1)] * 6


ROWS = [
    row(
        line=line,
        length=256 * 2**i,
        nll=nll,
        regime=REGIMES.get(line, "training-free"),
        nll_by_document=by_document(line, nll),
    )
    for line, values in NLL.items()
    for i, nll in enumerate(values)
]
CLEAR = [replace(each, nll_by_document=[each.nll + 0.05 * (i % 3) for i in range(12)]) for each in ROWS]


def printed(rows, **settings):
    console = Console(file=io.StringIO(), **{"width": 100, **settings})
    tables.print_table(rows, console)
    return console.file.getvalue()


def line_of(text, name, below=0):
    lines = text.splitlines()
    return lines[next(i for i, line in enumerate(lines) if name in line) + below]


def test_the_table_has_every_cell_and_stars_what_is_best_beyond_noise():
    text = printed(ROWS)
    assert line_of(text, "ReRoPE").split()[-3:] == ["1.110", "1.120", "1.130"]  # its lead of one or two errors is noise
    assert "*" not in text
    assert "1L" in text
    assert "4L" in text
    text = printed(CLEAR)
    assert line_of(text, "ReRoPE").split()[-3:] == ["1.110", "1.120*", "1.130*"]  # two lines share the first best
    assert text.count("*") == 3  # two cells, and what the star means
    twin = [replace(each, line="yarn:factor=4") for each in CLEAR if each.line.startswith("rerope")]
    assert "*" not in printed([*CLEAR, *twin])  # none of two equals is the best


def test_the_table_says_what_was_measured():
    text = printed(ROWS)
    assert "same last 128 tokens of 12 windows from 12 documents" in text
    assert "PI †" in text
    assert "standard errors over 12 documents" in text
    assert "only" not in text
    assert "† made to be fine-tuned" in text
    assert "too short" not in text
    assert "2 documents too short for 256 tokens and left out" in printed([row(short_documents=2)])


def test_below_each_loss_is_the_difference_from_the_cut_with_its_paired_error():
    text = printed(ROWS)
    error = 0.1 * (12 / 11) ** 0.5 / 12**0.5  # of differences that are 0.1 off their mean, up and down in turn
    assert f"{error:.3f}" == "0.030"
    assert line_of(text, "ReRoPE", below=1).split() == ["+0.010", "±0.030", "-0.030", "±0.030", "-0.020", "±0.030"]
    narrow = printed(ROWS, width=60)
    assert line_of(narrow, "ReRoPE, w = 128, log-n", below=1).split() == ["+0.010", "-0.030", "-0.020"]
    assert line_of(narrow, "ReRoPE, w = 128, log-n", below=2).split() == ["±0.030"] * 3
    assert "+2.250 ±0.000" in line_of(text, "plain checkpoint", below=1)
    assert line_of(text, "sliding window", below=1).count("±0.060") == 3  # its own, of 0.2 up and down
    alone = printed([each for each in ROWS if each.line != "window"])
    assert line_of(alone, "plain checkpoint", below=1).count("±0.060") == 3
    assert "±?" in printed([row()])  # of old files


def test_nothing_is_starred_where_all_are_equal():
    equal = [row(line=line, nll=1.2345) for line in ("plain", "window")]
    other = [row(line=line, length=512, nll=nll) for line, nll in (("plain", 3.0), ("window", 1.0))]
    assert "*" not in printed(equal)
    assert "*" not in printed([row()])
    assert "*" not in printed([*equal, *other])  # old files have no losses of documents: their noise is unknown


def test_the_text_is_named_and_what_is_too_little_is_told():
    told = {"text": "book.txt", "asked": 8, "documents": 1, "windows": 3, "nll_by_document": [1.0, 2.0, 3.0]}
    rows = [row(**told, line=line) for line in ("plain", "window")]
    for shown in (printed(rows, width=300), charts.figure(rows).get_supxlabel().replace("\n", " ")):
        for sentence in (
            "asked for 8 documents, found 1",
            "only 3 windows: below 8 a standard error means little",
            "standard errors over 3 windows of 1 document",
            "text: book.txt; nll of the same last 128 tokens of 3 windows from 1 document",
        ):
            assert sentence in shown.lower()


@pytest.mark.parametrize("width", [40, 60, 200])
def test_the_table_keeps_to_its_width(width):
    assert max(map(len, printed(ROWS, width=width).splitlines())) <= width


def test_colours_only_where_there_is_a_terminal(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" not in printed(CLEAR)
    coloured = printed(CLEAR, force_terminal=True, color_system="standard")
    assert "32m" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert "32m" not in printed(CLEAR, force_terminal=True, color_system="standard")


@pytest.mark.parametrize("field", ["protocol", "model", "weights", "texts", "dtype"])
@pytest.mark.parametrize("show", [tables.table, charts.figure])
def test_rows_that_cannot_be_compared_are_not_shown_together(show, field):
    with pytest.raises(EvaluationError, match=f"rows with different {field} cannot share"):
        show([row(), row(length=512, **{field: "another"})])


@pytest.mark.parametrize(("protocol", "what"), [("last", "targets"), ("sliding", "stride"), ("yarn_compat", "stride")])
@pytest.mark.parametrize("show", [tables.table, charts.figure])
def test_rows_of_another_stride_or_number_of_targets_are_not_shown_together(show, protocol, what):
    with pytest.raises(
        EvaluationError, match=f"rows with different {what} cannot share a table or a picture: 128, 256"
    ):
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
        assert tuple(values) in lines, line
    assert (main.get_xscale(), main.get_yscale(), main.get_ylabel()) == ("log", "linear", "NLL, nats per token")
    assert [label.get_text() for label in close_up.get_xticklabels()] == ["1L\n256", "2L\n512", "4L\n1024"]
    for line, values in NLL.items():
        difference = [a - b for a, b in zip(values, NLL["window"], strict=True)]
        assert any(list(drawn.get_ydata()) == difference for drawn in close_up.get_lines()), line
    assert any(list(line.get_xdata()) == [1, 1] for line in main.get_lines())  # the training length
    assert lines[tuple(NLL["plain"])].get_linestyle() == "--"


def band_of(axes, colour):
    """Height of a band at every length, by the colour of its line."""
    (found,) = (band for band in axes.collections if to_hex(band.get_facecolor()[0]) == to_hex(colour))
    corners = found.get_paths()[0].vertices
    return [max(ys) - min(ys) for x in (1, 2, 4) for ys in [corners[corners[:, 0] == x, 1]]]


def test_bands_are_the_error_of_the_loss_and_below_that_of_the_difference():
    main, close_up = charts.figure(ROWS).axes
    colour = next(line.get_color() for line in main.get_lines() if list(line.get_ydata()) == [1.11, 1.12, 1.13])
    assert band_of(main, colour) == pytest.approx([2 * 0.3 / 11**0.5] * 3)
    assert band_of(close_up, colour) == pytest.approx([2 * 0.1 / 11**0.5] * 3)


@pytest.mark.parametrize(
    "differences",
    [
        {"a": [0.0, 0.3, 0.8]},  # all above the cut, by far
        {"a": [0.0, 0.3, 0.8], "b": [0.1, 5.0, 7.0], "c": [0.0, 3.0, 9.0], "d": [1.0, 2.0, 3.0], "e": [0.0, 8.0, 9.0]},
        {"a": [0.0, -0.01, 0.01], "b": [0.0, -0.5, 4.0]},
        {"a": [0.0, math.nan, 2.0]},
        {"a": [0.0, 0.0, 0.0]},
        {},  # the references alone
    ],
)
def test_the_close_up_shows_the_closest_lines_whole_and_every_gain(differences):
    lines = {"plain": [1.0, 2.0, 3.0], "window": [1.0] * 3} | {
        line: [1 + difference for difference in found] for line, found in differences.items()
    }
    rows = [row(line=line, length=256 * 2**i, nll=nll) for line, found in lines.items() for i, nll in enumerate(found)]
    low, high = charts.figure(rows).axes[1].get_ylim()
    known = {line: [d for d in found if not math.isnan(d)] for line, found in (differences or {"plain": [2.0]}).items()}
    closest = sorted(known, key=lambda line: max(map(abs, known[line])))[:3]
    assert all(low < d < high for line in closest for d in known[line])
    assert low < min([0.0, *(d for found in known.values() for d in found)])
    if len(known) > 3:
        assert high < 7.9  # the others would flatten it


def test_every_line_is_named_at_its_end_and_no_name_is_over_another():
    figure = charts.figure(
        [*ROWS, *(row(line=f"yarn:factor={i}", length=1024, nll=1.1 + i / 1000) for i in range(2, 8))]
    )
    check_look(figure)
    names = [text for text in figure.axes[0].texts if text.get_text() != "training length"]
    shown = [text.get_text() for text in sorted(names, key=lambda text: -text.xyann[1])]
    assert shown[:2] == ["plain checkpoint", "PI †"]  # as the lines end
    assert shown[-1] == "YaRN, factor = 2"
    assert {text.get_size() for text in names} == {charts.SIZE}


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
    assert picture.shape[1] == 1040
    assert picture[..., :3].std() > 0.02
    assert ("matplotlib.pyplot" in sys.modules) == state
    printed(rows)


@pytest.mark.parametrize(("cut", "said"), [(3.4, False), (3.55, False), (8.6, True)])
def test_a_cut_that_loses_the_first_tokens_is_named(cut, said):
    """TinyLlama: the sliding window collapses beyond it, so being below it means nothing."""
    spread = [0.01 * (i % 3) for i in range(12)]
    rows = [
        row(line=line, length=length, nll=nll, nll_by_document=[nll + each * scale for each in spread])
        for line, length, nll, scale in [
            ("plain", 256, 3.5, 1),
            ("plain", 1024, 7.7, 2),
            ("window", 256, 3.5, 1),
            ("window", 1024, cut, 3),
        ]
    ]
    notes = [note for note in tables.Grid.from_rows(rows).notes() if "lost the first tokens" in note]
    assert bool(notes) == said
    if said:
        assert notes[0].startswith("§ the sliding window is +5.100 ±0.00")
    assert ("sliding window §" in printed(rows)) == said
    drawn = {text.get_text() for text in charts.figure(rows).axes[0].texts}
    assert ("sliding window" in drawn) != said  # it does not stand in the picture
    assert "truncated text" in drawn


def trained(line, step, nll, **changed):
    """A row of a training, whose weights are others at every step."""
    return row(
        line=line, step=step, nll=nll, weights=f"{line}{step}", nll_by_document=by_document(line, nll), **changed
    )


def test_a_training_is_a_line_per_scheme_and_step():
    rows = [
        trained(line, step, nll + longer, length=length, regime=regime)
        for line, step, nll, regime in [
            ("plain", 0, 2.0, "training-free"),
            ("window", 0, 1.5, "training-free"),
            ("pi:target=auto", 0, 1.9, "fine-tune"),
            ("pi:target=auto", 50, 1.4, "fine-tune"),
            ("pi:target=auto", 100, 1.2, "fine-tune"),
        ]
        for length, longer in ((256, 0.0), (1024, 0.1))
    ]
    text = printed(rows)
    assert line_of(text, "PI †, before").split()[-2:] == ["1.900", "2.000"]
    assert line_of(text, "PI, 100 steps").split()[-2:] == ["1.200*", "1.300*"]
    assert line_of(text, "PI, 100 steps", below=1).split() == ["-0.300", "±0.000", "-0.300", "±0.000"]
    main, _ = charts.figure(rows, title="Before and after").axes
    lines = {tuple(line.get_ydata()): line for line in main.get_lines()}
    assert (1.4, 1.5) not in lines  # of the steps between, the last is shown
    before, after = lines[1.9, 2.0], lines[1.2, 1.3]
    assert (before.get_linestyle(), after.get_linestyle()) == (":", "-")
    assert before.get_color() == after.get_color()
    names = {text.get_text() for text in main.texts}
    assert {"PI †, before", "PI, 100 steps", "plain checkpoint", "sliding window"} <= names
    check_look(main.figure)


def test_rows_of_old_trainings_are_shown(tmp_path):
    """Their files name neither texts nor protocol."""
    rows = Rows(shutil.copy(RESULTS / "finetune" / "finetune.jsonl", tmp_path / "rows.jsonl")).rows
    assert "NLL of the same 1536 tokens from 12 documents" in " ".join(printed(rows, width=200).split())
    check_look(charts.figure(rows))


def test_the_text_cut_to_l_is_a_line_of_old_rows(tmp_path):
    """It is the plain checkpoint at L on the same targets, which they have."""
    rows = Rows(shutil.copy(RESULTS / "demo" / "perplexity.jsonl", tmp_path / "rows.jsonl")).rows
    grid = tables.Grid.from_rows(rows)
    assert [one.line for one in grid.series[:3]] == ["plain", "cut", "window"]
    at_l = grid.row("plain", 256)
    assert {grid.row("cut", length).loss for length in grid.lengths} == {at_l.loss}
    assert {(row.line, row.length): row.nll for row in rows}.items() <= {
        (one.line, length): row.nll for (one, length), row in grid.rows.items()
    }.items()
    assert "truncated text" in printed(rows)
    assert grid.baseline == "window"
    assert "no room" not in printed(rows)
    assert "256 tokens have no room for 300 targets" in printed([row(line="window", length=512, targets=300)])
    within = tables.Grid.from_rows([row for row in rows if row.length == 256])
    beyond = tables.Grid.from_rows([row for row in rows if row.length > 256])
    assert "cut" not in {one.line for grid in (within, beyond) for one in grid.series}


def test_chosen_tokens_are_counted_and_the_others_are_a_second_column():
    def shown(tokens):
        told = {"protocol": "far", "length": 512, "scored_tokens": tokens, "chosen_share": tokens / 1536}
        return printed(
            [
                row(
                    line=line,
                    nll=nll,
                    others_nll=nll - 1,
                    nll_by_document=[nll + 0.01 * (i % 3) for i in range(12)],
                    **told,
                )
                for line, nll in (("plain", 5.0), ("cut", 3.0), ("yarn", 2.0))
            ],
            width=200,
        )

    assert line_of(shown(154), "YaRN").split() == ["YaRN", "2.000*", "1.000"]
    assert line_of(shown(154), "YaRN", below=1).split() == ["-1.000", "±0.000"]
    assert "154 tokens, 10.0% of the last 128 of the windows; others: the rest" in shown(154)
    assert line_of(shown(99), "YaRN").split() == ["YaRN", "2.000", "1.000"]  # not starred
    assert "99 tokens, 6.4% of the last 128 of the windows; below 100 nothing is claimed" in shown(99)
