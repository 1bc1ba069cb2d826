"""Draw the pictures that tell one thing each, for a light and a dark page, from the rows in docs/results.

    python -m tools.front
    python -m tools.front --output runs/front

`front` is on the README: the plain checkpoint beyond its length, on truncated text, and under ReRoPE. Above are the
next words of a novel, below a passage that the text repeats more than L later. Bars are perplexities of the mean loss
over texts. `retrieval` is the share of a hidden span that the small checkpoint finds at
4L, a mean over depths.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rope_patch.cli.options import run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


RESULTS = Path(__file__).parents[1] / "docs/results"  # a notebook draws these, too, from its own folder
ROWS = RESULTS / "real/smollm2-135m"
SCHEME = "rerope:window=4096"
LINES = {"plain": "plain model", "cut": "truncated text", SCHEME: "ReRoPE"}  # of perplexity.jsonl and repeat.jsonl
SPANS = RESULTS / "passkey/spans.jsonl"
FOUND = {  # lines of spans.jsonl
    "plain": "plain checkpoint",
    "window": "sliding window",
    "yarn:target=auto": "YaRN",
    "rerope:window=128+logn": "ReRoPE, log-n",
}
REFERENCES = ("plain model", "truncated text", "plain checkpoint", "sliding window")  # grey bars
LENGTH = 16384  # tokens, 2L
SIZE = 13  # points: still read where the picture is 400 pixels wide


@dataclass(frozen=True)
class Page:
    """The colours of a page: behind everything, of words, of a reference, and of the scheme."""

    back: str
    ink: str
    plain: str
    scheme: str


PAGES = {
    "": Page("#FFFFFF", "#222222", "#9A9A9A", "#0072B2"),
    "_dark": Page("#0D1117", "#E6EDF3", "#7D8590", "#56B4E9"),
}
"""By the ending of a picture's name."""


@dataclass(kw_only=True)
class Options:
    output: str = "docs/images"  # a folder


def main(options: Options) -> None:
    """Write each picture for both pages."""
    from rope_patch.evaluation.charts import write

    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    for ending, page in PAGES.items():
        for draw in (front, retrieval):
            print(write(draw(page), folder / f"{draw.__name__}{ending}.png"))


def front(page: Page) -> Figure:
    """Two panels with one scale of perplexities."""
    novel, far = perplexities("perplexity"), perplexities("repeat")
    figure = sheet(5.0, "SmolLM2-135M-Instruct at 16,384 tokens, twice its length", page)
    above, below = figure.subplots(2, 1, sharex=True)
    above.set_xscale("log")
    bars(above, "The next words of a novel", novel, page, rounded)
    bars(below, "A passage from the start, repeated", far, page, rounded)
    below.set_xlim(left=1)  # certainty
    below.set_xlabel("perplexity (logarithmic): lower is better", size=SIZE, color=page.ink)
    return figure


def retrieval(page: Page) -> Figure:
    """One panel: percent of the tokens of a hidden span."""
    from rope_patch.evaluation.row import Rows

    rows = [row for row in Rows(SPANS).rows if row.length == 4 * row.training_length]
    found = {name: [100 * row.share for row in rows if row.line == line] for line, name in FOUND.items()}
    figure = sheet(3.2, "Small checkpoint, 1,024 tokens: four times its L", page)
    axes = figure.subplots()
    bars(axes, "A hidden span: how much of it is found", found, page, "{:.0f} %".format)
    axes.set_xlabel("tokens found: longer is better", size=SIZE, color=page.ink)
    return figure


def sheet(height: float, about: str, page: Page) -> Figure:
    """An empty figure with what it is about above, and a margin."""
    from rope_patch.evaluation.charts import blank

    figure = blank(6.4, height)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12)
    figure.set_facecolor(page.back)
    figure.suptitle(about, x=0.02, ha="left", size=SIZE, color=page.ink)
    return figure


def perplexities(protocol: str) -> dict[str, list[float]]:
    """By the name of one of the `LINES`: the perplexity of its mean loss over texts, at 2L. Truncated text is the plain
    checkpoint at L where no row has it.
    """
    from rope_patch.evaluation.row import Rows

    rows = Rows(ROWS / f"{protocol}.jsonl").rows
    lines = {row.line for row in rows}
    found = {}
    for line, name in LINES.items():
        key = (line, LENGTH) if line in lines else ("plain", rows[0].training_length)
        found[name] = [math.exp(statistics.fmean(row.loss for row in rows if (row.line, row.length) == key))]
    return found


def rounded(perplexity: float) -> str:
    """A perplexity with two digits, or all digits before the point: 1,358, 55, 2.2."""
    return f"{perplexity:,.0f}" if perplexity >= 100 else f"{perplexity:.2g}"


def bars(
    axes: Axes, title: str, found: Mapping[str, Sequence[float]], page: Page, form: Callable[[float], str]
) -> None:
    """A bar for each line, with its value: the mean over texts."""
    axes.set_facecolor(page.back)
    axes.set_title(title, loc="left", size=SIZE + 1, weight="bold", color=page.ink, pad=8)
    for place, (name, values) in enumerate(found.items()):
        mean = statistics.fmean(values)
        axes.barh(place, mean, height=0.72, color=page.plain if name in REFERENCES else page.scheme)
        axes.text(mean, place, f" {form(mean)}", va="center", size=SIZE + 2, weight="bold", color=page.ink)
    axes.set_yticks(range(len(found)), found, size=SIZE, color=page.ink)
    axes.margins(x=0.18)
    axes.invert_yaxis()
    axes.tick_params(which="both", left=False, bottom=False, labelbottom=False)
    axes.spines[:].set_visible(False)


if __name__ == "__main__":
    run(Options, main)
