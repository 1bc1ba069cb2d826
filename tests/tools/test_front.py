"""The picture of the README's first screen."""

from __future__ import annotations

import json
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
    above, below = front.front(front.PAGES["front"]).axes
    far = [nll("repeat", line, 4096) for line in front.FAR]
    novel = [nll("perplexity", "plain", 2048), nll("perplexity", front.SCHEME, 4096)]
    for axes, values in ((above, far), (below, novel)):
        assert [bar.get_width() for bar in axes.patches] == pytest.approx(values)
        assert [text.get_text() for text in axes.texts] == [f"{value:.2f}" for value in values]


def test_a_light_and_a_dark_page_are_written(tmp_path):
    front.main(front.Options(output=str(tmp_path)))
    light, dark = (Image.open(tmp_path / f"{name}.png").convert("L") for name in ("front", "front_dark"))
    assert light.size == dark.size == Image.open(ROOT / "docs" / "images" / "front.png").size
    assert light.getpixel((0, 0)) > 240 > 30 > dark.getpixel((0, 0))
