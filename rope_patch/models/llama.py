"""Read Llama-style stacks: self-attention that receives `position_embeddings` from one rotary module.

No family is known by name: `models.probe` measures how a layer rotates its dimensions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import functools
import inspect
import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import DynamicCache, DynamicLayer, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rope_patch.errors import InvalidField, UnsupportedModel
from rope_patch.models.arguments import parameters_of
from rope_patch.models.base import AttentionLayer, Heads, RotaryTables, Stack, is_causal
from rope_patch.models.config import (
    checkpoint_of_config,
    config_of_layer,
    head_dim,
    scheme_of_layer_type,
    training_length,
)
from rope_patch.models.module_state import EmptyTables, ModuleState
from rope_patch.models.passed_tables import passed_tables
from rope_patch.models.probe import (
    ChangedAfterRotation,
    Measuring,
    TurnedValues,
    follows_buffers,
    measure_fixed,
    measure_tables,
)
from rope_patch.models.record import RECORD
from rope_patch.models.rope_entries import rope_entries
from rope_patch.models.rounding import rounding_of


def recognises(module: nn.Module) -> bool:
    """Whether a model has a rotary module of Transformers, which has `inv_freq`."""
    return isinstance(module, PreTrainedModel) and any(_is_rotary(child) for child in module.children())


def read(stack: PreTrainedModel) -> Stack:
    """Read the layers and tables of a recognised stack.

    Raises:
        UnsupportedModel: a part of it is not supported; the message names the reason.
    """
    family = type(stack).__name__
    if getattr(stack.config, "alibi", False) is True:
        raise UnsupportedModel(
            f"{family} has config.alibi=True: it adds ALiBi to its scores and never uses its rotary tables, so it has "
            "no rotation that a scheme could change"
        )
    every = [module for module in stack.modules() if _is_rotary(module)]
    attention = _attention_modules(stack)
    parts = {part for _, layer in attention for part in layer.modules()}
    inside = [module for module in every if module in parts]
    modules = [module for module in every if module not in parts]
    checkpoint = checkpoint_of_config(stack.config)
    with contextlib.ExitStack() as tried:
        for module in every:
            if empty := EmptyTables(module, stack):
                tried.callback(empty.restore)
                empty.fill()
            tried.callback(ModuleState(module).restore)
        configs = (
            [stack.config] if len(modules) == 1 else [getattr(module, "config", stack.config) for module in modules]
        )
        found = itertools.chain(*map(_tables_of, modules, configs))
        rotary = tuple(dataclasses.replace(tables, copies=_copies(tables, inside)) for tables in found)
        passed, measuring, cached = passed_tables(stack, rotary), Measuring(), _layers_of_cache(stack)
        read_layers = (
            _read_layer(name, module, index, rotary, passed, stack, checkpoint.training_length, measuring, cached)
            for index, (name, module) in enumerate(attention)
        )
        layers = tuple(layer for layer in read_layers if layer is not None)
    if not layers:
        raise UnsupportedModel(
            f"{family} has no self-attention that takes `position_embeddings` through the attention interface"
        )
    if len(every) > 1:  # some may be unused
        rotary = tuple(dict.fromkeys(layer.rotary for layer in layers if layer.rotary is not None))
    widths = {layer.spec.dim for layer in layers if layer.rotates}
    checkpoint = dataclasses.replace(
        checkpoint,
        bidirectional=not all(is_causal(layer.module) for layer in layers),
        pairs=widths.pop() // 2 if len(widths) == 1 else None,
    )
    return Stack(stack, checkpoint, checkpoint.native, layers, rotary)


@functools.cache
def _names_a_window(module: str) -> bool:
    """Whether the Python module of a model's class names `sliding_window` at all: a Llama ignores its config's."""
    try:
        return "sliding_window" in inspect.getsource(sys.modules[module])
    except (OSError, TypeError, KeyError):  # a class of a notebook has no file
        return True


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
    measured = (measure_tables(RotaryTables(module, kind, entries[kind]["rope_theta"])) for kind in types)
    return tuple(_compared(tables, config) for tables in measured)


def _copies(tables: RotaryTables, inside: Iterable[nn.Module]) -> tuple[nn.Module, ...]:
    """The rotary modules inside attention layers that have the stack's tables."""
    name = tables.attribute("inv_freq")
    own = getattr(tables.module, name).cpu()
    return tuple(
        module
        for module in inside
        if type(module) is type(tables.module) and torch.equal(getattr(module, name).cpu(), own)
    )


