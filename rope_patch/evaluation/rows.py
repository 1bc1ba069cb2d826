"""Results as rows of JSON lines: an interrupted run loses none of them, and measures none twice."""

from __future__ import annotations

import dataclasses
import errno
import functools
import hashlib
import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
import transformers
from torch import nn

from rope_patch.errors import EvaluationError
from rope_patch.version import __version__

J = TypeVar("J", bound="JsonRow")


class JsonRow:
    """A dataclass that is one line of JSON; a number that is not finite is null there."""

    KEY: ClassVar[tuple[str, ...]]
    """The fields that identify a measurement: rows that agree in them are the same measurement."""

    @classmethod
    def key_of(cls, fields: Mapping[str, Any]) -> str:
        """The key of a row, also before it is measured."""
        return json.dumps([fields[name] for name in cls.KEY], sort_keys=True)

    def key(self) -> str:
        """The identity of the measurement."""
        return self.key_of(vars(self))

    def to_json(self) -> str:
        """One line."""
        return json.dumps({name: _finite(value) for name, value in vars(self).items()}, allow_nan=False)

    @classmethod
    def from_json(cls: type[J], line: str) -> J:
        """The row of a line; unknown fields are ignored.

        Raises:
            ValueError, TypeError: the line is not a row.
        """
        found = dict(json.loads(line))
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            if field.type == "float" and found.get(field.name, 0) is None:
                found[field.name] = math.nan
            if field.type == "list[float]":
                found[field.name] = [math.nan if value is None else value for value in found.get(field.name, ())]
        return cls(**{field.name: found[field.name] for field in dataclasses.fields(cls) if field.name in found})  # type: ignore[arg-type]


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, kw_only=True)
class Measurement(JsonRow):
    """The fields of every row about the model, the scheme and the software.

    Attributes:
        weights: fingerprint of the model's parameters.
        line: the scheme's name in the table, such as `pi:target=auto`.
        scheme: the measured scheme, with all fields filled in; `{"name": "plain"}` without one.
        length: of the context in tokens; for `by_position` the last position of the bin.
    """

    model: str
    weights: str
    line: str
    scheme: dict[str, Any]
    regime: str
    mount: str
    length: int
    training_length: int
    seconds: float
    dtype: str
    attention: str
    device: str
    seed: int
    versions: dict[str, str]
    commit: str | None


@dataclass(frozen=True, kw_only=True)
class Row(Measurement):
    """One cell of the table, with all data that it depends on.

    Attributes:
        targets: scored tokens per window; for overlapping windows, the stride.
        texts: fingerprint of the scored texts.
        nll: mean negative log-likelihood in nats per token, averaged as the protocol defines it.
        nll_by_document: the mean of each document; with fewer than 8 documents those of their windows, or of blocks of
            many windows.
        text: the name of the file or dataset.
        asked: the requested number of documents, if any.
        served: other programs that can compute the scheme, see `saving.readers.served_by`; None in old files.
    """

    KEY = ("model", "weights", "scheme", "protocol", "length", "targets", "texts", "dtype", "attention")

    protocol: str
    targets: int
    documents: int
    windows: int
    short_documents: int
    texts: str
    scored_tokens: int
    nll: float
    perplexity: float
    tokens_per_second: float
    nll_by_document: list[float] = dataclasses.field(default_factory=list)
    text: str = ""
    asked: int | None = None
    served: list[str] | None = None


R = TypeVar("R", bound=JsonRow)


class Rows(Generic[R]):
    """Rows on disk. Every `append` reaches the disk before it returns.

    A truncated last line is dropped, and a missing folder is created. Several runs may append to one file, each of them
    whole lines.

    Raises:
        OSError: the file cannot be written.
        EvaluationError: it contains anything but rows of this kind; it stays unchanged.
    """

    def __init__(self, path: str | Path, kind: type[R] = Row) -> None:  # type: ignore[assignment]
        self.path, self.kind = Path(path), kind
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._rows: dict[str, R] = {}
        with self.path.open("ab+") as file:
            file.seek(0)
            content = file.read()
            *lines, cut = content.split(b"\n")
            for number, line in enumerate(lines, start=1):
                try:
                    row = kind.from_json(line.decode())
                except (ValueError, TypeError) as error:
                    raise EvaluationError(
                        f"{path}, line {number}, is not a result row ({error}); move the file or choose another output"
                    ) from error
                self._rows[row.key()] = row
            if cut:
                file.truncate(len(content) - len(cut))

    @property
    def rows(self) -> list[R]:
        """The rows in the file when it was opened and those appended since; with equal keys only the last."""
        return list(self._rows.values())

    def find(self, key: str) -> R | None:
        """The row with this key, if there is one."""
        return self._rows.get(key)

    def append(self, row: R) -> None:
        """Write one row; on failure the file ends with the previous row."""
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


def recall(results: Rows[R] | None, fields: Mapping[str, Any]) -> R | None:
    """The same measurement from an earlier run, with the current names of line, text and servers."""
    row = results.find(results.kind.key_of(fields)) if results else None
    now = {name: fields[name] for name in ("line", "text", "asked", "served") if name in fields}
    return row and dataclasses.replace(row, **now)  # type: ignore[type-var]


def weights_fingerprint(model: nn.Module) -> str:
    """A cheap hash of a sample of every parameter, which distinguishes a retrained checkpoint from the previous one."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        if hasattr(values, "full_tensor"):  # sharded over processes, all of which run this
            values = values.full_tensor()
        sample = values.flatten()[:: max(1, values.numel() // 64)].float().cpu()
        digest.update(f"{name}{tuple(parameter.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]


@functools.cache
def provenance() -> dict[str, Any]:
    """The versions of the software, and the last commit of this library if it runs from a git checkout."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "rope_patch": __version__}
    git = ["git", "-C", str(Path(__file__).resolve().parents[1])]
    asked = (["log", "-1", "--format=%H", "--", "."], ["status", "--porcelain", "--", "."])
    try:
        commit, changes = [
            subprocess.run([*git, *words], capture_output=True, text=True, check=True, timeout=10).stdout.strip()
            for words in asked
        ]
    except (OSError, subprocess.SubprocessError):
        commit = changes = ""
    dirty = "+changes" if changes else ""
    return {"versions": {"python": platform.python_version(), **versions}, "commit": commit + dirty if commit else None}
