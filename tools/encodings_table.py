"""The table and the chart of a comparison of encodings, from its rows.

    python -m tools.encodings_table --folder docs/results/encodings

`recipes/compare_encodings.py` wrote the rows. Into their folder go `table.md`, with a column for what `--costs`
measured, `summary.json`, and `comparison.png`, in which every slot has a panel.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_patch.cli.options import Names, print_json, run, say
from rope_patch.errors import EvaluationError, MissingPackage, require

# the slots that order the table and divide the chart; under linear attention one for all
PANELS = ("frequencies", "bias", "values", "embedding", "linear attention")
REFERENCES = ("nope", "window")  # without positions, and the sliding window: in every panel
LINES = 7  # in a panel at most


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

    from rope_patch.evaluation.standard_errors import best_of_seeds

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
    best = best_of_seeds(rows.to_dict("records"))
    cells["best"] = [
        best.get(length) == encoding for encoding, length in zip(cells.encoding, cells.length, strict=True)
    ]
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
            "speed: tokens per second of a training step relative to rope, measured in turn, median with quartiles; "
            "memory: bytes saved for backward relative to rope "
            f"({costs.device.iloc[0]}, threads: {costs.threads.iloc[0]})"
        )
    failed = rows[rows.failure.notna()].drop_duplicates(["encoding", "failure"])
    return [
        *notes,
        "a star marks the best of its column, if it is below every other by more than noise over the seeds",
        *(failed.encoding + ": " + failed.failure),
    ]


def table(cells: Any, costs: Any, training_length: int) -> list[list[str]]:
    """The header, and a line per encoding."""
    lengths = sorted(cells.length.unique())
    nope = cells[(cells.encoding == "nope") & (cells.length == training_length)]["mean"].min()
    header = ["encoding", "slot", "new parameters", *(f"{length // training_length}L" for length in lengths)]
    header += ["below nope at L", *([] if costs is None else ["speed", "memory"])]
    lines = [header]
    for spec, own in cells.groupby("encoding", sort=False):
        line = [spec, own.slot.iloc[0], f"{own.new_parameters.max():,}"]
        for cell in own.set_index("length").reindex(lengths).itertuples():
            star = "*" if cell.best is True else ""
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
    """Loss against length, panels for each slot; bands are a standard deviation over the seeds to either side."""
    from rope_patch.evaluation import charts

    panels = divided(cells)
    lengths = sorted(cells.length.unique())
    multiples = [length / training_length for length in lengths]
    caption = ". ".join(note[0].upper() + note[1:] for note in notes[:2]) + "."
    heights = [max(1.5, 0.17 * len(names) + 0.7) for names in panels.values()]
    shared: dict[str, Any] = {"sharex": True, "height_ratios": heights}
    title = "Position encodings trained from scratch"
    figure, *axes = charts.sheet(title, caption, sum(heights), len(panels), **shared)
    charts.scale_lengths(axes[0], multiples, [f"{m:g}L\n{n}" for m, n in zip(multiples, lengths, strict=True)])
    for panel, (title, names) in zip(axes, panels.items(), strict=True):
        lines = {}
        means = cells[cells.encoding.isin([*names, REFERENCES[-1]])]["mean"].dropna()
        low, high = means.min(), min(means.max(), means.min() + 2.2)  # what ends beyond is named with its last loss
        margin = 0.08 * (high - low)
        if not means.empty:  # else every encoding of the panel failed
            panel.set_ylim(low - margin, high + margin)
        last = cells[cells.encoding.isin(REFERENCES)].groupby("encoding", sort=False)["mean"].last()
        grey = [name for name, loss in last.items() if name in names or loss <= high]
        for name in [*grey, *(name for name in names if name not in grey)]:
            found = cells[cells.encoding == name].dropna(subset="mean")
            if found.empty:
                continue
            look: dict[str, Any] = {"color": charts.INK if name == "window" else charts.FAINT, "linestyle": "--"}
            if name not in grey:
                place = names.index(name)
                look = {"color": charts.COLOURS[place], "marker": charts.MARKERS[place], "markersize": 4}
            values = list(zip(found["mean"], found["std"].fillna(0), strict=True))
            line = charts.plot_band(panel, found.length / training_length, values, linewidth=1.5, **look)
            label = label_of(name, names)
            label += (
                f" (to {found.length.iloc[-1] / training_length:g}L)" if found.length.iloc[-1] < lengths[-1] else ""
            )
            label += f" \N{UPWARDS ARROW} {values[-1][0]:.3g}" if values[-1][0] > high else ""
            lines[label] = line
        panel.set_ylabel("NLL, nats per byte")
        panel.set_title(title, loc="left", size=charts.SIZE)
        charts.name_lines(panel, lines)
    axes[-1].set_xlabel("context length (L, bytes)")
    charts.write(figure, path)


def label_of(spec: str, others: list[str]) -> str:
    """The name of an encoding, with its first field where another of the panel has the same name."""
    name = spec.partition(":")[0]
    alone = [each.partition(":")[0] for each in others].count(name) < 2
    return name if alone else spec.partition(",")[0].replace(":", " ")


def divided(cells: Any) -> dict[str, list[str]]:
    """The encodings of each panel by its title: those of a slot, or where they are many, of a part of its ranking."""
    panels = {}
    longest = cells.length.max()
    for slot in [slot for slot in PANELS if slot in set(cells.slot)]:
        own = cells[(cells.slot == slot) & (cells.length == longest)].sort_values("mean", na_position="last")
        names = [*own.encoding, *sorted(set(cells[cells.slot == slot].encoding) - set(own.encoding))]
        parts = math.ceil(len(names) / LINES)
        size = math.ceil(len(names) / parts)
        for part in range(parts):
            of = f", ranks {part * size + 1} to {min((part + 1) * size, len(names))}" if parts > 1 else ""
            panels[f"slot: {slot}{of}"] = names[part * size : (part + 1) * size]
    return panels


if __name__ == "__main__":
    run(Options, main)
