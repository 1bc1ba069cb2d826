"""The fields that state positions in a config, in the spelling of Transformers 5 and of older versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rope_patch.models.record import RECORD
from rope_patch.models.rope_parameters import entry_of

POSITIONAL = (RECORD, "rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings")
"""Keys of config.json that are rewritten or omitted."""


def new_words(before: Mapping[str, Any], parameters: dict[str, Any], trained: int, length: int) -> dict[str, Any]:
    """A config with other positions, in the spelling of Transformers 5.

    Args:
        before: the fields of the text model.
        parameters: the `rope_parameters`.
        trained: L in tokens, for a type that needs it and whose parameters lack it.
        length: the longest context to serve, in tokens.
    """
    others = {key: value for key, value in before.items() if key not in POSITIONAL}
    written = {**others, "rope_parameters": parameters, "max_position_embeddings": length}
    if (entry := entry_of(parameters))["rope_type"] in ("llama3", "longrope"):
        # llama.cpp's converter reads it here, not in the entry
        written["original_max_position_embeddings"] = entry.get("original_max_position_embeddings", trained)
    return written


def older_words(parameters: dict[str, Any]) -> dict[str, Any]:
    """Fields for Transformers before 5 and similar programs: `rope_theta` at the top, `type` and `rope_type` in
    `rope_scaling`. Empty for parameters by layer type.
    """
    if "rope_type" not in parameters:
        return {}
    names = ("rope_theta", "partial_rotary_factor")
    apart: dict[str, Any] = {name: parameters[name] for name in names if name in parameters}
    twice = {"partial_rotary_factor"} if parameters["rope_type"] == "proportional" else set()  # mlx-lm reads it there
    scaling = {key: value for key, value in parameters.items() if key not in apart.keys() - twice}
    named = {"type": parameters["rope_type"], **scaling}
    return {**apart, "rope_scaling": None if parameters["rope_type"] == "default" else named}
