"""Hooks that add positions at the input of a stack or of its blocks, and tables of positions whose rows are
replaced.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer
from transformers.generation.continuous_batching import PagedAttentionCache

from rope_patch.errors import UnsupportedPositions
from rope_patch.models.absolute import lengthened
from rope_patch.models.arguments import (
    Arguments,
    by_name,
    cache_in,
    check_tokens,
    name_of_cache,
    slot_positions,
    tokens_seen,
)
from rope_patch.models.base import AbsoluteTable, AttentionLayer, Stack
from rope_patch.models.cached_keys import complete_layers
from rope_patch.mounting.parameters import LearnedWeights
from rope_patch.mounting.running_stack import link_modules, stack_of
from rope_patch.mounting.stack_positions import PASSED
from rope_patch.mounting.undo import Changes
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.slots import Tokens
from rope_patch.schemes.tools.tables import require_room


@dataclass(eq=False)
class StackEntry:
    """Pre-hook of a stack that replaces its input x_m by e(x_m, token_m, m).

    A `causal` stack may read a text in pieces, so a scheme's state is kept behind the `num_layers` layers of the cache.
    """

    scheme: Scheme
    weights: LearnedWeights
    num_layers: int
    causal: bool

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return the arguments with positions, and with vectors instead of tokens unless each block adds positions."""
        kwargs = by_name(module, args, kwargs)
        check_tokens(module, kwargs)
        ids, states = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
        if states is None and ids is None:
            return (), kwargs  # the model itself raises
        if kwargs.get("position_ids") is None:
            kwargs = {**kwargs, "position_ids": slot_positions(kwargs)}
        if self.scheme.every_block:
            return (), kwargs
        if states is None:
            states = cast(Any, module).get_input_embeddings()(ids)
        positions = kwargs["position_ids"]
        of_text = positions[0] if positions.ndim == 3 else positions  # see `PassPositions`
        tokens = Tokens(states, of_text, ids)
        if self.scheme.stateful:
            tokens = dataclasses.replace(tokens, seen=tokens_seen(kwargs))
        placed = self._advance(tokens, module, kwargs) if self.scheme.stateful else self._embed(tokens, module)
        return (), {**kwargs, "input_ids": None, "inputs_embeds": placed}

    def _embed(self, tokens: Tokens, module: nn.Module) -> torch.Tensor:
        return self.scheme.embedding(tokens, self.weights.of_stack(module))

    def _advance(self, tokens: Tokens, module: nn.Module, kwargs: dict[str, Any]) -> torch.Tensor:
        if isinstance(kwargs.get("cache"), PagedAttentionCache):
            raise UnsupportedPositions(f"{self.scheme}: a paged cache cannot keep its state after each token")
        cache, use_cache = cache_in(kwargs), kwargs.get("use_cache")
        recomputes = module.training and getattr(module, "gradient_checkpointing", False)
        if use_cache is None:
            use_cache = getattr(module.config, "use_cache", False)
        if cache is None and use_cache and self.causal and not recomputes:
            kwargs[name_of_cache(module)] = _new_cache(module)
            cache = cache_in(kwargs)
        if cache is None:
            return self._embed(tokens, module)
        history = next((layer for layer in cache.layers if isinstance(layer, StateHistory)), None)
        if history is None:
            complete_layers(cache, self.num_layers).append(history := StateHistory())
        last = history.keys[:, 0, -1] if history.get_seq_length() else None
        placed, states = self.scheme.advance(tokens, last, self.weights.of_stack(module))
        history.update(states[:, None], states[:, None, :, :0])
        return placed


def _new_cache(module: nn.Module) -> Cache:
    """Create the cache early, because the model would create it too late to hold the state; refuse a model with its own
    cache class.
    """
    here = type(module).__module__
    for kind in vars(sys.modules[here]).values():
        if isinstance(kind, type) and issubclass(kind, Cache) and kind.__module__ == here:
            raise UnsupportedPositions(f"a {kind.__name__} cannot keep a state after each token; pass use_cache=False")
    config = cast(Any, module.config)
    own = DynamicCache(config=config)
    return EncoderDecoderCache(own, DynamicCache(config=config)) if config.is_encoder_decoder else own


class StateHistory(DynamicLayer):
    """A cache layer that holds a scheme's state after each token, in the place of keys.

    So the states are reordered for beams, cropped and repeated like keys.
    """

    # otherwise a cache of static layers would count as a growing one, and its masks would be omitted
    is_compileable = True


@dataclass(eq=False)
class BlockEntry:
    """Pre-hook of the block `name` that adds positions at the input of layer `index`, the first of the `remaining`
    ones.
    """

    name: str
    scheme: Scheme
    weights: LearnedWeights
    index: int
    remaining: int

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return the arguments with positions added to the states."""
        named = by_name(module, args, kwargs)
        states, positions = named["hidden_states"], named.get(PASSED, named.get("position_ids"))
        if positions is None:
            raise UnsupportedPositions(f"{type(module).__name__} does not receive position_ids")
        tokens = Tokens(states, positions, None, self.index, self.remaining)
        placed = self.scheme.embedding(tokens, self.weights.of_stack(stack_of(module, self.name)))
        if args:  # reentrant checkpointing tracks positional tensors only
            return (placed, *args[1:]), kwargs
        return (), {**kwargs, "hidden_states": placed}


def install_entry(
    scheme: Scheme, stack: Stack, layers: Sequence[AttentionLayer], weights: dict[str, LearnedWeights], changes: Changes
) -> None:
    """Let a scheme add positions at the input of a stack or, if it needs that, of each block; `weights` name the
    scheme's learned parameters for each layer.
    """
    causal = not stack.checkpoint.bidirectional
    changes.seen_hook(stack.module, StackEntry(scheme, weights[layers[0].name], len(stack.layers), causal))
    for layer in layers if scheme.every_block else ():
        name, remaining = layer.name.rpartition(".")[0], len(stack.layers) - layer.index
        block = stack.module.get_submodule(name)
        link_modules([block], stack, changes)
        changes.seen_hook(block, BlockEntry(name, scheme, weights[layer.name], layer.index, remaining))


def install_table(scheme: Scheme, table: AbsoluteTable, changes: Changes) -> None:
    """Replace the table of positions of a stack by the rows of a scheme that fills `embedding`. Reserved rows stay; the
    configs must already be this model's own copies.

    Raises:
        InvalidField: a field does not fit the table; the model then stays unchanged.
    """
    require_room(str(scheme), lambda: [scheme.rows(table.rows.to("meta"))])
    _replace_rows(table, scheme.rows(table.rows).to(table.rows), changes)


def shorten(table: AbsoluteTable, capacity: int) -> torch.Tensor:
    """Permanently cut a saved longer table back to its checkpoint's `capacity` rows, which come first; return the saved
    rows, `(N, hidden)`.
    """
    saved = table.rows
    _replace_rows(table, saved[:capacity], Changes())
    return saved


def _replace_rows(table: AbsoluteTable, positions: torch.Tensor, changes: Changes) -> None:
    weight, limits = table.embedding.weight, list(table.limits())  # limits are found only while they fit the table
    growth = len(positions) - table.capacity
    rows = nn.Parameter(torch.cat([weight.detach()[: table.reserved], positions]), weight.requires_grad)
    changes.set(table.embedding, "weight", rows)
    changes.set(table.embedding, "num_embeddings", len(rows))
    for owner, name in table.buffers:
        changes.set(owner, name, lengthened(owner.get_buffer(name), growth))
    for holder, name, value in limits:
        changes.set(holder, name, value + growth)
