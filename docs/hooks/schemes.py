"""Facts beside the docstrings of schemes, as `rope-patch list` says them: name, equation, slots, need and source."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from commands import printed  # type: ignore[import-not-found]  # the file beside this one: hooks are no package
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

from rope_patch.schemes import scheme_class

MARK = "<!-- rope-patch list -->"
"""Where a page wants the table of all schemes."""

_DIRECTIVE = re.compile(r"^::: (rope_patch\.schemes\.\w+\.\w+)$", re.MULTILINE)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the facts of a scheme before its docstring, and the table of all where a page asks for it."""
    if not page.file.src_uri.startswith("reference/schemes"):
        return markdown
    markdown = markdown.replace(MARK, _table())
    return _DIRECTIVE.sub(lambda directive: _with_facts(*directive.group(0, 1)), markdown)


@cache
def schemes() -> dict[str, dict[str, Any]]:
    """What is said of each scheme, by the full name of its class."""
    listed = json.loads(printed("list", "--json"))
    return {f"{scheme_class(entry['name']).__module__}.{entry['class']}": entry for entry in listed}


def _with_facts(directive: str, path: str) -> str:
    scheme = schemes().get(path)
    if scheme is None:
        return directive
    slots = ", ".join(f"`{slot}`" for slot in scheme["slots"])
    code = f", [code]({scheme['code']})" if scheme["code"] else ""
    return (
        f"## {scheme['name']}\n\n```text\n{scheme['equation']}\n```\n\nFills {slots}; {scheme['needs']}. "
        f"[{scheme['source']}]({scheme['link']}), {scheme['year']}{code}.\n\n"
        f"{directive}\n    options:\n      heading_level: 3\n      show_root_toc_entry: false\n"
    )


def _table() -> str:
    lines = ["| scheme | class | slot | needs | year |", "|---|---|---|---|---|"]
    for path, scheme in schemes().items():
        cells = (f"`{scheme['name']}`", f"[{scheme['class']}][{path}]", ", ".join(scheme["slots"]))
        lines.append(f"| {' | '.join(cells)} | {scheme['needs']} | {scheme['year']} |")
    return "\n".join(lines)
