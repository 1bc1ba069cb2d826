"""The pictures that tell one thing each."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import pytest
from PIL import Image

from tools import front

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def nll(protocol: str, line: str, length: int) -> float:
    rows = map(json.loads, (front.ROWS / f"{protocol}.jsonl").read_text().splitlines())
    return statistics.fmean(row["nll"] for row in rows if (row["line"], row["length"]) == (line, length))


def test_bars_are_the_means_of_the_rows():
    above, below = front.front(front.PAGES[""]).axes
    cut = nll("perplexity", "plain", 8192)
    novel = [nll("perplexity", "plain", 16384), cut, nll("perplexity", front.SCHEME, 16384)]
    far = [nll("repeat", line, 16384) for line in front.LINES]
    for axes, values, shown in ((above, novel, ["1,358", "55", "57"]), (below, far, ["925", "25", "2.2"])):
        assert [bar.get_width() for bar in axes.patches] == pytest.approx([math.exp(value) for value in values])
        assert [text.get_text().strip() for text in axes.texts] == shown


def test_the_found_spans_are_the_means_over_depths():
    (axes,) = front.retrieval(front.PAGES[""]).axes
    rows = [json.loads(line) for line in front.SPANS.read_text().splitlines()]
    means = [
        100 * statistics.fmean(row["accuracy"] for row in rows if (row["line"], row["length"]) == (line, 1024))
        for line in front.FOUND
    ]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx(means)
    assert [text.get_text().strip() for text in axes.texts] == ["13 %", "47 %", "63 %", "72 %"]


def test_a_light_and_a_dark_page_are_written(tmp_path):
    front.main(front.Options(output=str(tmp_path)))
    for name in ("front", "retrieval"):
        light, dark = (Image.open(tmp_path / f"{name}{ending}.png").convert("L") for ending in front.PAGES)
        assert light.size == dark.size == Image.open(ROOT / "docs" / "images" / f"{name}.png").size
        assert light.getpixel((0, 0)) > 240 > 30 > dark.getpixel((0, 0))
