"""The table of the benchmarks, from the committed rows."""

from __future__ import annotations

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

MARK = "<!-- all rows -->"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the table where the page asks for it."""
    if MARK not in markdown:
        return markdown
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from benchmarks import report
    from benchmarks.results import ResultFile

    lines = report.markdown(ResultFile.read(report.RESULTS / "cpu.json")).splitlines()
    indented = "\n".join(f"    {line}" for line in lines)
    return markdown.replace(MARK, f'??? note "The table of all rows"\n\n{indented}')
