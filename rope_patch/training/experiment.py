"""A comparison from its description to its table and its chart: what the command line and the recipe share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from rope_patch.evaluation.figures import can_draw
from rope_patch.training import chart, report
from rope_patch.training.comparison import Comparison
from rope_patch.training.costs import COSTS, measure_costs, read_costs
from rope_patch.training.records import open_rows
from rope_patch.training.runs import RESULTS, Prepared, compare, log_of, prepare


@dataclass(frozen=True)
class Outcome:
    """The summary of all rows that the output holds, and the files.

    Attributes:
        summary: of the rows.
        results: file of the rows.
        table: in Markdown.
        numbers: the summary as JSON.
        picture: file of the chart; None without matplotlib.
    """

    summary: report.Summary
    results: Path
    table: Path
    numbers: Path
    picture: Path | None


def run(
    comparison: Comparison,
    say: Callable[[str], None] = lambda _: None,
    *,
    only: Sequence[str] = (),
    costs: bool = False,
    retry: bool = False,
) -> Outcome | None:
    """Train and measure, or measure the costs, and write table, numbers and chart of all that there is by then.

    Every row is written as soon as it is measured: started again, it goes on where it stopped. Two processes may work
    on one output where each is told other encodings with `only`.

    Args:
        comparison: what to compare.
        say: is told, in a sentence each, what happens.
        only: a part of the encodings, to be trained or timed now; default all.
        costs: measure what a training step costs, instead of training.
        retry: train again what failed before.

    Returns:
        None where only costs were measured, on an output without results: they join the table later.

    Raises:
        RopePatchError, OSError: something is wrong with the description, the text or the output folder; whatever can
            be known before training is raised before.
    """
    prepared = prepare(comparison.only(only) if only else comparison)
    part = prepared.comparison
    with _threads(part.threads):
        if costs:
            say(f"timing a training step of {len(part.encodings)} encodings in turn with rope")
            measure_costs(prepared, say)
        else:
            seeds = ", ".join(map(str, part.seeds))
            say(f"training {len(part.encodings)} encodings, {part.steps} steps each, seeds {seeds}, into {part.output}")
            compare(prepared, say, retry=retry)
    outcome = show(comparison, prepared, say)
    if outcome is None:
        say(f"the costs are in {prepared.output / COSTS}; the table follows when encodings are trained")
    return outcome


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """As many threads as asked for while the block runs, and as many as before after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def show(comparison: Comparison, prepared: Prepared, say: Callable[[str], None]) -> Outcome | None:
    """Write table, numbers and chart of the rows that are on disk now, those of other processes included.

    Args:
        comparison: says in which order the encodings come.
        prepared: says where the rows are.
        say: is told where there is nothing to draw the chart with.

    Returns:
        None where there are no rows.
    """
    output = prepared.output
    rows = open_rows(output / RESULTS, prepared.settings).rows
    order = {spec: index for index, spec in enumerate(comparison.encodings)}
    shown = sorted((row for row in rows if row.encoding in order), key=lambda row: order[row.encoding])
    if not shown:
        return None
    summary = report.summarise(shown, read_costs(output, prepared.settings))
    seeds = sorted({row.seed for row in shown})
    curves = {
        entry.encoding: {str(seed): log_of(output, entry.encoding, seed) for seed in seeds} for entry in summary.entries
    }
    table, numbers = report.write(summary, output, curves)
    picture = chart.save(summary, output / "comparison.png") if can_draw(say) else None
    return Outcome(summary, output / RESULTS, table, numbers, picture)