def _compared(tables: RotaryTables, config: Any) -> RotaryTables:
    """Compare the tables with the frequencies that module and config describe, and note the result in the tables."""
    count = int(tables.inv_freq.count_nonzero())
    if 0 < count < tables.inv_freq.numel() and bool(tables.inv_freq[:count].all()):
        tables = dataclasses.replace(tables, rotating_pairs=count)
    # compared instead of trusted: some families round the rotated width differently
    at_first = getattr(tables.module, tables.attribute("original_inv_freq"), tables.inv_freq)
    try:
        declared = _declared(tables, config)
    except InvalidField:
        return dataclasses.replace(tables, as_declared=False, rounding=rounding_of(at_first, None))
    rounding = rounding_of(at_first, declared)
    as_declared = declared is None or rounding is not None or _alike(declared, at_first)
    if follows_buffers(tables):
        return dataclasses.replace(tables, as_declared=as_declared, rounding=rounding)
    fixed = measure_fixed(tables, training_length(config))
    as_declared = bool(fixed.attention_scaling == tables.attention_scaling) and as_declared
    return dataclasses.replace(tables, as_declared=as_declared, fixed=fixed, rounding=rounding)


def _declared(tables: RotaryTables, config: Any) -> torch.Tensor | None:
    """The frequencies that a config describes, `(d/2,)`; None if they are unknown, because the tables may already hold
    a scheme that the config records.
    """
    scheme = None if vars(config).get(RECORD) is not None else scheme_of_layer_type(config, tables.layer_type)
    if scheme is None:
        return None
    frequencies = scheme.resolve(checkpoint_of_config(config)).frequencies(tables.spec(training_length(config)))
    return frequencies.inv_freq.reshape(-1)  # length-dependent frequencies have a row axis


def _alike(declared: torch.Tensor, found: torch.Tensor) -> bool:
    return declared.shape == found.shape and torch.allclose(declared.to(found), found, rtol=1e-3, atol=0)


def _attention_modules(stack: nn.Module) -> list[tuple[str, nn.Module]]:
    """The innermost modules that know their layer index and read `position_embeddings`, but not those inside a module
    that calls the attention interface: they may choose the keys that it sees.
    """
    candidates = {
        name: module
        for name, module in stack.named_modules()
        if hasattr(module, "layer_idx") and "position_embeddings" in parameters_of(module)
    }
    scoring = {name for name, module in candidates.items() if not _misses_interface(module)}
    reads_tables = {cls: _reads_tables(cls) for cls in set(map(type, candidates.values()))}

    def inside(names: Iterable[str], outer: str) -> bool:
        return any(name.startswith(f"{outer}.") for name in names)

    return [
        (name, module)
        for name, module in candidates.items()
        if not inside(scoring if name in scoring else candidates, name)
        and (name in scoring or not any(name.startswith(f"{outer}.") for outer in scoring))
        and reads_tables[type(module)]
    ]


def _reads_tables(cls: type[nn.Module]) -> bool:
    """Whether a forward that takes `position_embeddings` reads them; linear and cross-attention may only accept
    them.
    """
    name = "position_embeddings"
    forwards = (inspect.unwrap(vars(each)["forward"]) for each in cls.__mro__ if "forward" in vars(each))
    forward = next((each for each in forwards if name in inspect.signature(each).parameters), None)
    loaded = (step.argval for step in dis.get_instructions(forward or cls.forward) if step.opname.startswith("LOAD"))
    return any(name == each or (isinstance(each, tuple) and name in each) for each in loaded)


def _misses_interface(module: nn.Module) -> str:
    """The reason why an attention module cannot call a registered attention function, by its code, or an empty
    string.
    """
    name = "ALL_ATTENTION_FUNCTIONS"
    forwards = [inspect.unwrap(vars(cls)["forward"]) for cls in type(module).__mro__ if "forward" in vars(cls)]
    calling = [forward for forward in forwards if name in forward.__code__.co_names]
    if not hasattr(module, "config") or not calling:
        return f"{type(module).__name__} does not call the attention interface of Transformers"
    if calling[0].__globals__.get(name) is not ALL_ATTENTION_FUNCTIONS:
        return f"{type(module).__name__} has an attention interface of its own"
    return ""


