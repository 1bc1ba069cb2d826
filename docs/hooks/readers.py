"""The page of readers, from the table of `rope_patch.doctor`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from rope_patch.doctor.reader import Deviation, Reader
from rope_patch.doctor.readers import BUGS, READERS

READERS_MARK, BUGS_MARK = "<!-- table of readers -->", "<!-- table of bugs -->"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the tables where the page asks for them."""
    for mark, lines in ((READERS_MARK, of_readers), (BUGS_MARK, of_bugs)):
        if mark in markdown:
            markdown = markdown.replace(mark, "\n".join(lines()))
    return markdown


def of_readers() -> Iterator[str]:
    """An overview, and a section for each reader."""
    yield "| reader | `--for` | version | known | deviations in this version | fixed before it |"
    yield "|---|---|---|---|---|---|"
    for reader in READERS:
        past = [each for each in reader.deviations if is_past(reader, each)]
        cells = reader.name, f"`{reader.key}`", reader.version, reader.known
        yield _row(*cells, str(len(reader.deviations) - len(past)), str(len(past)))
    for reader in READERS:
        yield from section(reader)


def section(reader: Reader) -> Iterator[str]:
    """The section of one reader: the words that it takes, its deviations, and facts that are not established."""
    yield f"\n## {reader.name}\n"
    yield f"{reader.version}, {reader.known}: {reader.source}\n"
    yield f"It takes {reader.takes}.\n"
    if reader.writes:
        yield f"It writes {reader.writes}.\n"
    for limit in reader.limits:
        since = f" ({limit.begun})" if limit.begun else ""
        yield f"It limits texts to max_position_embeddings under {', '.join(limit.types)}{since}.\n"
    if reader.deviations:
        yield "| what it does | versions | what to do instead | source |"
        yield "|---|---|---|---|"
        for each in reader.deviations:
            where = f" (only {', '.join(each.layers)})" if each.layers else ""
            some = "; it computes other texts as the config says" if each.partly else ""
            yield _row(f"{each.words}{where}{some}", versions(each), each.cure, each.source)
        yield ""
    if reader.unknown:
        yield f"Not established: {reader.unknown}\n"


def versions(deviation: Deviation) -> str:
    """The versions for which a deviation holds, in words."""
    begin, end = deviation.since or deviation.begun, deviation.until or deviation.ended
    return " ".join([f"since {begin}" if begin else "", f"before {end}" if end else ""]).strip() or "all that were read"


def is_past(reader: Reader, deviation: Deviation) -> bool:
    """Whether the version in the table no longer has the deviation."""
    return not deviation.holds_for(reader.version, reader.version)


def of_bugs() -> Iterator[str]:
    """A row for each bug."""
    yield "| program | what it does | versions | a config that shows it | vector | thread |"
    yield "|---|---|---|---|---|---|"
    for bug in BUGS:
        shown = f"`{json.dumps(bug.config)}`" if bug.config else ""
        vector = f"`{bug.vector}`" if bug.vector else ""
        yield _row(bug.program, bug.misread, bug.versions, shown, vector, bug.thread)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', ' or ') for cell in cells)} |"
