"""Vectors to which a reader of rotary positions can be held: `python -m tools.vectors` writes vectors/*.json.

A file has a config, and for each of some texts what its positions are: `inv_freq`, the factor on cos and sin, and both
tables with that factor, `(positions, d/2)`. The formulas are those of `rope_patch.doctor`, in float64;
`tests/doctor/vector_definitions.py` has them once more, from the papers, and `vectors/check_vectors.py` holds a reader
to the files. What changed is in vectors/CHANGELOG.md: with a number, raise `VERSION`.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rope_patch.doctor import Rotation, read_source, rotations_of
from tools.vector_cases import Case, Text
from tools.vector_configs import CASES

FOLDER = Path(__file__).parents[1] / "vectors"
VERSION = "2.0.0"
FORMAT = 2
DIGITS = 12
"""Digits of cos and sin behind the point: the angle of a float64 at a million is exact to ten."""


def rotation_of(case: Case) -> Rotation:
    """What `rope_patch.doctor` reads from the config of a vector."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(case.config), encoding="utf-8")
        return rotations_of(read_source(path)).rotations[case.layer_type]


def row_of(rotation: Rotation, text: Text) -> dict[str, Any]:
    """What a vector has of one text: positions by axis if there are several."""
    text = text * 3 if rotation.sections and len(text) == 1 else text
    length = max(max(axis) for axis in text) + 1
    inv_freq, factor = rotation.frequencies(length), rotation.temperature()
    turned = [text[axis] for axis in rotation.axes()]
    angles = [
        [positions[token] * theta for positions, theta in zip(turned, inv_freq, strict=True)]
        for token in range(len(text[0]))
    ]
    return {
        "length": length,
        "positions": [list(axis) for axis in text] if len(text) > 1 else list(text[0]),
        "inv_freq": inv_freq,
        "attention_factor": factor,
        "cos": [[round(factor * math.cos(angle), DIGITS) for angle in token] for token in angles],
        "sin": [[round(factor * math.sin(angle), DIGITS) for angle in token] for token in angles],
    }


def vector_of(case: Case) -> dict[str, Any]:
    """The content of a vector's file."""
    rotation = rotation_of(case)
    return {
        "version": FORMAT,
        "schema": "schema.json",
        "config": case.config,
        "layer_type": case.layer_type,
        "known": dict(case.known),
        **({"axes": rotation.axes()} if rotation.sections else {}),
        "rows": [row_of(rotation, text) for text in case.texts],
    }


def vectors() -> dict[str, dict[str, Any]]:
    """All vectors by the name of their file."""
    return {name: vector_of(case) for name, case in CASES.items()}


def index() -> dict[str, Any]:
    """The list of the files in the folder, with the hash of each."""
    return {"version": VERSION, "format": FORMAT, "schema": "schema.json", "vectors": list(_entries())}


def _entries() -> Iterator[dict[str, Any]]:
    for name, case in CASES.items():
        content = (FOLDER / f"{name}.json").read_bytes()
        yield {
            "name": name,
            "file": f"{name}.json",
            "says": case.says,
            "traps": list(case.traps),
            "known": dict(case.known),
            "sha256": hashlib.sha256(content).hexdigest(),
        }


def main() -> None:
    """Write all files."""
    for name, vector in vectors().items():
        (FOLDER / f"{name}.json").write_text(json.dumps(vector) + "\n", encoding="utf-8")
    (FOLDER / "index.json").write_text(json.dumps(index(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
