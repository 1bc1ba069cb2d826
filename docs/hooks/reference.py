"""A short form for the members of a module: `::: package.module (first, second)`, or `(*)` for all that are public.

Without brackets the object itself has a heading, as mkdocstrings has it. Lines of such objects may follow one another.
"""

from __future__ import annotations

import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

_SHORT = re.compile(r"^::: (?P<path>[\w.]+) \((?P<members>\*|[\w, ]+)\)$", re.MULTILINE)
_NEXT = re.compile(r"(?<!\n)\n(?=::: [\w.]+)")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Write the options of each short form."""
    return _SHORT.sub(_in_full, _NEXT.sub("\n\n", markdown))


def _in_full(match: re.Match[str]) -> str:
    options = ["show_root_heading: false", "show_root_toc_entry: false"]
    if match["members"] != "*":
        options += [f"members: [{match['members']}]", "show_bases: false"]
    return "\n".join([f"::: {match['path']}", "    options:", *(f"      {option}" for option in options)])
