"""The tables of docs/real.md are those of the rows: `python -m tools.real_tables` prints them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.real_tables import DOCS, FAR, NAMES, SHORT, by_text, finetuned, layouts, table

PAGE = (DOCS / "real.md").read_text()


@pytest.mark.parametrize("path", FAR, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_page_has_the_table_of_the_far_tokens(path: Path) -> None:
    assert by_text(path) in PAGE


@pytest.mark.parametrize(("name", "stem"), SHORT)
def test_the_page_has_the_table_of_short_texts(name: str, stem: str) -> None:
    assert table(name, stem) in PAGE


def test_the_page_has_the_table_of_the_fine_tuning() -> None:
    assert finetuned(DOCS / "results/real/smollm2-135m/finetuned.jsonl") in PAGE


def test_the_page_of_fine_tuning_has_the_table_of_layouts() -> None:
    assert layouts(DOCS / "results/real/smollm2-135m/layouts") in (DOCS / "finetuning.md").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_the_table_of_the_rows_or_asks_the_site_for_it(name: str) -> None:
    assert (table(name) in PAGE) != (f"<!-- rows of {name} -->" in PAGE)
