"""Result rows, and the file that keeps them: JSON lines, appended one by one."""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import json
import math
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, Generic, Protocol, TypeVar

import torch
import transformers
from torch import nn

from rope_patch.errors import EvaluationError
from rope_patch.version import __version__

try:
    import fcntl
except ImportError:  # not a Unix: there, two processes on one output are not supported
    fcntl = None  # type: ignore[assignment]

_PACKAGE = Path(__file__).resolve().parent.parent
_PROBE_BYTES = 1 << 20
_SHOWING = ("cli", "plots", "report.py", "chart.py", "figures.py", "labels.py", "sweep_report.py")
"""Folders and modules that only show what was measured."""

J = TypeVar("J", bound="JsonLine")


class JsonLine:
    """A dataclass that is one line of JSON. A number that is not finite, which JSON has no word for, becomes null.

    Attributes:
        IDENTITY: the fields that have to agree before a row is used instead of a new measurement.
    """

    IDENTITY: ClassVar[tuple[str, ...]]

    @classmethod
    def identity(cls, **fields: Any) -> str:
        """The key of a row, also of one that is still to be measured."""
        return json.dumps([fields[name] for name in cls.IDENTITY], sort_keys=True)

    def key(self) -> str:
        """What makes two rows the same measurement."""
        return self.identity(**vars(self))

    def to_json(self) -> str:
        """One line."""
        fields = dataclasses.asdict(self)  # type: ignore[call-overload]
        finite = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in fields.items()}
        return json.dumps(finite, allow_nan=False)

    @classmethod
    def from_json(cls: type[J], line: str) -> J:
        """The row that `to_json` wrote, with NaN for every number that was not finite.

        Raises:
            ValueError: when the line is something else.
        """
        fields = json.loads(line)
        types = {field.name: field.type for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if not isinstance(fields, dict) or set(fields) != set(types):
            raise ValueError("not the fields of a row")
        return cls(**{key: math.nan if v is None and types[key] == "float" else v for key, v in fields.items()})


@dataclass(frozen=True)
class Row(JsonLine):
    """One cell of the table, with everything that it depends on.

    Attributes:
        model: name or folder of the checkpoint.
        weights: fingerprint of its parameters.
        line: the scheme as the table names it, such as `pi:factor=auto`.
        scheme: the scheme that was measured, all fields filled in; `{"name": "plain"}` for none.
        regime: what the scheme says it needs before it makes sense.
        mount: where it was mounted; `none` for the plain checkpoint.
        protocol: one of `rope_patch.evaluation.protocols.PROTOCOLS`.
        length: context length in tokens; for `by_position` the last position of the bin.
        training_length: L in tokens.
        targets: scored tokens per window; where windows overlap, those that every window but the first adds, which is
            the stride.
        documents, windows, short_documents: what was scored, and how many documents were too short.
        texts: fingerprint of the scored texts.
        scored_tokens: number of targets in the mean.
        nll: mean negative log-likelihood in nats per token, averaged as the protocol says.
        perplexity: exp(nll).
        seconds: duration of the forward passes that the row needed.
        tokens_per_second: context tokens over seconds.
        dtype, attention, device: what it was computed with; `attention` is the implementation of Transformers.
        seed: of the draw of documents.
        code: fingerprint of this library's code, which decides whether a row may stand in for a new measurement.
        versions: of Python, torch, transformers and rope_patch.
        commit: of this library, where it runs from its repository.
    """

    IDENTITY = (
        "model",
        "weights",
        "scheme",
        "protocol",
        "length",
        "targets",
        "texts",
        "dtype",
        "attention",
        "code",
    )

    model: str
    weights: str
    line: str
    scheme: dict[str, Any]
    regime: str
    mount: str
    protocol: str
    length: int
    training_length: int
    targets: int
    documents: int
    windows: int
    short_documents: int
    texts: str
    scored_tokens: int
    nll: float
    perplexity: float
    seconds: float
    tokens_per_second: float
    dtype: str
    attention: str
    device: str
    seed: int
    code: str
    versions: dict[str, str]
    commit: str | None


class Line(Protocol):
    """A row that a `LineFile` keeps."""

    def key(self) -> str:
        """What makes two rows the same measurement."""
        ...

    def to_json(self) -> str:
        """One line."""
        ...

    @classmethod
    def from_json(cls, line: str) -> Line:
        """The row that `to_json` wrote; ValueError when the line is something else."""
        ...


R = TypeVar("R", bound=Line)


class LineFile(Generic[R]):
    """Rows on disk. Every `append` reaches the disk before it returns, so an interrupted run loses none.

    A last line that was cut off in the middle of writing is removed when the file is opened again. Several processes
    may append to one file: each writes whole lines.

    Args:
        path: of the `.jsonl` file; its folder is made where it is missing.
        kind: the class of the rows.

    Raises:
        OSError: when the folder cannot be made or written to, or is full.
        EvaluationError: when the file holds something else than rows; it is left as it is.
    """

    def __init__(self, path: str | Path, kind: type[R]) -> None:
        self.path = Path(path)
        self.kind = kind
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _require_room(self.path.parent)
        self._rows = self._read()

    @property
    def rows(self) -> list[R]:
        """The rows that were there when the file was opened and those appended since; of equal keys the last."""
        return list(self._rows.values())

    def find(self, key: str) -> R | None:
        """The row with this key, if it was measured before."""
        return self._rows.get(key)

    def append(self, row: R) -> None:
        """Write one row.

        Raises:
            OSError: when it could not be written; the file then ends with the row before.
        """
        with self.path.open("ab") as file, _alone(file):
            end = file.seek(0, os.SEEK_END)
            try:
                file.write(row.to_json().encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            except OSError as error:
                os.truncate(self.path, end)
                raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._rows[row.key()] = row

    def _read(self) -> dict[str, R]:
        self.path.touch()
        with self.path.open("rb+") as file, _alone(file):
            content = file.read()
            *lines, rest = content.split(b"\n")
            rows: dict[str, R] = {}
            for number, line in enumerate(lines, start=1):
                try:
                    row: Any = self.kind.from_json(line.decode())
                except ValueError as error:
                    raise EvaluationError(
                        f"{self.path}, line {number}, is not a result row ({error}); move the file or choose another "
                        "output"
                    ) from error
                rows[row.key()] = row
            if rest:
                file.truncate(len(content) - len(rest))
        return rows


class ResultFile(LineFile[Row]):
    """The `LineFile` of perplexity rows."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, Row)


@contextmanager
def _alone(file: IO[bytes]) -> Iterator[None]:
    """Keep other processes of this library away from the file, where the system can; closing it lets them in."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX)
    yield


def _require_room(folder: Path) -> None:
    """Write something and delete it: a read-only or full folder is better known before hours of work than after."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from error


def weights_fingerprint(model: nn.Module) -> str:
    """A hash of a sample of every parameter: tells a retrained checkpoint from the one before, at no cost."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        if hasattr(values, "full_tensor"):  # spread over processes, all of which come here
            values = values.full_tensor()
        sample = values.flatten()[:: max(1, values.numel() // 64)].float().cpu()
        digest.update(f"{name}{tuple(parameter.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]


@functools.cache
def provenance() -> dict[str, Any]:
    """The fields of a row that say which software made it."""
    return {
        "code": _code_fingerprint(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "rope_patch": __version__,
        },
        "commit": _commit(),
    }


def _code_fingerprint() -> str:
    """A hash of what this library computes with: comments, docstrings and layout are no part of it."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        place = path.relative_to(_PACKAGE)
        if place.parts[0] not in _SHOWING and path.name not in _SHOWING:
            digest.update(f"{place.as_posix()}{_spell(ast.parse(path.read_bytes()))}".encode())
    return digest.hexdigest()[:16]


def _spell(node: Any) -> str:
    """A syntax tree in words, the same under every Python: without docstrings, and without empty fields."""
    if isinstance(node, list):
        return f"[{' '.join(_spell(item) for item in node if not _is_docstring(item))}]"
    if isinstance(node, ast.AST):
        kept = [(name, value) for name, value in ast.iter_fields(node) if value not in (None, [])]
        return f"{type(node).__name__}({' '.join(f'{name}={_spell(value)}' for name, value in kept)})"
    return repr(node)


def _is_docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _commit() -> str | None:
    """The commit of the repository that this package is the source of; None where it is installed elsewhere."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(_PACKAGE), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != _PACKAGE.parent:
            return None
        changed = "+changes" if git("status", "--porcelain", "--", str(_PACKAGE)) else ""
        return git("rev-parse", "HEAD") + changed
    except (OSError, subprocess.SubprocessError):
        return None
