"""Reading a model: its attention layers, their rotary tables and what the checkpoint says of its training.

Nothing here knows a family by name. A layer is a self-attention module of the Transformers attention interface that
takes `position_embeddings`; how it turns its dimensions is measured by `models.probe`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from rope_patch.errors import UnsupportedModel
from rope_patch.models.config import checkpoint_of_config, rope_entries, scheme_of_config
from rope_patch.models.probe import measure_layout
from rope_patch.rotary import RotaryLayout
from rope_patch.schemes.base import Checkpoint, Scheme
from rope_patch.typing import RotarySpec


@dataclass(frozen=True)
class RotaryTables:
    """One set of rotary tables of a model: its rotary module, or one layer type's share of it.

    Attributes:
        module: holds `inv_freq` and `attention_scaling`, with the layer type in front where there are several sets.
        layer_type: such as `full_attention`; None where all layers share one set.
        base: `rope_theta` of the checkpoint, as it was read before any scheme was named in the config.
    """

    module: nn.Module
    layer_type: str | None
    base: float

    def attribute(self, name: str) -> str:
        """The name under which the module keeps `name` for this set."""
        return name if self.layer_type is None else f"{self.layer_type}_{name}"

    @property
    def inv_freq(self) -> torch.Tensor:
        """The model's own frequencies, `(d/2,)`."""
        return getattr(self.module, self.attribute("inv_freq"))

    @property
    def attention_scaling(self) -> float:
        """The model's own factor on cos and sin."""
        return getattr(self.module, self.attribute("attention_scaling"))

    def tables(self, position_ids: torch.Tensor, like: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin as the model itself computes them, `(batch, length, width)`.

        Args:
            position_ids: `(batch, length)`, also fractional.
            like: has the wanted dtype and device; default float32 where the frequencies are.
        """
        if like is None:
            like = torch.zeros((), dtype=torch.float32, device=self.inv_freq.device)
        extra = () if self.layer_type is None else (self.layer_type,)
        return self.module(like, position_ids.to(like.device), *extra)


@dataclass(frozen=True)
class AttentionLayer:
    """One self-attention module.

    Attributes:
        name: path inside the model.
        index: `layer_idx`, the place in the cache.
        sliding_window: its window in tokens; None where it attends to everything before.
        layout: how it pairs dimensions; None where it does not rotate at all.
    """

    name: str
    module: nn.Module
    index: int
    rotary: RotaryTables
    layout: RotaryLayout | None
    sliding_window: int | None


@dataclass(frozen=True)
class Stack:
    """A causal stack of layers with what its config says.

    Attributes:
        module: the `PreTrainedModel` that owns the rotary module.
        layers: its self-attention layers in order.
        rotary: every set of rotary tables.
        checkpoint: what a scheme's defaults are read from.
        native: the scheme of the checkpoint itself; None where no scheme here stands for it.
    """

    module: PreTrainedModel
    layers: tuple[AttentionLayer, ...]
    rotary: tuple[RotaryTables, ...]
    checkpoint: Checkpoint
    native: Scheme | None

    @property
    def config(self) -> Any:
        """The config of the stack, as it is now."""
        return self.module.config

    @property
    def training_length(self) -> int:
        """L in tokens."""
        return self.checkpoint.training_length

    def rotary_spec(self, rotary: RotaryTables) -> RotarySpec:
        """What a frequency scheme may know of one set of tables."""
        return RotarySpec(2 * rotary.inv_freq.shape[-1], rotary.base, self.training_length)


def read_stack(model: nn.Module) -> Stack:
    """Find the one stack of a model that schemes can be mounted on.

    Raises:
        UnsupportedModel: with the reason, when there is none, more than one, or one with a part that is not understood.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModel(f"{model!r} is a {type(model).__name__}, not a loaded model")
    candidates = [
        module
        for module in model.modules()
        if isinstance(module, PreTrainedModel) and any(_is_rotary(child) for child in module.children())
    ]
    if not candidates:
        raise UnsupportedModel(
            f"{type(model).__name__} has no stack with a rotary module of Transformers (a child with `inv_freq`); "
            "Llama-style decoders have one"
        )
    if len(candidates) > 1:
        names = ", ".join(type(module).__name__ for module in candidates)
        raise UnsupportedModel(f"{type(model).__name__} has several rotary stacks ({names}); patch one of them itself")
    return _read(candidates[0])


def _read(stack: PreTrainedModel) -> Stack:
    family = type(stack).__name__
    modules = [module for module in stack.modules() if _is_rotary(module)]
    if len(modules) > 1:
        raise UnsupportedModel(f"{family} has {len(modules)} rotary modules; which layer uses which is not declared")
    rotary = _tables_of(modules[0], stack.config)
    layers = tuple(_read_layer(name, module, rotary, stack) for name, module in _attention_modules(stack))
    if not layers:
        raise UnsupportedModel(
            f"{family} has no self-attention that takes `position_embeddings` through the attention interface"
        )
    return Stack(stack, layers, rotary, checkpoint_of_config(stack.config), _native(stack.config))


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
            raise UnsupportedModel(f"{type(config).__name__} says no `rope_theta` for layer type {layer_type!r}")
    return tuple(RotaryTables(module, layer_type, entries[layer_type]["rope_theta"]) for layer_type in types)


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
    name: str, module: nn.Module, rotary: tuple[RotaryTables, ...], stack: PreTrainedModel
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
    elif sliding is None:
        # Mistral-like: the window stands in the config alone and holds for every layer
        sliding = getattr(module.config, "sliding_window", None) if _window_for_all(module) else None
    layout = measure_layout(name, module, tables)
    return AttentionLayer(name, module, cast(int, module.layer_idx), tables, layout, sliding)


def _layer_type(module: nn.Module) -> str | None:
    types = getattr(module.config, "layer_types", None)
    return types[module.layer_idx] if types else getattr(module, "layer_type", None)


def _window_for_all(module: nn.Module) -> bool:
    return bool(getattr(module.config, "use_sliding_window", True)) and not getattr(module.config, "layer_types", None)
