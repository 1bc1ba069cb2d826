"""The table of the vectors, from vectors/index.json and the rows of the readers that were held to them."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "docs" / "results" / "serving" / "deviations.jsonl"
MARK = "<!-- table of the vectors -->"
COUNTS = "<!-- who agrees -->"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the tables where the page asks for them."""
    return markdown.replace(MARK, table()).replace(COUNTS, counts())


def rows() -> list[dict[str, object]]:
    """The rows of real runs: a reader, a vector, and its errors."""
    return [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]


def counts() -> str:
    """How many vectors each reader agrees with, and how many it does not load."""
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for row in rows():
        found[str(row["reader"])][0 if row["agrees"] else 1 + isinstance(row["errors"], str)] += 1
    lines = [
        f"| {reader.replace('5 5.', '5.')} | {agrees} | {differs} | {stops} |"
        for reader, (agrees, differs, stops) in found.items()
    ]
    return "\n".join(["| reader | agrees | other positions | stops with an error |", "|---|---|---|---|", *lines])


def table() -> str:
    """A line for each vector: what it traps, the threads, and the readers that do not agree."""
    wrong: dict[str, list[str]] = defaultdict(list)
    for row in rows():
        if not row["agrees"]:
            wrong[str(row["vector"])].append(str(row["reader"]).rpartition(" ")[0])
    lines = ["| vector | what it traps | threads | readers that differ or stop |", "|---|---|---|---|"]
    for entry in json.loads((ROOT / "vectors" / "index.json").read_text(encoding="utf-8"))["vectors"]:
        threads = ", ".join(
            f"[{thread}](https://github.com/{thread.replace('#', '/issues/')})" for thread in entry["traps"]
        )
        lines.append(f"| `{entry['name']}` | {entry['says']} | {threads} | {', '.join(wrong[entry['name']])} |")
    return "\n".join(lines)
