"""Measured rows, and the file that keeps them: rewritten aside and renamed after every row."""

from __future__ import annotations

import dataclasses
import datetime
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.comparison import Comparison, Figure, Shape
from rope_patch.evaluation.row import provenance

SCHEMA = 2
"""Raised when the meaning of a field changes; a file of another schema is never added to."""


@dataclass(frozen=True)
class Row:
    """One comparison, measured; or the reason why it could not be.

    Attributes:
        name, work, yardstick: see `Comparison` and `Figure`.
        shape: for people.
        target, memory_target: largest allowed ratios, or the largest allowed number of a `Figure`.
        met: whether all that has a target is within it; None where nothing has.
        ratio: of the medians, ours over the yardstick.
        value, yardstick_value, unit: of a `Figure`, which has no ratio; the median of its rounds.
        spread: quartiles of the ratios of single rounds, or of the numbers.
        seconds, yardstick_seconds: medians.
        rounds: how many there were.
        tflops, yardstick_tflops: rates.
        memory, yardstick_memory: peak extra bytes.
        memory_ratio: ours over the yardstick.
        error: the exception, where measuring failed.
        commit: of the library when the row was measured; `+changes` where its files were not as committed.
    """

    name: str
    work: str
    yardstick: str
    shape: str
    target: float | None = None
    memory_target: float | None = None
    met: bool | None = None
    ratio: float | None = None
    value: float | None = None
    yardstick_value: float | None = None
    unit: str | None = None
    spread: tuple[float, float] | None = None
    seconds: float | None = None
    yardstick_seconds: float | None = None
    rounds: int = 0
    tflops: float | None = None
    yardstick_tflops: float | None = None
    memory: int | None = None
    yardstick_memory: int | None = None
    memory_ratio: float | None = None
    error: str | None = None
    commit: str | None = None

    @classmethod
    def of(cls, comparison: Comparison, times: Sequence[Sequence[float]], memory: Sequence[int] = ()) -> Row:
        """Summarise the rounds of both sides, and their peaks where they were measured."""
        ours, theirs = times
        seconds, yardstick_seconds = statistics.median(ours), statistics.median(theirs)
        ratio = seconds / yardstick_seconds
        memory_ratio = memory[0] / max(1, memory[1]) if memory else None
        checks = [
            found <= target
            for found, target in ((ratio, comparison.target), (memory_ratio, comparison.memory_target))
            if found is not None and target is not None
        ]
        flops = comparison.flops(comparison.shape) if comparison.flops else None
        return cls(
            **_named(comparison),
            met=all(checks) if checks else None,
            ratio=ratio,
            spread=_quartiles([a / b for a, b in zip(ours, theirs, strict=True)]),
            seconds=seconds,
            yardstick_seconds=yardstick_seconds,
            rounds=len(ours),
            tflops=flops / seconds / 1e12 if flops else None,
            yardstick_tflops=flops / yardstick_seconds / 1e12 if flops else None,
            memory=memory[0] if memory else None,
            yardstick_memory=memory[1] if memory else None,
            memory_ratio=memory_ratio,
        )

    @classmethod
    def of_figure(cls, figure: Figure, found: Sequence[tuple[float, float | None]]) -> Row:
        """Summarise what was read in each round."""
        values = [ours for ours, _ in found]
        value = statistics.median(values)
        return cls(
            **_named(figure),
            met=value <= figure.target,
            value=value,
            yardstick_value=found[0][1],
            unit=figure.unit,
            spread=_quartiles(values),
            rounds=len(values),
        )

    @classmethod
    def failed(cls, comparison: Comparison | Figure, error: Exception) -> Row:
        """What is left of a comparison that could not be measured."""
        wanted = comparison.target is not None or comparison.memory_target is not None
        return cls(**_named(comparison), met=False if wanted else None, error=describe_error(error))

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Row:
        """The row that a file holds."""
        spread = fields["spread"]
        return cls(**{**fields, "spread": tuple(spread) if spread else None})


