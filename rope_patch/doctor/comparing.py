"""Comparison of the positions of two checkpoints: trainer and rollout, adapters and base, a GGUF and its source."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .diagnosis import Difference, Report, as_difference, as_numbers, diagnose, differences_of
from .sources import Source
from .words import by_type, said


@dataclass(frozen=True)
class Pair:
    """Two reports, and the differences of their positions.

    Attributes:
        trained, served: the report of each config.
        differences: differences of the second config from the first.
        lengths: the longest texts of both, if they differ.
        records: whether one config records a scheme of rope_patch that the other lacks.
    """

    trained: Report
    served: Report
    differences: tuple[Difference, ...]
    lengths: tuple[int, int] | None
    records: bool

    @property
    def agrees(self) -> bool:
        """Whether both checkpoints turn every pair alike."""
        return not self.differences and not self.records


def compare(trained: Source, served: Source, asked: Iterable[str] = ()) -> Pair:
    """Compare one checkpoint with another.

    Args:
        asked: readers for both, see `diagnose`.

    Raises:
        Unreadable: the positions of one of them cannot be read.
    """
    asked = list(asked)
    one, other = (diagnose(each, asked) for each in (trained, served))
    longest = [max(rotation.longest for rotation in report.rotations.values()) for report in (one, other)]
    return Pair(
        one,
        other,
        differences_of(one.rotations, other.rotations),
        (longest[0], longest[1]) if longest[0] != longest[1] else None,
        trained.record != served.record,
    )


def words_of_pair(pair: Pair) -> str:
    """Put the comparison into plain English."""
    lines = []
    for report in (pair.trained, pair.served):
        lines += [f"{report.path} says", *(f"  {line}" for line in by_type(report.rotations))]
        lines += [f"  note: {note}" for note in report.notes]
    if pair.lengths:
        lines.append(f"the longest texts differ: {pair.lengths[0]} and {pair.lengths[1]} tokens")
    if pair.records:
        lines.append("one of them has a scheme of rope_patch, in config.rope_patch, which the other lacks")
    if pair.differences:
        lines += [f"the second differs from the first: {said(difference)}" for difference in pair.differences]
    elif pair.agrees:
        lines.append("both state the same positions")
    return "\n".join(lines)


def as_numbers_of_pair(pair: Pair) -> dict[str, Any]:
    """Convert the comparison to JSON."""
    return {
        "schema": 1,
        "agrees": pair.agrees,
        "trained": as_numbers(pair.trained),
        "served": as_numbers(pair.served),
        "differences": [as_difference(difference) for difference in pair.differences],
        "lengths": list(pair.lengths) if pair.lengths else None,
        "records_differ": pair.records,
    }
