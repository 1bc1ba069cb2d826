"""Draw the pictures that tell one thing each, for a light and a dark page, from the rows in docs/results.

    python -m tools.front
    python -m tools.front --output runs/front

`front` is on the README. Above, a passage that the text repeats more than L later: with truncated
text, under two schemes, and inside L. Below, the next words of a novel, which hardly need what is far. Bars are means
over texts. `retrieval` is the share of a hidden span that the small checkpoint finds at 4L, a mean over depths.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rope_patch.cli.options import run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rope_patch.evaluation.row import Row

ROWS = Path("docs/results/real/tinyllama-1.1b")
SCHEMES = {"rerope:window=1024+logn": "ReRoPE, log-n", "self_extend:target=auto,window=1024": "Self-Extend"}
FAR = {"cut": "truncated text", **SCHEMES, "near": "passage inside L"}  # lines of repeat.jsonl
NOVEL = {"plain": "truncated text", **SCHEMES}  # lines of perplexity.jsonl
SPANS = Path("docs/results/passkey/spans.jsonl")
FOUND = {  # lines of spans.jsonl
    "plain": "plain checkpoint",
    "window": "sliding window",
    "yarn:target=auto": "YaRN",
    "rerope:window=128+logn": "ReRoPE, log-n",
}
REFERENCES = ("truncated text", "passage inside L", "plain checkpoint", "sliding window")  # grey bars
LENGTH = 4096  # tokens, 2L
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
    """Two panels over one scale of losses."""
    far, novel = losses("repeat", FAR), losses("perplexity", NOVEL)
    figure = sheet(5.5, "TinyLlama, 4,096 tokens: twice its L", page)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[len(far), len(novel)])
    bars(above, "A passage read more than L tokens ago", far, page)
    bars(below, "The next words of a novel", novel, page)
    below.set_xlabel("NLL, nats per token: shorter is better", size=SIZE, color=page.ink)
    return figure


def retrieval(page: Page) -> Figure:
    """One panel: percent of the tokens of a hidden span."""
    from rope_patch.evaluation.row import Rows

    rows = [row for row in Rows(SPANS).rows if row.length == 4 * row.training_length]
    found = {name: [100 * row.share for row in rows if row.line == line] for line, name in FOUND.items()}
    figure = sheet(3.2, "Small checkpoint, 1,024 tokens: four times its L", page)
    axes = figure.subplots()
    bars(axes, "A hidden span: how much of it is found", found, page, form="{:.0f} %")
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


def losses(protocol: str, names: Mapping[str, str]) -> dict[str, list[float]]:
    """By the name of a line: its loss on each text at 2L; the plain checkpoint reads L of them."""
    from rope_patch.evaluation.row import Rows

    rows = Rows(ROWS / f"{protocol}.jsonl").rows
    return {name: [row.loss for row in rows if row.line == line and at(row)] for line, name in names.items()}


def at(row: Row) -> bool:
    """Whether a row has the length that the picture shows."""
    return row.length == (row.training_length if row.line == "plain" else LENGTH)


def bars(axes: Axes, title: str, found: Mapping[str, Sequence[float]], page: Page, form: str = "{:.2f}") -> None:
    """A bar for each line, with its value: the mean over texts."""
    axes.set_facecolor(page.back)
    axes.set_title(title, loc="left", size=SIZE + 1, weight="bold", color=page.ink, pad=8)
    for place, (name, values) in enumerate(found.items()):
        mean = statistics.fmean(values)
        axes.barh(place, mean, height=0.72, color=page.plain if name in REFERENCES else page.scheme)
        axes.text(mean, place, f" {form.format(mean)}", va="center", size=SIZE + 2, weight="bold", color=page.ink)
    axes.set_yticks(range(len(found)), found, size=SIZE, color=page.ink)
    axes.margins(x=0.18)
    axes.invert_yaxis()
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    axes.spines[:].set_visible(False)


if __name__ == "__main__":
    run(Options, main)
