"""A fine-tuning as two pictures: perplexity against length before and after, and loss against step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_patch.evaluation import figures
from rope_patch.evaluation.chart import (
    COLOURS,
    FAINT,
    INK,
    MARKERS,
    REFERENCE_STYLES,
    draw_close_up,
    explain_close_up,
    head_table,
    perplexity_of,
    scale_axes,
    tidy,
    write_nll,
)
from rope_patch.evaluation.report import display_name, in_training_lengths
from rope_patch.evaluation.specs import CUT, PLAIN
from rope_patch.finetuning.history import Point
from rope_patch.finetuning.report import Story
from rope_patch.training.loop import read_log

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BEFORE = {"linestyle": (0, (1, 1.2)), "linewidth": 1.6, "markerfacecolor": "white"}
_AFTER = {"linestyle": "-", "linewidth": 2.2}


def save(points: Sequence[Point], length: int, path: str | Path) -> Path:
    """Draw `figure(points, length)` into the PNG at `path`.

    Raises:
        EvaluationError, MissingPackage: see `figure`.
        OSError: when it cannot be written.
    """
    return figures.save(figure(points, length), path)


def save_curves(folders: Mapping[str, Path], length: int, path: str | Path) -> Path:
    """Draw `curves(folders, length)` into the PNG at `path`.

    Raises:
        MissingPackage: there is no matplotlib.
        OSError: when it cannot be written.
    """
    return figures.save(curves(folders, length), path)


def figure(points: Sequence[Point], length: int) -> Figure:
    """Perplexity against context length: dotted as the checkpoint came, solid after the training.

    x is the context length in multiples of L (log 2), y the perplexity (log); the table beside it is the legend. Below,
    the NLL minus that of attention cut at L.

    Args:
        points: before and after.
        length: of the training, in tokens.

    Raises:
        EvaluationError: see `Story.of`.
        MissingPackage: there is no matplotlib.
    """
    story = Story.of(points)
    lines = _lines(story)
    cut = story.before(CUT)
    upper, lower = max(3.4, 0.31 * (len(lines) + 1)), 2.15 if cut else 0.0  # inches
    height = 1.9 + upper + lower
    drawn = figures.blank(13.6, height)
    floor = (0.95 + lower) / height
    chart = drawn.add_axes((0.055, floor, 0.455, upper / height))
    legend = drawn.add_axes((0.535, floor, 0.45, upper / height))
    multiples = [length / story.training_length for length in story.lengths]
    labels = [f"{in_training_lengths(length, story.training_length)}\n{length}" for length in story.lengths]
    scale_axes(chart, multiples, labels)
    for point, style in lines:
        known = [(m, n) for m, n in zip(multiples, story.lengths, strict=True) if n in point.nll]
        chart.plot([m for m, _ in known], [perplexity_of(point.nll[n]) for _, n in known], **style)
    chart.axvline(length / story.training_length, color=FAINT, linewidth=1, linestyle=":", zorder=1)
    chart.set_xlim(multiples[0] / 2**0.12, multiples[-1] * 2**0.08)
    chart.set_ylabel("perplexity", size=9.5, color=INK)
    tidy(chart)
    lowest = chart
    if cut is not None:
        lowest = drawn.add_axes((0.055, 0.95 / height, 0.455, (lower - 0.45) / height), sharex=chart)
        above = [([p.nll.get(n, math.nan) - cut.nll[n] for n in story.lengths], style) for p, style in lines]
        draw_close_up(lowest, multiples, above)
        explain_close_up(drawn, (0.5 + lower) / height)
        chart.tick_params(labelbottom=False)
    lowest.set_xlabel("context length in training lengths, and in tokens", size=9.5, color=INK)
    _draw_table(legend, story, lines)
    title = "Perplexity against context length, before and after fine-tuning"
    drawn.text(0.055, 1 - 0.34 / height, title, size=15, weight="bold", color=INK)
    note = f"Trained at L = {story.training_length}, then at {length} tokens (dotted). {story.note}"
    drawn.text(0.055, 1 - 0.62 / height, note, size=9.5, color=FAINT)
    return drawn


def _lines(story: Story) -> list[tuple[Point, dict[str, Any]]]:
    found = []
    for spec, style in REFERENCE_STYLES.items():
        if (point := story.before(spec)) is not None:
            found.append((point, style))
    for number, spec in enumerate(story.schemes):
        shared = {
            "color": COLOURS[number % len(COLOURS)],
            "marker": MARKERS[number % len(MARKERS)],
            "markersize": 5.5,
            "zorder": 3,
        }
        before, after = story.before(spec), story.last(spec)
        if before is not None and spec != PLAIN:
            found.append((before, {**shared, **_BEFORE}))
        if after is not None:
            found.append((after, {**shared, **_AFTER}))
    return found


def _draw_table(legend: Any, story: Story, lines: Sequence[tuple[Point, dict[str, Any]]]) -> None:
    pitch = 1 / (len(lines) + 1)
    labels = [in_training_lengths(length, story.training_length) for length in story.lengths]
    columns = head_table(legend, 0.10, 0.62, 1 - pitch / 2, labels)
    best = {n: story.best(n, [point for point, _ in lines]) for n in story.lengths}
    for row, (point, style) in enumerate(lines, start=1):
        y = 1 - pitch * (row + 0.5)
        legend.plot([0.01, 0.085], [y, y], **{**style, "marker": ""})
        legend.plot([0.0475], [y], **{**style, "linestyle": ""})
        legend.text(0.10, y, _name(story, point), size=9, color=INK, va="center")
        for x, length in zip(columns, story.lengths, strict=True):
            if length in point.nll:
                write_nll(legend, x, y, point.nll[length], round(point.nll[length], 3) == round(best[length], 3))


def _name(story: Story, point: Point) -> str:
    when = "" if point.scheme in REFERENCE_STYLES and not point.step else f", {story.when(point)}"
    return f"{display_name(point.scheme)}{when}"


def curves(folders: Mapping[str, Path], length: int) -> Figure:
    """Training loss against step, a line for each scheme; dots are the held-out loss at the length of the training.

    Args:
        folders: of the runs, by scheme.
        length: of the training, in tokens.

    Raises:
        MissingPackage: there is no matplotlib.
    """
    drawn = figures.blank(9, 3.8, layout="constrained")
    axes = drawn.add_subplot()
    for number, (spec, folder) in enumerate(folders.items()):
        rows = read_log(folder)
        colour = COLOURS[number % len(COLOURS)]
        steps = [row["step"] for row in rows]
        axes.plot(steps, [row["train_nll"] for row in rows], color=colour, linewidth=1.4, label=display_name(spec))
        measured = [(row["step"], nll) for row in rows if (nll := row.get("nll", {}).get(str(length))) is not None]
        axes.plot([step for step, _ in measured], [nll for _, nll in measured], color=colour, marker="o", linestyle="")
    axes.set_xlabel("step", size=9.5, color=INK)
    axes.set_ylabel("NLL, nats per token", size=9.5, color=INK)
    title = f"Loss of single training batches; dots: held-out text at {length} tokens"
    axes.set_title(title, size=11, color=INK, loc="left")
    if folders:
        drawn.legend(frameon=False, fontsize=9, loc="outside right upper")
    tidy(axes)
    return drawn
