"""Tables of real checkpoints that the page leaves to the site, from the committed rows."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

_MARK = re.compile(r"<!-- rows of ([\w.-]+) -->")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put each table where the page asks for it."""
    if not _MARK.search(markdown):
        return markdown
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tools.real_tables import table

    return _MARK.sub(lambda match: table(match[1]), markdown)
