"""The reference of the command line: the output of `--help`, taken from the commands when the site is built."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from itertools import groupby
from unittest.mock import patch

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

from rope_patch.cli import COMMANDS, main

MARK = "<!-- rope-patch --help -->"
"""Where a page wants the help of every command."""

_PLAIN = {"COLUMNS": "1000", "NO_COLOR": "1", "TERM": "dumb"}


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the help of every command where a page asks for it."""
    if MARK not in markdown:
        return markdown
    return markdown.replace(MARK, "\n\n".join(f"## {name}\n\n{as_markdown(text)}" for name, text in helps().items()))


def helps() -> dict[str, str]:
    """The output of `--help`, of `rope-patch` and of each of its commands, without colour."""
    with patch.dict(os.environ, _PLAIN):
        return {
            "rope-patch": printed("--help"),
            **{f"rope-patch {name}": printed(name, "--help") for name in COMMANDS},
        }


def printed(*words: str) -> str:
    """What `rope-patch WORDS` prints."""
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # with an encoding, tables have their boxes
    with redirect_stdout(output):
        main(words)
    output.seek(0)
    return output.read()


def as_markdown(text: str) -> str:
    """Paragraphs, code and tables instead of boxes, so that lines wrap at any width."""
    parts = []
    for kind, lines in groupby(text.splitlines(), _kind):
        parts += {"code": _code, "row": _table, "text": list, "none": lambda _: [""]}[kind](lines)
    return "\n".join(parts)


def _kind(line: str) -> str:
    if line[:1] in ("", "╭", "╰"):
        return "none"
    if line.startswith("│") or re.match(r"  \S.*?\S  ", line):
        return "row"
    return "code" if line.startswith(("  ", "usage: ")) else "text"


def _code(lines: Iterable[str]) -> Iterator[str]:
    yield from ("", "```{ .text .help }", *(line.strip() for line in lines), "```", "")


def _table(lines: Iterable[str]) -> Iterator[str]:
    yield from ("", "| | |", "|---|---|")
    name = ""
    for line in lines:
        first, *rest = re.split(r"  +", line.strip("│ "), maxsplit=1)
        if not rest and not line.startswith("│  "):
            name = first  # too long for its column; its text is on the next line
            continue
        name, text = (first, rest[0]) if rest else (name, first)
        yield f"| `{name}` | {re.sub('[|<*]', lambda sign: f'&#{ord(sign[0])};', text)} |"
    yield ""
