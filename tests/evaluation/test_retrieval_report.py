"""Rows of retrieval as tables and as heat maps."""

from __future__ import annotations

import math

import pytest
from matplotlib.image import imread
from rich.console import Console

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.retrieval import chart
from rope_patch.evaluation.retrieval.report import Grid, print_tables

from .retrieval_rows import row


def rows(task="spans", lines=("plain", "window", "yarn:factor=auto"), share=0.6):
    """A cell is `share` where it is near, half of that where it is far, and 0 at 1024 tokens and depth 0."""
    made = []
    for line in lines:
        for length in (256, 1024):
            for depth in (0.0, 0.5, 1.0):
                distance = round((1 - depth) * (length - 64)) + 8
                accuracy = 0.0 if (length, depth) == (1024, 0.0) else share if distance < 256 else share / 2
                kept = {} if task == "spans" else {"span": None, "nll": None, "control_accuracy": None}
                made.append(
                    row(
                        task=task,
                        line=line,
                        length=length,
                        depth=depth,
                        distance=distance,
                        accuracy=accuracy,
                        prompts=f"{length}/{depth}",
                        **kept,
                    )
                )
    return made


def shown(of):
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_tables(of, console)
    return console.export_text()


def test_means_are_over_the_depths_that_they_say():
    grid = Grid.of(rows())
    assert grid.mean("plain", 256) == pytest.approx(0.6)
    assert grid.mean("plain", 1024) == pytest.approx((0 + 0.3 + 0.6) / 3)
    assert grid.mean("plain", 1024, lambda r: r.far) == pytest.approx(0.15)
    assert math.isnan(grid.mean("plain", 256, lambda r: r.far))
    assert grid.control("plain", 256) == 0.25


def test_the_tables_say_what_is_near_what_is_far_and_what_is_known_without():
    text = shown(rows())
    assert "a synthetic task: tiny, trained at L = 256" in text
    for name in (
        "plain checkpoint",
        "attention cut at L",
        "yarn factor=auto",
        "all depths",
        "farther than L",
        "control",
    ):
        assert name in text
    lines = [line.replace("│", " ").split() for line in text.splitlines() if "plain checkpoint" in line]
    assert [line[-2:] for line in lines] == [["60", "30"], ["-", "15"], ["25", "25"]]


def test_a_checkpoint_that_finds_no_key_within_its_training_length_is_said_to_prove_nothing():
    able, unable = shown(rows("passkey")), shown(rows("passkey", share=0.0))
    assert "Passkey retrieval: tiny" in able
    assert "control" not in able
    assert "cannot do the task" not in able
    assert "cannot do the task" in unable


@pytest.mark.parametrize("field", ["task", "model", "weights", "trials", "seed", "dtype", "span"])
def test_rows_that_differ_in_what_they_must_share_are_refused(field):
    other = {"trials": 9, "seed": 9, "span": 9}.get(field, "other")
    with pytest.raises(EvaluationError, match=f"different {field} cannot share a table or a picture"):
        Grid.of([row(), row(line="window", **{field: other})])


def test_rows_of_other_prompts_are_refused_and_so_are_none():
    with pytest.raises(EvaluationError, match=r"different prompts at 256 tokens and depth 0\.5"):
        Grid.of([row(), row(line="window", prompts="other")])
    with pytest.raises(EvaluationError, match="no rows"):
        Grid.of([])


@pytest.mark.parametrize("task", ["spans", "passkey"])
def test_every_cell_of_every_map_says_its_share(task):
    drawn = chart.figure(rows(task))
    maps = [axes for axes in drawn.axes if axes.get_title(loc="left")]
    assert [axes.get_title(loc="left") for axes in maps] == [
        "plain checkpoint",
        "attention cut at L",
        "yarn factor=auto",
    ]
    for axes in maps:
        assert [text.get_text() for text in axes.texts] == ["60", "0", "60", "30", "60", "60"]
        (image,) = axes.images
        assert image.get_clim() == (0, 1)
    controls = [axes for axes in drawn.axes if len(axes.texts) == 2]
    assert len(controls) == (3 if task == "spans" else 0)
    assert all(text.get_text() == "25" for axes in controls for text in axes.texts)
    ticks = [label.get_text() for axes in drawn.axes for label in axes.get_xticklabels()]
    assert ticks == ["1L\n256", "4L\n1024"] * 3
    words = " ".join(text.get_text() for text in drawn.texts)
    assert ("synthetic" in words) is (task == "spans")
    assert "training length" in words


def test_a_measurement_that_is_not_there_yet_is_a_gap(tmp_path):
    path = chart.save(rows()[:-2], tmp_path / "map.png")
    assert imread(path).shape[1] > 800
    last = [axes for axes in chart.figure(rows()[:-2]).axes if axes.get_title(loc="left")][-1]
    assert [text.get_text() for text in last.texts] == ["60", "0", "60", "-", "60", "-"]


def test_many_depths_and_many_schemes_stay_inside_the_picture():
    lines = ("plain", "window", *(f"rerope:window={w}" for w in (32, 64, 96, 128, 160)))
    drawn = chart.figure(rows(lines=lines))
    for axes in drawn.axes:
        place = axes.get_position()
        assert 0 <= place.x0 < place.x1 <= 1
        assert 0 < place.y0 < place.y1 < 1
