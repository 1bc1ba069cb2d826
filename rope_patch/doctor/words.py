"""A report in plain English."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .diagnosis import Difference, Reading, Report
from .rotation import NEED_L, Rotation

_WIDE = 26
"""Width of the column with names of readers, unless one is longer."""


def words_of(report: Report) -> str:
    """Write a report: the positions that the config states, then a paragraph for each reader."""
    wide = max([_WIDE, *(len(_name(reading)) for reading in report.readings)])
    return "\n".join([*_config(report), *(line for reading in report.readings for line in _reader(reading, wide))])


def stated(rotation: Rotation) -> str:
    """Describe a rotation in one line."""
    said = [rotation.rope_type, f"theta = {rotation.theta:.10g}"]
    if rotation.rope_type != "default" and rotation.factor != 1:
        said.append(f"factor = {rotation.factor:g}")
    if rotation.rope_type in NEED_L:
        said.append(f"L = {rotation.trained}")
    if rotation.temperature() != 1:
        said.append(f"cos and sin times {rotation.temperature():.4g}")
    if rotation.width != rotation.head_dim or rotation.partial != 1:
        turning = int(rotation.head_dim * rotation.partial)
        said.append(f"{turning} of {rotation.head_dim} dimensions")
    if rotation.sections:
        said.append(f"sections {list(rotation.sections)}" + ", interleaved" * rotation.interleaved)
    return ", ".join(said)


def by_type(rotations: Mapping[str, Rotation]) -> Iterator[str]:
    """Describe the rotation of each layer type, one line each."""
    for kind, rotation in rotations.items():
        yield f"{kind}: {stated(rotation)}" if kind else stated(rotation)


def _config(report: Report) -> Iterator[str]:
    yield f"{report.path} says"
    longest = max((rotation.longest for rotation in report.rotations.values()), default=0)
    for line in by_type(report.rotations):
        yield f"  {line}; texts up to {longest} tokens" if longest else f"  {line}"
    for note in report.notes:
        yield f"  note: {note}"


def _name(reading: Reading) -> str:
    return f"{reading.reader} {reading.version}"


def _reader(reading: Reading, wide: int) -> Iterator[str]:
    known = "" if reading.verdict == "unknown" else f" ({reading.known})"
    yield f"{_name(reading):<{wide}} {_VERDICTS[reading.verdict]}{known}"
    for difference in reading.differences:
        yield f"{'':<{wide}} {said(difference)}"
    for reason in reading.reasons:
        yield f"{'':<{wide}} why: {reason}"
    for cure in reading.cures:
        yield f"{'':<{wide}} cure: {cure}"
    if reading.writes:
        yield f"{'':<{wide}} it writes {reading.writes}"


_VERDICTS = {
    "agrees": "agrees",
    "partly": "agrees for some texts",
    "differs": "differs",
    "refuses": "does not load it",
    "unknown": "is not known",
}


def said(difference: Difference) -> str:
    """Describe a difference in one line."""
    where = f"{difference.layer_type} " if difference.layer_type else ""
    angles = ", ".join(f"{angle:.3g} at {length}" for length, angle in difference.angles.items() if angle)
    largest = f"; largest angle in radians: {angles}" if angles else ""
    return f"{where}from position {difference.first} on it {difference.words}{largest}"
