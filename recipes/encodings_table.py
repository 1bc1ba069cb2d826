"""The table and the chart of a comparison of encodings, from its rows.

    python recipes/encodings_table.py --folder docs/results/encodings

`compare_encodings.py` ends with this. It writes `table.md`, `summary.json` and `comparison.png` beside the rows.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_patch.cli.options import Names, print_json, run, say
from rope_patch.errors import EvaluationError, MissingPackage, require

PANELS = ("frequencies", "bias", "values", "embedding")  # the slots that order the table and divide the chart
REFERENCES = ("rope", "nope", "alibi")  # grey lines in every panel but their own


@dataclass(kw_only=True)
class Options:
    folder: str  # where the comparison wrote its rows
    encodings: Names = ()  # these of them, in this order; default all
    json: bool = False  # print the summary as one JSON document


def main(options: Options) -> None:
    """Mean and spread over the seeds of every encoding and length."""
    import pandas
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table

    folder = Path(options.folder)
    rows = read(folder / "results.jsonl", pandas)
    order = list(options.encodings or rows.encoding.unique())
    rows = rows[rows.encoding.isin(order)]
    if rows.empty:
        raise EvaluationError(f"{folder / 'results.jsonl'} has no rows of {', '.join(order) or 'any encoding'}")
    # of several slots the rarest
    rows["slot"] = [next((slot for slot in reversed(PANELS) if slot in slots), PANELS[0]) for slots in rows.slots]
    places = {name: place for names in (PANELS, order) for place, name in enumerate(names)}
    rows = rows.sort_values(["slot", "encoding"], key=lambda column: column.map(places), kind="stable")
    cells = rows.groupby(["encoding", "slot", "length"], sort=False, as_index=False).agg(
        mean=("nll", "mean"), std=("nll", "std"), seeds=("nll", "count"), new_parameters=("encoding_parameters", "max")
    )
    costs = read(folder / "costs.jsonl", pandas) if (folder / "costs.jsonl").exists() else None
    notes = notes_on(rows, costs)
    header, *lines = table(cells, costs, rows.training_length.iloc[0])
    markdown = [header, ["---"] * 2 + ["---:"] * (len(header) - 2), *([f"`{name}`", *rest] for name, *rest in lines)]
    text = "".join(f"| {' | '.join(line)} |\n" for line in markdown) + "\n" + "".join(f"- {note}\n" for note in notes)
    (folder / "table.md").write_text(text, encoding="utf-8")
    summary = {"notes": notes, "cells": json.loads(cells.to_json(orient="records"))}
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    if options.json:
        print_json(summary)
    else:
        # stacked, so that it fits 80 columns
        first = Column("encoding\nslot, parameters", overflow="fold", min_width=17)
        shown = Table(
            first, *(name.replace(" ", "\n") for name in header[3:]), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        for name, slot, parameters, *numbers in lines:
            stacked = (number.split(" (")[0].replace(" ±", "\n±") for number in numbers)
            shown.add_row(f"{name}\n{slot}, {parameters}", *stacked)
        Console().print(shown, *notes, sep="\n")
    try:
        require("matplotlib", "the chart", "plots")
        draw(cells, rows.training_length.iloc[0], notes, folder / "comparison.png")
        say(f"the chart is {folder / 'comparison.png'}")
    except MissingPackage as error:
        say(str(error))


def read(path: Path, pandas: Any) -> Any:
    """The rows of a file, the last of those that measure the same."""
    rows = pandas.DataFrame(map(json.loads, path.read_text().splitlines()))
    return rows.drop_duplicates([name for name in ("encoding", "seed", "length") if name in rows], keep="last")


def notes_on(rows: Any, costs: Any) -> list[str]:
    """What a reader needs to know beside the numbers."""
    row, seeds = rows.iloc[0], rows.seed.nunique()
    notes = [
        f"trained from scratch at L = {row.training_length} bytes for {row.steps} steps ({row.tokens_seen / 1e6:.2f} "
        f"million bytes), {seeds} seed{'s' * (seeds > 1)}, {row.precision}",
        f"NLL in nats per byte of the same last {row.targets} bytes of {row.windows} windows from {row.documents} "
        f"documents, protocol {row.protocol}" + "; mean ± standard deviation over the seeds" * (seeds > 1),
    ]
    if (states := rows.commit.nunique()) > 1:
        notes.append(f"the rows were made with {states} states of this library, see `commit` in each")
    if costs is not None:
        notes.append(
            "speed: tokens per second of a training step over those of rope, taken in turn, median with quartiles; "
            "memory: bytes saved for backward over those of rope "
            f"({costs.device.iloc[0]}, threads: {costs.threads.iloc[0]})"
        )
    failed = rows[rows.failure.notna()].drop_duplicates(["encoding", "failure"])
    return [*notes, "a star marks the best of its column", *(failed.encoding + ": " + failed.failure)]


def table(cells: Any, costs: Any, training_length: int) -> list[list[str]]:
    """The header, and a line per encoding."""
    lengths = sorted(cells.length.unique())
    best = cells.groupby("length")["mean"].min()
    nope = cells[(cells.encoding == "nope") & (cells.length == training_length)]["mean"].min()
    header = ["encoding", "slot", "new parameters", *(f"{length // training_length}L" for length in lengths)]
    header += ["below nope", *([] if costs is None else ["speed", "memory"])]
    lines = [header]
    for spec, own in cells.groupby("encoding", sort=False):
        line = [spec, own.slot.iloc[0], f"{own.new_parameters.max():,}"]
        for cell in own.set_index("length").reindex(lengths).itertuples():
            star = "*" if f"{cell.mean:.3f}" == f"{best[cell.Index]:.3f}" else ""
            spread = "" if math.isnan(cell.std) else f" ± {cell.std:.3f}"
            line.append("failed" if math.isnan(cell.mean) else f"{cell.mean:.3f}{star}{spread}")
        below = own["mean"].iloc[0] - nope
        line.append("-" if spec == "nope" or math.isnan(below) else "yes" if below < 0 else "no")
        for cost in () if costs is None else costs[costs.encoding == spec].itertuples():
            line.append(f"{cost.relative_speed:.2f}x ({cost.slowest:.2f} to {cost.fastest:.2f})")
            line.append(f"{cost.relative_memory:.2f}x")
        lines.append(line + ["-"] * (len(header) - len(line)))
    return lines


def draw(cells: Any, training_length: int, notes: list[str], path: Path) -> None:
    """Perplexity against length, a panel per slot; bands are a standard deviation over the seeds to either side."""
    from numpy import exp

    from rope_patch.evaluation.charts import COLOURS, FAINT, INK, MARKERS, blank, scale_axes, tidy

    slots = [slot for slot in PANELS if slot in set(cells.slot)]
    rows, columns = math.ceil(len(slots) / 2), min(2, len(slots))
    figure = blank(7.2 * columns, 0.9 + 4.2 * rows, layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    lengths = sorted(cells.length.unique())
    multiples = [length / training_length for length in lengths]
    # where the axis ends, lines beyond it carry their last perplexity in their name
    low, high = exp(cells["mean"].min()), exp(min(cells["mean"].max(), 100))
    for panel, slot in zip(panels.flat, slots, strict=False):
        scale_axes(panel, multiples, [f"{m:g}L\n{n}" for m, n in zip(multiples, lengths, strict=True)])
        own = list(cells[cells.slot == slot].encoding.unique())
        ends = []
        for name in [*(name for name in REFERENCES if name not in own and name in set(cells.encoding)), *own]:
            found = cells[cells.encoding == name].dropna(subset="mean")
            if found.empty:
                continue
            x, mean, std, last = found.length / training_length, found["mean"], found["std"].fillna(0), found.iloc[-1]
            label = name.replace(":", " ").replace(",", " ")
            label += f" (to {x.iloc[-1]:g}L)" if last.length < lengths[-1] else ""
            label += f" \N{UPWARDS ARROW} {exp(last['mean']):.3g}" if last["mean"] > math.log(8 * low) else ""
            look = {"color": "#A8A8A8", "linestyle": ("-", "--", ":")[REFERENCES.index(name) if name not in own else 0]}
            if name in own:
                turn, i = divmod(own.index(name), len(COLOURS))
                look = {"color": COLOURS[i], "marker": MARKERS[(i + turn) % len(MARKERS)], "linestyle": "-:"[turn % 2]}
            (line,) = panel.plot(x, exp(mean), markersize=4.5, label=label, **look)
            panel.fill_between(x, exp(mean - std), exp(mean + std), color=look["color"], alpha=0.18, linewidth=0)
            ends.append((-last["mean"], len(ends), line))
        tidy(panel)
        panel.set_ylim(low / 1.06, max(min(1.06 * high, 8 * low), 1.1 * low))
        panel.set_title(f"slot: {slot}", loc="left", weight="bold", size=10.5, color=INK)
        place = {"loc": "center left", "bbox_to_anchor": (1, 0.5), "frameon": False, "fontsize": 8.5}
        panel.legend(handles=[line for *_, line in sorted(ends)], **place)  # in the order in which they end
    for spare in panels.flat[len(slots) :]:
        spare.set_axis_off()
    figure.suptitle("Position encodings trained from scratch", x=0.01, ha="left", size=14, weight="bold", color=INK)
    figure.supylabel("perplexity per byte", size=9.5, color=INK)
    caption = f"context length in training lengths, and in bytes\n{notes[0]}\n{notes[1]}"
    figure.supxlabel(caption, x=0.01, ha="left", size=8.5, color=FAINT)
    figure.savefig(path, dpi=140)


if __name__ == "__main__":
    run(Options, main)
