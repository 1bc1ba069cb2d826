"""Draw the charts of the pages anew from the rows in docs/results.

    python -m tools.recorded_charts
    python -m tools.recorded_charts --output runs/charts

A command draws its chart when it measures. Here the same chart is drawn from what was measured then, so that words and
colours of all pages stay alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rope_patch.cli.options import run
from rope_patch.evaluation import charts
from rope_patch.evaluation.row import Row

RESULTS = Path("docs/results")
IMAGES = Path("docs/images")
SIX = (  # of the sweep: the references, and the best line of each of the best six schemes
    "plain",
    "cut",
    "window",
    "self_extend:group_size=9,window=128",
    "rerope:window=160",
    "leaky_rerope:factor=14,window=128",
    "lm_infinite:local_window=256",
    "dca:chunk_size=192",
    "mrrope:factor=4",
)


@dataclass(kw_only=True)
class Options:
    output: str = ""  # a folder; by default each chart goes where its page looks for it


def main(options: Options) -> None:
    """Write each chart."""
    for chart, (rows, settings) in CHARTS.items():
        path = Path(options.output, chart.name) if options.output else chart
        path.parent.mkdir(parents=True, exist_ok=True)
        print(charts.save(rows(), path, **settings))


def recorded(file: str) -> list[Row]:
    return [Row.from_json(line) for line in (RESULTS / file).read_text().splitlines()]


def sweep() -> list[Row]:
    """The rows of the half that chose."""
    rows = recorded("sweep/sweep.jsonl")
    return [row for row in rows if row.line in SIX and row.texts == rows[0].texts]


def drope() -> list[Row]:
    """The rows at 1L, 4L and 16L, each line first before and then after its training, of one model and its checkpoint
    without positions. Log-n was measured after the training alone.
    """
    rows = recorded("drope/perplexity.jsonl")
    lengths = {row.length for row in rows if row.line == "nope"}
    seen, found = set(), []
    for row in rows:
        line = "yarn:factor=4" if row.line.startswith("yarn") else row.line
        trained = (line, row.length) in seen or line == "nope+logn"
        seen.add((line, row.length))
        if row.length in lengths:
            found.append(replace(row, line=line, model=rows[0].model, step=DROPE_STEPS if trained else 0))
    return found


DROPE_STEPS = 40
SPANS = "tokens of repeated spans of 32, a synthetic task"
TRAINED = {"title": "Before and after fine-tuning"}
CHARTS: dict[Path, tuple[Callable[[], list[Row]], dict[str, Any]]] = {
    IMAGES / "demo.png": (lambda: recorded("demo/perplexity.jsonl"), {}),
    IMAGES / "t5.png": (lambda: recorded("t5/perplexity.jsonl"), {}),
    IMAGES / "passkey.png": (lambda: recorded("passkey/spans.jsonl"), {"what": SPANS}),
    IMAGES / "finetune.png": (lambda: recorded("finetune/finetune.jsonl"), TRAINED),
    IMAGES / "end_to_end.png": (lambda: recorded("end_to_end/finetune.jsonl"), TRAINED),
    IMAGES / "drope.png": (drope, TRAINED),
    RESULTS / "sweep/sweep.png": (sweep, {}),
}
"""By the file of a chart: its rows, and the settings of `charts.figure`."""


if __name__ == "__main__":
    run(Options, main)
