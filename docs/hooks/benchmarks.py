"""The tables of the benchmarks, one for each processor, from the committed rows."""

from __future__ import annotations

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

MARK = "<!-- all rows -->"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the tables where the page asks for them."""
    if MARK not in markdown:
        return markdown
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from benchmarks import report
    from benchmarks.results import ResultFile

    shown = []
    for name in report.PROCESSORS:
        results = ResultFile.read(report.RESULTS / name)
        indented = "\n".join(f"    {line}" for line in report.markdown(results).splitlines())
        shown.append(f'??? note "The table of all rows, {results.facts["machine"]["processor"]}"\n\n{indented}')
    return markdown.replace(MARK, "\n\n".join(shown))
