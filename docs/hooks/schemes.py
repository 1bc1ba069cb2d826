"""Facts beside the docstrings of schemes, as `rope-patch list` says them: name, equation, slots, need and source."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from commands import printed  # type: ignore[import-not-found]  # the file beside this one: hooks are no package
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

from rope_patch.schemes import scheme_class

MARK = "<!-- rope-patch list -->"
"""Where a page wants the table of all schemes."""


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The table of all schemes where a page asks for it, and on the page of a slot every scheme that it belongs to."""
    folder, _, name = page.file.src_uri.removesuffix(".md").rpartition("/")
    if folder == "reference/schemes":
        markdown += "\n\n" + "\n\n".join(_with_facts(path) for path in of_slot(name))
    return markdown.replace(MARK, _table()) if folder.startswith("reference") else markdown


@cache
def schemes() -> dict[str, dict[str, Any]]:
    """What is said of each scheme, by the full name of its class."""
    listed = json.loads(printed("list", "--json"))
    return {f"{scheme_class(entry['name']).__module__}.{entry['class']}": entry for entry in listed}


def of_slot(slot: str) -> list[str]:
    """The full names of the schemes on the page of a slot, by year; a bias decides, whatever else is filled."""
    found = {
        path: entry["year"]
        for path, entry in schemes().items()
        if slot == ("bias" if "bias" in entry["slots"] else entry["slots"][0])
    }
    return sorted(found, key=found.__getitem__)


def _with_facts(path: str) -> str:
    scheme = schemes()[path]
    slots = ", ".join(f"`{slot}`" for slot in scheme["slots"])
    code = f", [code]({scheme['code']})" if scheme["code"] else ""
    return (
        f"## {scheme['name']}\n\n```text\n{scheme['equation']}\n```\n\nFills {slots}; {scheme['needs']}. "
        f"[{scheme['source']}]({scheme['link']}), {scheme['year']}{code}.\n\n"
        f"::: {path}\n    options:\n      heading_level: 3\n      show_root_toc_entry: false\n"
    )


def _table() -> str:
    lines = ["| scheme | class | slot | needs | year |", "|---|---|---|---|---|"]
    for path, scheme in schemes().items():
        cells = (f"`{scheme['name']}`", f"[{scheme['class']}][{path}]", ", ".join(scheme["slots"]))
        lines.append(f"| {' | '.join(cells)} | {scheme['needs']} | {scheme['year']} |")
    return "\n".join(lines)
