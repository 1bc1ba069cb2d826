"""Odd values that the newest Transformers computes with, and that other programs may refuse or read differently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .entries import ORIGINAL
from .rotation import Rotation
from .sources import Source


def notes_on_odd_values(source: Source, rotations: Mapping[str, Rotation]) -> tuple[str, ...]:
    """Write a sentence for each odd value, once."""
    said = [note for rotation in rotations.values() for note in _of_numbers(rotation)]
    said += [
        f"{ORIGINAL}={entry[ORIGINAL]} is a float, not an integer"
        for entry in _objects(source.fields)
        if isinstance(entry.get(ORIGINAL), float)
    ]
    return tuple(dict.fromkeys(said))


def _of_numbers(rotation: Rotation) -> Iterator[str]:
    if rotation.rope_type == "yarn" and rotation.beta_fast < rotation.beta_slow:
        yield f"beta_fast={rotation.beta_fast:g} is below beta_slow={rotation.beta_slow:g}: the ramp runs backwards"
    if rotation.rope_type not in ("default", "longrope") and rotation.factor < 1:
        yield f"factor={rotation.factor:g} is below 1: it makes the rotation faster"
    if rotation.attention_factor == 0:
        yield "attention_factor=0 makes cos and sin 0, so every score is 0"


def _objects(fields: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A config and the objects inside it."""
    yield fields
    for value in fields.values():
        if isinstance(value, dict):
            yield from _objects(value)
