"""Facts that a config states about positions."""

from __future__ import annotations

from typing import Any

from rope_patch.errors import UnsupportedModel


def rope_entries(config: Any) -> dict[str | None, dict[str, Any]]:
    """The entries of `config.rope_parameters` by layer type; the key None where one entry serves all layers.

    Raises:
        UnsupportedModel: when the config says nothing of rotary embeddings.
    """
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        raise UnsupportedModel(f"{type(config).__name__} has no `rope_parameters`: it is not of a rotary checkpoint")
    if "rope_theta" in parameters:
        return {None: parameters}
    return {layer_type: entry for layer_type, entry in parameters.items() if isinstance(entry, dict)}


def training_length(config: Any) -> int:
    """L in tokens: `original_max_position_embeddings` where the checkpoint was extended, else its maximum.

    Raises:
        UnsupportedModel: when the config says neither.
    """
    for entry in rope_entries(config).values():
        if entry.get("original_max_position_embeddings"):
            return int(entry["original_max_position_embeddings"])
    length = getattr(config, "max_position_embeddings", None)
    if not length:
        raise UnsupportedModel(f"{type(config).__name__} says no `max_position_embeddings`: its length is unknown")
    return int(length)
