"""Read Llama-style stacks: self-attention that receives `position_embeddings` from one rotary module.

No family is known by name: `models.probe` measures how a layer rotates its dimensions.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from rope_patch.errors import InvalidField, UnsupportedModel
from rope_patch.models.base import AttentionLayer, RotaryTables, Stack
from rope_patch.models.config import (
    checkpoint_of_config,
    rope_entries,
    scheme_of_config,
    scheme_of_layer_type,
    training_length,
)
from rope_patch.models.meta import filled
from rope_patch.models.probe import Measuring, measure_tables
from rope_patch.models.state import unchanged
from rope_patch.schemes.base import Scheme


def recognises(module: nn.Module) -> bool:
    """Whether a model has a rotary module of Transformers, one with `inv_freq`."""
    return isinstance(module, PreTrainedModel) and any(_is_rotary(child) for child in module.children())


def read(stack: PreTrainedModel) -> Stack:
    """The layers and tables of a recognised stack.

    Raises:
        UnsupportedModel: a part of it is not supported; the message names the reason.
    """
    family = type(stack).__name__
    modules = [module for module in stack.modules() if _is_rotary(module)]
    if len(modules) > 1:
        raise UnsupportedModel(
            f"{family} has {len(modules)} rotary modules; it does not declare which layer uses which"
        )
    checkpoint = checkpoint_of_config(stack.config)
    with filled(modules[0], stack), unchanged(modules[0]):
        rotary = _tables_of(modules[0], stack.config)
        measuring = Measuring()
        layers = tuple(
            _read_layer(name, module, rotary, stack, checkpoint.training_length, measuring)
            for name, module in _attention_modules(stack)
        )
    if not layers:
        raise UnsupportedModel(
            f"{family} has no self-attention that takes `position_embeddings` through the attention interface"
        )
    checkpoint = dataclasses.replace(checkpoint, bidirectional=not all(layer.is_causal for layer in layers))
    return Stack(stack, checkpoint, _native(stack.config), layers, rotary)


def _native(config: Any) -> Scheme | None:
    try:
        return scheme_of_config(config)
    except UnsupportedModel:
        return None


def _is_rotary(module: nn.Module) -> bool:
    return any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))


def _tables_of(module: nn.Module, config: Any) -> tuple[RotaryTables, ...]:
    buffers = [name for name, _ in module.named_buffers(recurse=False)]
    types: list[str | None] = [None]
    if "inv_freq" not in buffers:
        types = [name.removesuffix("_inv_freq") for name in buffers if not name.endswith("original_inv_freq")]
    entries = rope_entries(config)
    for layer_type in types:
        if not entries.get(layer_type, {}).get("rope_theta"):
            raise UnsupportedModel(f"{type(config).__name__} has no `rope_theta` for layer type {layer_type!r}")
    found = (measure_tables(RotaryTables(module, kind, entries[kind]["rope_theta"])) for kind in types)
    return tuple(dataclasses.replace(tables, as_declared=_as_declared(tables, config)) for tables in found)


def _as_declared(tables: RotaryTables, config: Any) -> bool:
    """Compare frequencies instead of trusting the config: some families round the rotated width differently."""
    if getattr(config, "rope_patch", None) is not None:
        return True  # the tables may already be those of the scheme that the config records
    try:
        scheme = scheme_of_layer_type(config, tables.layer_type)
    except InvalidField:
        return False
    if scheme is None:
        return True  # the expected frequencies are unknown
    at_first = getattr(tables.module, tables.attribute("original_inv_freq"), tables.inv_freq)
    declared = scheme.resolve(checkpoint_of_config(config)).frequencies(tables.spec(training_length(config))).inv_freq
    declared = declared.to(at_first).reshape(-1)  # length-dependent frequencies have a row axis
    return declared.shape == at_first.shape and torch.allclose(declared, at_first, rtol=1e-3, atol=0)


def _attention_modules(stack: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The innermost modules that know their layer index and take `position_embeddings`."""

    def qualifies(module: nn.Module) -> bool:
        return (
            hasattr(module, "layer_idx")
            and hasattr(module, "config")
            and "position_embeddings" in inspect.signature(module.forward).parameters
        )

    for name, module in stack.named_modules():
        inner = (child for child in module.modules() if child is not module)
        if qualifies(module) and not any(map(qualifies, inner)):
            yield name, module


def _read_layer(
    name: str,
    module: nn.Module,
    rotary: tuple[RotaryTables, ...],
    stack: PreTrainedModel,
    training_length: int,
    measuring: Measuring,
) -> AttentionLayer:
    if getattr(module, "is_kv_shared_layer", False):
        raise UnsupportedModel(f"{type(stack).__name__}: {name} shares the keys of another layer")
    layer_type = _layer_type(module)
    tables = next((t for t in rotary if t.layer_type in (None, layer_type)), None)
    if tables is None:
        raise UnsupportedModel(f"{type(stack).__name__}: no rotary tables for {name} of layer type {layer_type!r}")
    sliding = getattr(module, "sliding_window", None)
    if layer_type is not None and "sliding" in layer_type:
        sliding = sliding or getattr(module.config, "sliding_window", None)
    elif layer_type == "full_attention":
        sliding = None
    elif layer_type == "chunked_attention":  # distances stay below the chunk size
        sliding = getattr(module.config, "attention_chunk_size", None)
    elif sliding is None:
        # Mistral-like: only the config has the window, for every layer
        sliding = getattr(module.config, "sliding_window", None) if _window_for_all(module) else None
    block = stack.get_submodule(name.rpartition(".")[0])
    (layout, normed, heads), gets_positions = measuring.turning(name, block, module, tables)
    if normed and tables.attention_scaling != 1:
        raise UnsupportedModel(
            f"{type(stack).__name__}: the tables scale queries and keys by {tables.attention_scaling:g}, but the norm "
            f"after the rotation in {name} undoes the scale"
        )
    spec = tables.spec(training_length)
    kind = layer_type or ("full_attention" if sliding is None else "sliding_attention")
    index = cast(int, module.layer_idx)
    return AttentionLayer(
        name,
        module,
        index,
        spec,
        layout,
        heads,
        tables,
        sliding,
        kind=kind,
        gets_positions=gets_positions,
        normed=normed,
    )


def _layer_type(module: nn.Module) -> str | None:
    types = getattr(module.config, "layer_types", None)
    return types[module.layer_idx] if types else getattr(module, "layer_type", None)


def _window_for_all(module: nn.Module) -> bool:
    return bool(getattr(module.config, "use_sliding_window", True)) and not getattr(module.config, "layer_types", None)