@dataclass(frozen=True)
class Point:
    """One point of the curve over lengths.

    Attributes:
        line: what was measured, for people.
        seconds: median.
        memory: peak extra bytes.
        commit: as of a `Row`.
    """

    line: str
    length: int
    shape: str
    seconds: float
    memory: int
    commit: str | None


def describe_error(error: Exception) -> str:
    """The kind of an exception and the first line of its message."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def _named(comparison: Comparison | Figure) -> dict[str, Any]:
    return {
        "name": comparison.name,
        "work": comparison.work,
        "yardstick": comparison.yardstick_name,
        "shape": str(comparison.shape),
        "target": comparison.target,
        "memory_target": comparison.memory_target,
        "commit": provenance()["commit"],
    }


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


class ResultFile:
    """Rows, points and what they depend on, as one JSON file. Every change reaches the disk before it returns.

    Attributes:
        facts: see `machine.facts`.
        ceiling: TFLOP/s of one large matrix product, by dtype.
        unfinished: names of rows that were begun and not ended: a run was cut within them.
    """

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self.path = path
        self.facts = facts
        self.date = _now()
        self.ceiling: dict[str, float] = {}
        self.unfinished: dict[str, None] = {}
        self._rows: dict[str, Row] = {}
        self._points: dict[tuple[str, int], Point] = {}

    @classmethod
    def read(cls, path: Path) -> ResultFile:
        """What a run wrote.

        Raises:
            OSError: when there is no such file.
            ValueError: when it holds something else, or another schema.
        """
        content = json.loads(path.read_text())
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise ValueError(f"{path} is not a benchmark result of schema {SCHEMA}")
        file = cls(path, content["facts"])
        file.date, file.ceiling = content["date"], content["ceiling"]
        file.unfinished = dict.fromkeys(content.get("unfinished", ()))
        file._rows = {fields["name"]: Row.from_json(fields) for fields in content["rows"]}
        file._points = {(fields["line"], fields["length"]): Point(**fields) for fields in content["growth"]}
        return file

    @classmethod
    def continued(cls, path: Path, facts: dict[str, Any]) -> ResultFile:
        """The file with the rows it has, if they were measured under the same facts; else without rows."""
        try:
            file = cls.read(path)
        except (OSError, ValueError):
            return cls(path, facts)
        return file if file.facts == facts else cls(path, facts)

    @property
    def rows(self) -> list[Row]:
        """In the order in which they were first measured."""
        return list(self._rows.values())

    @property
    def points(self) -> list[Point]:
        """Of the curve over lengths, shortest first."""
        return sorted(self._points.values(), key=lambda point: point.length)

    def has(self, job: Comparison | Figure | Shape) -> bool:
        """Whether the row, or any point of the curve, is there, measured with the library as it is now and at this
        shape, and did not fail.
        """
        if not isinstance(job, Shape):
            found = {(row.shape, row.commit) for row in self.rows if row.name == job.name and row.error is None}
            return (str(job.shape), provenance()["commit"]) in found
        return (str(job), provenance()["commit"]) in {(point.shape, point.commit) for point in self.points}

    def begin(self, name: str) -> None:
        """Note what is measured now, in case that the run is cut."""
        self.unfinished[name] = None
        self.write()

    def end(self, name: str, *entries: Row | Point) -> None:
        """Put what was measured under a name that was begun."""
        del self.unfinished[name]
        self.put(*entries)

    def put(self, *entries: Row | Point) -> None:
        """Add or replace, and write the whole file."""
        for entry in entries:
            if isinstance(entry, Row):
                self._rows[entry.name] = entry
            else:
                self._points[entry.line, entry.length] = entry
        self.write()

    def write(self) -> None:
        """Write aside, then rename: whoever reads sees a whole file."""
        self.date = _now()
        content = {
            "schema": SCHEMA,
            "date": self.date,
            "facts": self.facts,
            "ceiling": self.ceiling,
            "unfinished": list(self.unfinished),
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "growth": [dataclasses.asdict(point) for point in self.points],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.path.with_name(f"{self.path.name}.tmp")
        aside.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
        aside.replace(self.path)


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
