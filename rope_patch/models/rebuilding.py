"""Numbers that an attention module computed from `rope_parameters` when it was built.

Latent attention multiplies its softmax scale by the square of YaRN's temperature. Such a temperature belongs to the
checkpoint's frequencies, so a scheme that replaces these replaces it, too.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any, cast

import torch

from rope_patch.models.base import AttentionLayer
from rope_patch.models.config import SCALING, rope_entries


def rebuilt_numbers(layer: AttentionLayer, scaling: dict[str, Any]) -> dict[str, float]:
    """The numbers that the layer's attention module would have with another scaling in its config, by attribute; those
    that stay the same are left out.

    Args:
        scaling: an entry of `rope_parameters`, without what the checkpoint keeps, such as its base.
    """
    config = getattr(layer.module, "config", None)
    entries = {} if config is None else rope_entries(config)
    if layer.layer_type not in entries:
        return {}
    kept = {key: value for key, value in entries[layer.layer_type].items() if key not in SCALING}
    changed: dict[Any, Any] = {**entries, layer.layer_type: {**scaling, **kept}}
    try:
        before, after = _numbers(layer, entries), _numbers(layer, changed)
    except Exception:  # a class that needs more than its config reads no rotary parameters
        return {}
    return {name: value for name, value in after.items() if value != before.get(name)}


def _numbers(layer: AttentionLayer, entries: dict[Any, Any]) -> dict[str, float]:
    """The numbers of a new module of the layer's class, without weights."""
    module = layer.module
    config = copy.copy(cast(Any, module.config))
    vars(config)["rope_parameters"] = entries.get(None, entries)
    needed = inspect.signature(type(module)).parameters.values()
    arguments = {each.name: getattr(module, each.name) for each in needed if each.default is each.empty}
    with torch.device("meta"):
        made = type(module)(**{**arguments, "config": config})
    return {name: value for name, value in vars(made).items() if isinstance(value, float)}
