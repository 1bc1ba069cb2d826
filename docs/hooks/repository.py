"""Pages of the site that are files of the repository, and links out of `docs/`.

The README, the change log and their neighbours are written once, in the root of the repository, and shown here, as are
the notebooks (`notebooks.py`). A link to a file that the site does not have becomes the name of that file, as code: the
reader has the repository, the site has no address.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]

WRITTEN = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "notebooks/README.md": "notebooks/index.md",
}
"""Markdown outside `docs/`, and the pages they are."""

SHOWN = WRITTEN | {f"notebooks/{path.name}": f"notebooks/{path.stem}.md" for path in ROOT.glob("notebooks/*.ipynb")}
"""All files of the repository that are pages of the site."""

_CODE = r"(?P<code>^ *(?P<fence>`{3,}|~{3,}).*?^ *(?P=fence) *$|`[^`\n]+`)"
_LINK = r"(?P<image>!?)\[(?P<text>(?:[^\]\\]|\\.)*)\]\((?P<target>[^)\s]+)\)"
_CODE_OR_LINK = re.compile(f"{_CODE}|{_LINK}", re.MULTILINE | re.DOTALL)
_ELSEWHERE = re.compile(r"[a-z]+:|#")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside `docs/`."""
    for name, page in WRITTEN.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    return files


def on_post_build(config: MkDocsConfig) -> None:
    """Let pages open without a server: there the theme reads a search index from a script, and stops if it is missing.

    It is empty, because no browser starts the theme's search from a folder.
    """
    folder = Path(config.site_dir) / "search"
    folder.mkdir(exist_ok=True)
    (folder / "search_index.js").write_text('var __index = {"config": {}, "docs": []}\n')


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let every link lead to a page of the site, or say which file is meant."""
    uri = page.file.src_uri
    source = next((name for name, shown in SHOWN.items() if shown == uri), f"docs/{uri}")

    def repaired(match: re.Match[str]) -> str:
        return (
            match[0] if match["code"] or _ELSEWHERE.match(match["target"]) else _within_site(match, source, uri, files)
        )

    repaired_page = _CODE_OR_LINK.sub(repaired, markdown)
    return repaired_page.replace('="docs/', '="') if source == "README.md" else repaired_page  # pictures as HTML


def _within_site(match: re.Match[str], source: str, uri: str, files: Files) -> str:
    target, hash_sign, anchor = match["target"].partition("#")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    shown = SHOWN.get(path, path.removeprefix("docs/"))
    if files.get_file_from_path(shown) is not None:
        there = posixpath.relpath(shown, posixpath.dirname(uri) or ".")
        return f"{match['image']}[{match['text']}]({there}{hash_sign}{anchor})"
    said = match["text"].strip("`")
    return f"`{path}`" if path.endswith(said) else f"{match['text']} (`{path}`)"
