"""The reference of the command line: what `--help` says, taken from the commands when the site is built."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout
from unittest.mock import patch

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

from rope_patch.cli import COMMANDS, main

MARK = "<!-- rope-patch --help -->"
"""Where a page wants the help of every command."""

_PLAIN = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the help of every command where a page asks for it."""
    return markdown.replace(MARK, "\n\n".join(f"## {name}\n\n```text\n{said}```" for name, said in helps().items()))


def helps() -> dict[str, str]:
    """What `--help` prints, of `rope-patch` and of each of its commands, without colour."""
    with patch.dict(os.environ, _PLAIN):
        return {
            "rope-patch": printed("--help"),
            **{f"rope-patch {name}": printed(name, "--help") for name in COMMANDS},
        }


def printed(*words: str) -> str:
    """What `rope-patch WORDS` prints."""
    output = io.StringIO()
    with redirect_stdout(output):
        main(words)
    return output.getvalue()
