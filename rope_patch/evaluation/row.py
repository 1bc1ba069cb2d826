"""A row of results, one line of JSON for any measurement: an interrupted run loses no row, and measures none twice."""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import torch
import transformers

from rope_patch.errors import EvaluationError
from rope_patch.json_files import check_types, read_object, read_rows
from rope_patch.version import __version__

KEY = (
    *("task", "model", "weights", "scheme", "protocol", "length", "targets", "texts"),
    *("depth", "trials", "prompts", "chat", "dtype", "attention"),
)
"""The fields that identify a measurement: rows that agree in them are the same measurement."""

VALUES = ("nll", "accuracy", "score")
"""The fields that a task may measure: every row has at least one of them."""

_AT_LEAST_ONE = ("length", "training_length", "trials")
_SHARES = ("accuracy", "exact", "control_accuracy", "control_exact", "chosen_share", "depth", "score", "scores")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One cell of a table, with all data that it depends on. Fields that a task does not use stay None.

    Attributes:
        model: a name for tables; `weights` is the fingerprint of its parameters.
        line: the scheme's name in the table, such as `pi:target=auto`.
        scheme: the measured scheme, with all fields filled in; `{"name": "plain"}` without one.
        length: length of the context in tokens; for `by_position` the last position of the bin.
        training_length: L in tokens.
        step: number of training steps before the measurement; None without a training.
        task: the name of the task.
        text: the name of the file or dataset.
        protocol: the protocol of perplexity.
        targets: scored tokens per window; for overlapping windows, the stride.
        texts, prompts: fingerprint of the scored texts, or of the questions.
        asked: the requested number of documents, if any.
        nll: mean negative log-likelihood in nats per token; `perplexity` is its exponential.
        nll_by_document: the mean of each document; with fewer than 8 documents the means of their windows, or of blocks
            of many windows.
        chosen_share, others_nll: if a protocol scores only some of the last tokens, their share, and the NLL of the
            others; `scored_tokens` is their number.
        depth: share of the filler before the hidden text.
        distance: the smallest number of tokens from the end of the hidden text to the end of the question.
        accuracy, exact: share of correct keys or tokens, and of wholly correct answers.
        control_accuracy, control_exact, control_nll: the same shares and NLL with nothing hidden.
        scores: the score of each question, from 0 to 1; `score` is their mean, `error` its standard error.
    """

    line: str
    length: int
    training_length: int
    model: str = ""
    weights: str = ""
    scheme: dict[str, Any] = field(default_factory=dict)
    regime: str = "training-free"
    mount: str = "none"
    step: int | None = None
    task: str = "perplexity"  # the task of rows in old files, which name none
    seconds: float | None = None
    tokens_per_second: float | None = None
    dtype: str = ""
    attention: str = ""
    device: str = ""
    seed: int | None = None
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None

    text: str = ""
    protocol: str | None = None
    targets: int | None = None
    documents: int | None = None
    windows: int | None = None
    short_documents: int | None = None
    asked: int | None = None
    texts: str | None = None
    scored_tokens: int | None = None
    nll: float | None = None
    perplexity: float | None = None
    nll_by_document: list[float] = field(default_factory=list)
    chosen_share: float | None = None
    others_nll: float | None = None

    depth: float | None = None
    distance: int | None = None
    span: int | None = None
    trials: int | None = None
    prompts: str | None = None
    prompt_tokens: float | None = None
    accuracy: float | None = None
    exact: float | None = None
    control_accuracy: float | None = None
    control_exact: float | None = None
    control_nll: float | None = None

    chat: bool | None = None
    scores: list[float] | None = None
    score: float | None = None
    error: float | None = None

    @property
    def loss(self) -> float:
        """The NLL in nats per token; NaN if the task has none."""
        return math.nan if self.nll is None else self.nll

    @property
    def share(self) -> float:
        """The share of the answers that are correct, from 0 to 1; NaN if the task has none."""
        shares = [share for share in (self.accuracy, self.score) if share is not None]
        return shares[0] if shares else math.nan

    @staticmethod
    def key_of(fields: Mapping[str, Any]) -> str:
        """The key of a row from its fields, measured or not."""
        names = KEY if fields.get("step") is None else ("line", "step", "length")  # one file belongs to one training
        return json.dumps([fields.get(name) for name in names], sort_keys=True)

    def key(self) -> str:
        """The key that identifies the measurement."""
        return self.key_of(vars(self))

    def to_json(self) -> str:
        """Write the row as one line of JSON, without fields that are None; a number that is not finite becomes null."""
        fields = {name: _finite(value) for name, value in vars(self).items() if value is not None}
        return json.dumps(fields, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Row:
        """Read a row from a line of JSON; unknown fields are ignored.

        Raises:
            ValueError, TypeError: the line is not a row.
        """
        fields = read_object(line)
        if fields.keys().isdisjoint(VALUES):
            raise TypeError(f"it has none of {', '.join(map(repr, VALUES))}")
        if "perplexity" in fields:
            fields |= {name: math.nan for name in ("nll", "perplexity") if fields[name] is None}
        for name in ("nll_by_document", "scores"):
            if isinstance(values := fields.get(name), list):
                fields[name] = [math.nan if value is None else value for value in values]
        check_types(fields, _types())
        for name in filter(fields.get, _SHARES):
            values = fields[name] if isinstance(fields[name], list) else [fields[name]]
            if any(value < 0 or value > 1 for value in values):  # a value that was not measured is NaN
                raise ValueError(f"{name}={fields[name]!r:.80} must be from 0 to 1")
        for name in _AT_LEAST_ONE:
            if fields.get(name) is not None and fields[name] < 1:
                raise ValueError(f"{name}={fields[name]} must be at least 1")
        return cls(**{field.name: fields[field.name] for field in dataclasses.fields(cls) if field.name in fields})


@functools.cache
def _types() -> dict[str, Any]:
    return get_type_hints(Row)


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def by_line(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group the rows by line of the table, in its order."""
    return {line: [row for row in rows if row.line == line] for line in dict.fromkeys(row.line for row in rows)}


