"""The positions that a stack passes to its layers, for schemes that use positions.

Positions on several axes (mRoPE): models of images and text position an image patch by time, row and column. Text
tokens have equal positions on all axes, and their rotation is the ordinary one. A scheme in the model's own tables
never reads positions, so it is exact on images, too. All other schemes position a token on one axis.

Source: Qwen2-VL, 2409.12191, section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import Cache

from rope_patch.errors import UnsupportedPositions
from rope_patch.models.arguments import Arguments, by_name, counted_positions, tokens_of
from rope_patch.models.base import Stack
from rope_patch.models.passed_tables import takes_text_axis
from rope_patch.mounting.undo import Changes
from rope_patch.schemes.base import Scheme

PASSED = "rope_patch_positions"
"""The argument with positions for attention that does not receive them from its block."""


@dataclass(eq=False)
class OneAxis:
    """The first pre-hook of a stack that reads positions on `axes` axes. It prepends the text positions as an
    additional axis, `(1 + axes, batch, length)`, which the stack passes to its layers. If the stack does not know this
    axis, its layers receive them as another argument.

    Attributes:
        in_front: whether the stack knows the axis.
        counts: whether the scheme only counts tokens and leaves the rotation to the model, like log-n.
        enters: whether positions are added at the input, where they are counted without pads.
    """

    scheme: Scheme
    axes: int
    in_front: bool
    counts: bool
    enters: bool

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """The arguments with text positions, `(batch, length)`, in front.

        Raises:
            UnsupportedPositions: a token has different positions on the axes.
        """
        kwargs = by_name(module, args, kwargs)
        tokens = tokens_of(kwargs)
        if tokens is None:
            return None  # the model itself raises
        given = kwargs.get("position_ids")
        if given is None:
            given = _tokens_before(kwargs, tokens) if self.enters else _slots(kwargs, tokens)
        if given.ndim == 2:
            given = given[None].expand(1 + self.axes, -1, -1)
        has_text = given.shape[0] == 1 + self.axes
        on_axes = (given[1:] if has_text else given).expand(self.axes, -1, -1)
        if not self.counts:
            text = self._only(on_axes, module)
        else:
            text = given[0] if has_text else _tokens_before(kwargs, tokens)
        if not self.in_front:
            return (), {**kwargs, PASSED: text}
        return (), {**kwargs, "position_ids": torch.cat([text.expand(1, *on_axes.shape[1:]), on_axes])}

    def _only(self, on_axes: torch.Tensor, module: nn.Module) -> torch.Tensor:
        """The positions on which all axes agree; a compiled graph checks this when it runs."""
        if on_axes.stride(0) == 0:
            return on_axes[0]
        agree = (on_axes == on_axes[0]).all()
        reason = (
            f"{type(module).__name__}: position_ids of shape {tuple(on_axes.shape)} differ between axes (mRoPE, for "
            f"images), but {self.scheme} needs one position per token; with images you can use schemes of static "
            "frequencies (pi, ntk, yarn) and query scales (logn)"
        )
        if torch.compiler.is_compiling():
            torch._assert_async(agree, f"rope_patch: {reason}")
        elif not agree:
            raise UnsupportedPositions(reason)
        return on_axes[0]


def _slots(kwargs: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """Positions as such stacks count them, pads included, `(batch, length)`."""
    cache = kwargs.get("past_key_values")
    start = cache.get_seq_length() if isinstance(cache, Cache) else 0
    return (torch.arange(tokens.shape[1], device=tokens.device) + start).expand(tokens.shape[:2])


def _tokens_before(kwargs: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """Number of tokens, without pads, before each one, `(batch, length)`."""
    return cast(torch.Tensor, counted_positions(kwargs)).clamp(min=0).expand(tokens.shape[:2])


@dataclass(eq=False)
class PassPositions:
    """Pre-hook of a stack whose blocks do not pass positions to their attention (Llama 4), or receive none (Zaya), or
    those of all axes (GLM-4.5V).

    Attributes:
        enters: see `OneAxis`.
    """

    enters: bool

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """The arguments with positions under a name that blocks pass through."""
        kwargs = by_name(module, args, kwargs)
        if (tokens := tokens_of(kwargs)) is None or PASSED in kwargs:
            return None
        given = kwargs.get("position_ids")
        if given is None:
            given = _tokens_before(kwargs, tokens) if self.enters else _slots(kwargs, tokens)[:1]
        return (), {**kwargs, PASSED: given[0] if given.ndim == 3 else given}


def pass_positions(scheme: Scheme, stack: Stack, counts: bool, enters: bool, changes: Changes) -> None:
    """Hook a stack whose layers would not receive positions in the form that a scheme reads; flags as in `OneAxis`."""
    rotary = max(stack.rotary, key=lambda tables: tables.axes, default=None)
    axes = 1 if rotary is None else rotary.axes
    if rotary is not None and axes > 1:
        in_front = takes_text_axis(stack.module, rotary)
        changes.hook(stack.module, OneAxis(scheme, axes, in_front, counts, enters))
    layers = (*stack.layers, *stack.others)
    # blocks of other kinds may not accept another argument
    if not all(layer.gets_positions for layer in layers) or (
        axes > 1 and len(layers) == stack.config.num_hidden_layers
    ):
        changes.hook(stack.module, PassPositions(enters))
