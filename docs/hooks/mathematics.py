"""Equations as MathML, which browsers typeset by themselves: no script, no font, nothing to fetch.

A fenced block of `math`, as GitHub reads it too, holds LaTeX. A line of its own in `aligned` is a line on the page.
"""

from __future__ import annotations

import re

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

_BLOCK = re.compile(r"^```math\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Typeset the blocks of a page."""
    return _BLOCK.sub(lambda match: typeset(match[1]), markdown)


def typeset(latex: str) -> str:
    """A displayed equation as HTML, on one line; its parts, with qquad between them, wrap where a line is full."""
    aligned = latex.replace("{aligned}", "{align*}")  # the converter's name for it
    parts = " ".join(aligned.split()).split(r"\qquad")
    return f'<div class="equation">{"".join(convert(part, display="block") for part in parts)}</div>'
