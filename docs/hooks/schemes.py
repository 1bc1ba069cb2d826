"""Facts beside the docstrings of schemes: equation, picture, example, when to use it, what was measured, source.

Names, slots and sources are those of `rope-patch list`, figures those of the files in `docs/results`, and pictures are
drawn when the site is built. `schemes.yml` may add an equation in LaTeX and advice; a page without them has what the
class declares.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from commands import printed  # type: ignore[import-not-found]  # the files beside this one: hooks are no package
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from scheme_measurements import table  # type: ignore[import-not-found]
from scheme_pictures import draw  # type: ignore[import-not-found]

from rope_patch.schemes import list_schemes, scheme_class
from rope_patch.schemes.base import TRAINING
from rope_patch.schemes.target import takes_target

FOLDER = "reference/schemes"
FACTS: dict[str, dict[str, str]] = yaml.safe_load((Path(__file__).with_name("schemes.yml")).read_text())


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the picture of each scheme that has one."""
    for name in list_schemes():
        if drawn := draw(name):
            files.append(File.generated(config, f"{FOLDER}/{name}.svg", content=drawn[1]))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """On the page of a slot every scheme that belongs to it."""
    folder, _, name = page.file.src_uri.removesuffix(".md").rpartition("/")
    if folder == FOLDER:
        markdown += "\n\n" + "\n\n".join(_with_facts(path) for path in of_slot(name))
    return markdown


@cache
def schemes() -> dict[str, dict[str, Any]]:
    """The entry of each scheme in the list, by the full name of its class."""
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


def example(name: str) -> str:
    """The arguments of `patch` after the model."""
    usual = f'"{name}", target=8192' if takes_target(scheme_class(name)) else f'"{name}"'
    return FACTS.get(name, {}).get("use", usual)


def _fields(scheme: dict[str, Any]) -> str:
    """A table of the fields with their defaults and the values that their rules allow."""
    rows = [f"| `{field}` | {scheme['fields'][field]} | {words} |" for field, words in scheme["allowed"].items()]
    return "\n".join(["| field | default | allowed |", "|---|---|---|", *rows]) if rows else ""


def _with_facts(path: str) -> str:
    scheme = schemes()[path]
    name, drawn = scheme["name"], draw(scheme["name"])
    facts = FACTS.get(name, {})
    equation = f"```math\n{facts['equation'].strip()}\n```" if facts else f"```text\n{scheme['equation']}\n```"
    slots = ", ".join(f"`{slot}`" for slot in scheme["slots"])
    code = f", [code]({scheme['code']})" if scheme["code"] else ""
    return "\n\n".join(
        [
            f"## {name}",
            equation,
            f"![{drawn[0]}]({name}.svg){{ loading=lazy }}" if drawn else "",
            f"```python\npatch(model, {example(name)})\n```",
            _fields(scheme),
            f"**Use it when** {facts['when']}" if facts else f"It {scheme['summary']}.",
            f"**Measured.** {table(name)}",
            f"**Slots.** It fills {slots}. **Training.** {TRAINING[scheme['needs']].capitalize()}.",
            f"**Source.** [{scheme['source']}]({scheme['link']}), {scheme['year']}{code}.",
            f"::: {path}\n    options:\n      heading_level: 3\n      show_root_toc_entry: false\n",
        ]
    )
