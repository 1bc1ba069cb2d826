"""A survey of the configs in a repository: it finds the configs of text models, and checks whether programs read them
as written.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .diagnosis import Report, as_numbers, called, diagnose
from .errors import NoPositions, Unreadable
from .sources import LARGEST, Aside, read_source
from .words import words_of

CONFIGS = "**/config.json"
"""The pattern of the files that are checked if none are named."""

ROTARY = (
    *("rope_theta", "rope_scaling", "rope_parameters", "rotary_dim", "rotary_pct", "rotary_emb_base"),
    *("partial_rotary_factor", "rope_local_base_freq", "global_rope_theta"),
)
"""Fields that only a model with rotary positions has."""

SHAPE = ("max_position_embeddings", "num_attention_heads", "hidden_size", "n_head", "n_embd", "text_config")
"""Fields that mark a text model if `model_type` is beside them."""

_ELSEWHERE = {"node_modules", "site-packages"}  # folders with files of other projects


@dataclass(frozen=True)
class Found:
    """A file that a survey found, with its report or the reason why it has none.

    Attributes:
        path: path of the file, relative to the working directory unless a pattern was absolute.
        report: the report on the config; None if it was not read.
        skipped: the reason why the survey does not read this file; else empty.
        unreadable: the reason why the file could not be read; else empty.
    """

    path: str
    report: Report | None = None
    skipped: str = ""
    unreadable: str = ""

    def status(self, strict: bool) -> int:
        """The exit status for this file alone; `strict` as in the command."""
        if self.report is None:
            return 2 if self.unreadable else 0
        return int(not (is_clear(self.report) if strict else self.report.agrees))


def is_clear(report: Report) -> bool:
    """Whether every reader computes all texts as the config says, and no note raises a doubt."""
    doubts = [note for note in report.notes if not isinstance(note, Aside)]
    return not doubts and all(reading.verdict == "agrees" for reading in report.readings)


def survey(patterns: Iterable[str], asked: Sequence[str] = ()) -> list[Found]:
    """Check every config that patterns match.

    Args:
        patterns: patterns of files, such as `models/**/config.json`; a folder stands for `CONFIGS` in it.
        asked: names of readers, see `diagnose`.

    Raises:
        Unreadable: a pattern matches no file, or there is no such reader.
    """
    for name in asked:
        called(name)  # checked first, else every file would be refused for it
    return [_found(path, asked) for path in files_of(patterns)]


def files_of(patterns: Iterable[str]) -> list[str]:
    """The files that patterns match, each once; hidden folders and installed packages are left out.

    Raises:
        Unreadable: a pattern matches no file.
    """
    found: list[str] = []
    for pattern in patterns:
        if os.path.isfile(pattern):
            found.append(pattern)
            continue
        inside = os.path.join(glob.escape(pattern), CONFIGS) if os.path.isdir(pattern) else pattern
        matched = [path for path in glob.glob(inside, recursive=True) if os.path.isfile(path)]
        matched = [path for path in matched if not _ELSEWHERE.intersection(Path(path).parts)]
        if not matched:
            raise Unreadable(f"no file matches {inside!r}")
        found += sorted(matched)
    return list(dict.fromkeys(found))


def _found(path: str, asked: Sequence[str]) -> Found:
    try:
        if not _is_of_a_text_model(path):
            return Found(path, skipped="no field of a text model")
        return Found(path, diagnose(read_source(path), asked))
    except NoPositions as error:
        return Found(path, skipped=str(error))
    except (Unreadable, OSError) as error:
        return Found(path, unreadable=str(error))


def _is_of_a_text_model(path: str) -> bool:
    """Whether a file looks like the config of a text model, damaged or not; other files may have the name
    `config.json`, too.
    """
    with open(path, "rb") as file:
        content = file.read(LARGEST)

    def has(*names: str) -> bool:
        return any(f'"{name}"'.encode() in content for name in names)

    if content.startswith(b"GGUF"):
        return True
    return not has("_diffusers_version") and (has(*ROTARY) or (has("model_type") and has(*SHAPE)))


def words_of_survey(found: Sequence[Found]) -> str:
    """Write the survey: a line for each file that was skipped or that all readers read alike, a report for every other
    file, and totals.
    """
    return "\n".join([*map(_words, found), "", _sums(found)])


def _words(found: Found) -> str:
    if found.skipped:
        return f"{found.path}: skipped, {found.skipped}"
    if found.report is None:
        return f"{found.path}: unreadable, {found.unreadable}"
    if is_clear(found.report):
        return f"{found.path}: {', '.join(reading.reader for reading in found.report.readings)} agree"
    others = tuple(reading for reading in found.report.readings if reading.verdict != "agrees")
    return words_of(replace(found.report, readings=others))


def _sums(found: Sequence[Found]) -> str:
    read = [each.report for each in found if each.report]
    alike = sum(report.agrees for report in read)
    counts = {
        "agree": alike,
        "differ": len(read) - alike,
        "unreadable": sum(bool(each.unreadable) for each in found),
        "skipped": sum(bool(each.skipped) for each in found),
    }
    return f"{len(found)} files: " + ", ".join(f"{count} {word}" for word, count in counts.items() if count)


def as_numbers_of_survey(found: Sequence[Found]) -> dict[str, Any]:
    """Convert the survey to JSON; `schema.json` describes it."""
    return {
        "schema": 1,
        "agrees": all(each.status(strict=False) == 0 for each in found),
        "reports": [as_numbers(each.report) for each in found if each.report],
        "unreadable": [{"config": each.path, "why": each.unreadable} for each in found if each.unreadable],
        "skipped": [{"config": each.path, "why": each.skipped} for each in found if each.skipped],
    }
