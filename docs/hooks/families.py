"""The table of every model type, from the rows of the zoo."""

from __future__ import annotations

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

MARK = "<!-- table of the zoo -->"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the table where the page asks for it."""
    if MARK not in markdown:
        return markdown
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tests.zoo.page import table

    lines = "\n".join(f"    {line}" for line in table().splitlines())
    return markdown.replace(MARK, f'??? note "The table of all types"\n\n{lines}')