def _read_layer(
    name: str,
    module: nn.Module,
    number: int,
    rotary: tuple[RotaryTables, ...],
    passed: Mapping[nn.Module, RotaryTables | None],
    stack: PreTrainedModel,
    training_length: int,
    measuring: Measuring,
    cached: Sequence[type],
) -> AttentionLayer | None:
    """Read a layer of self-attention; None for cross-attention."""
    family = type(stack).__name__
    index = number if module.layer_idx is None else cast(int, module.layer_idx)
    config = config_of_layer(getattr(module, "config", stack.config), index)
    types = getattr(config, "layer_types", None)
    layer_type = types[index] if types else getattr(module, "layer_type", None)
    around = [stack.get_submodule(name.rsplit(".", depth)[0]) for depth in range(1, name.count(".") + 1)]
    block = around[0] if around else stack
    passed_here = [passed[outer] for outer in around if outer in passed]
    tables = passed_here[0] if passed_here else _chosen(name, module, layer_type, rotary, family, measuring)
    for part in module.modules():
        if _is_rotary(part) and tables is not None and part not in tables.copies:
            raise UnsupportedModel(
                f"{family}: a {type(part).__name__} inside {name} has other frequencies than the stack's"
            )
    keeps = _keeps_keys_apart(cached, index)
    sliding = None if keeps else _window_of(module, config, layer_type, stack)  # the prompt stays visible, however far
    layout, normed, turns_values, gets_positions = None, False, False, True
    unscored = _rotates_more_keys(module) or keeps or _reads_tables_otherwise(module)
    heads = Heads(config.num_attention_heads, *[head_dim(config)] * 2)
    try:
        if tables is None:
            heads = measuring.heads(module)
        else:
            (layout, normed, heads), passes = measuring.rotation(name, block, module, tables)
            if passes is None:
                return None
            gets_positions = passes
    except UnsupportedModel as error:
        normed, turns_values = isinstance(error, ChangedAfterRotation), isinstance(error, TurnedValues)
        unscored = unscored or (not normed and _misses_interface(module)) or str(error)
    if tables is not None and layout is not None and normed and tables.attention_scaling != 1:
        raise UnsupportedModel(
            f"{family}: the tables scale queries and keys by {tables.attention_scaling:g}, but the norm after the "
            f"rotation in {name} undoes the scale"
        )
    kind = layer_type or ("full_attention" if sliding is None else "sliding_attention")
    return AttentionLayer(
        name,
        module,
        index,
        (tables or rotary[0]).spec(training_length),
        layout,
        heads,
        tables,
        sliding,
        kind=kind,
        gets_positions=gets_positions,
        normed=normed,
        turns_values=turns_values,
        unscored=unscored,
    )


def _chosen(
    name: str,
    module: nn.Module,
    layer_type: str | None,
    rotary: tuple[RotaryTables, ...],
    family: str,
    measuring: Measuring,
) -> RotaryTables:
    """The tables by which a layer rotates that no module around it was seen to pass any."""
    if (count := len({each.module for each in rotary})) > 1:
        raise UnsupportedModel(f"{family} has {count} rotary modules; it does not declare which one {name} uses")
    declared = next((tables for tables in rotary if tables.layer_type in (None, layer_type)), None)
    if (chosen := declared or measuring.choice(module, rotary)) is None:
        raise UnsupportedModel(f"{family}: no rotary tables for {name} of layer type {layer_type!r}")
    return chosen


def _window_of(module: nn.Module, config: Any, layer_type: str | None, stack: nn.Module) -> int | None:
    """The number of tokens that a layer sees, or at which its chunks end; None for all of them."""
    window = getattr(module, "sliding_window", None)
    if layer_type is not None and "sliding" in layer_type:
        return window or getattr(config, "sliding_window", None)
    if layer_type == "full_attention":
        return None
    if layer_type == "chunked_attention":  # distances stay below the chunk size
        return getattr(config, "attention_chunk_size", None)
    if window is not None:
        return window
    # Mistral-like: only the config has the window, for every layer
    for_all = getattr(config, "use_sliding_window", True) and not getattr(config, "layer_types", None)
    named = for_all and _names_a_window(type(stack).__module__)
    return getattr(config, "sliding_window", None) if named else None


def _layers_of_cache(stack: PreTrainedModel) -> Sequence[type]:
    """The classes of the layers of a model's cache; empty without a cache."""
    with contextlib.suppress(Exception):  # a config without a cache
        return tuple(map(type, DynamicCache(config=stack.config).layers))
    return ()


def _keeps_keys_apart(cached: Sequence[type], index: int) -> str:
    """The reason why a layer's cache does not give each key one slot, as Transformers' own caches do, or an empty
    string.
    """
    own = cached[index] if index < len(cached) else DynamicLayer
    place = getattr(own, "update", DynamicLayer.update).__module__
    return "" if place == DynamicLayer.__module__ else f"{own.__name__} keeps keys in a form of its own"


def _rotates_more_keys(module: nn.Module) -> str:
    """The part of an attention module that rotates keys which no block passes to it, in words; empty without such a
    part.
    """
    parts = (part for part in module.modules() if any(map(_is_rotary, part.children())))
    return next((f"{type(part).__name__} inside it rotates keys of its own" for part in parts), "")


def _reads_tables_otherwise(module: nn.Module) -> str:
    """The reason why an attention module needs its tables for more than its own queries and keys, or an empty
    string.
    """
    if getattr(module, "is_kv_shared_layer", False):
        return f"{type(module).__name__} reads the keys of another layer"
    # the last layer of each kind stores its keys, even if no layer of the stack reads them: a drafting model may
    config = getattr(module, "config", None)
    modes = getattr(config, "kv_sharing_modes", None)  # since Transformers 5.23
    shared = getattr(config, "num_kv_shared_layers", 1) if modes is None else any("reuse" in (m or "") for m in modes)
    if getattr(module, "store_full_length_kv", False) and shared:
        return "other layers read its keys"
    for inner in module.modules():
        if inner is not module and "position_embeddings" in parameters_of(inner):
            return f"{type(inner).__name__} inside it reads the rotary tables as well"
    return ""