class Rows:
    """A file of rows. Every `append` reaches the disk before it returns.

    A truncated last line is dropped, and a missing folder is created. Several runs may append to one file, each of them
    whole lines.

    Raises:
        OSError: the file cannot be written.
        EvaluationError: the file contains anything but rows, or is not a regular file; it stays unchanged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and not (self.path.is_file() or self.path.is_dir()):  # `open` refuses a folder
            raise EvaluationError(f"{path} is not a file but a device or a pipe; choose another output")
        with self.path.open("ab+") as file:
            file.seek(0)
            content = file.read()
            rows, size = read_rows(path, content, Row.from_json)
            if size < len(content):
                file.truncate(size)
        self._rows = {row.key(): row for row in rows}

    @property
    def rows(self) -> list[Row]:
        """All rows, from the file when it was opened and appended since; of rows with equal keys only the last."""
        return list(self._rows.values())

    def find(self, key: str) -> Row | None:
        """The row with this key; None without one."""
        return self._rows.get(key)

    def recall(self, fields: Mapping[str, Any]) -> Row | None:
        """Find the same measurement from an earlier run, and give it the current names of line and text."""
        row = self.find(Row.key_of(fields))
        return row and dataclasses.replace(
            row, **{name: fields[name] for name in ("line", "text", "asked") if name in fields}
        )

    def append(self, row: Row) -> None:
        """Write one row; if that fails, the file still ends with the previous row."""
        line = row.to_json().encode() + b"\n"
        with self.path.open("ab", buffering=0) as file:  # one write, so that lines of two runs never mix
            end = file.seek(0, os.SEEK_END)
            try:
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
            except OSError as error:
                file.truncate(end)
                raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._rows[row.key()] = row


@functools.cache
def provenance() -> dict[str, Any]:
    """The versions of the software, and the last commit of this library if it runs from a git checkout."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "rope_patch": __version__}
    git = ["git", "-C", str(Path(__file__).resolve().parents[1])]
    questions = (["log", "-1", "--format=%H", "--", "."], ["status", "--porcelain", "--", "."])
    try:
        commit, changes = [
            subprocess.run([*git, *words], capture_output=True, text=True, check=True, timeout=10).stdout.strip()
            for words in questions
        ]
    except (OSError, subprocess.SubprocessError):
        commit = changes = ""
    dirty = "+changes" if changes else ""
    return {"versions": {"python": platform.python_version(), **versions}, "commit": commit + dirty if commit else None}
