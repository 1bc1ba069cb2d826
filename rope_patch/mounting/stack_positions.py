"""The positions that a stack passes to its layers, for schemes that use positions, also on several axes (mRoPE).

Source: Qwen2-VL, 2409.12191, section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rope_patch.errors import UnsupportedPositions
from rope_patch.graphs import require
from rope_patch.models.arguments import Arguments, by_name, counted_positions, slot_positions, tokens_of
from rope_patch.models.base import Stack
from rope_patch.models.passed_tables import takes_text_axis
from rope_patch.mounting.undo import Changes
from rope_patch.schemes.base import Scheme

PASSED = "rope_patch_positions"  # the argument with positions for attention that does not receive them from its block


@dataclass(eq=False)
class CountTokens:
    """First pre-hook of a stack: if a mask shows pads before tokens and no positions were passed, it passes positions
    that count tokens.

    Without positions Transformers counts slots, pads included, except in `generate`. A rotation gives the same scores
    either way, unless there are pads between tokens, or `generate` continues. Everything else that depends on a
    position or a length differs.

    Attributes:
        first: position of the first token, and of the pads before it; None if tokens count from 0 and pads before them
            get negative positions, which keeps bidirectional rows fast if only distances are read.
    """

    first: int | None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Return the arguments with positions, `(batch, length)`."""
        kwargs = by_name(module, args, kwargs)
        positions = counted_positions(kwargs) if kwargs.get("position_ids") is None else None
        if positions is None:
            return None
        if self.first is not None:
            positions = positions.clamp(min=0) + self.first
        return (), {**kwargs, "position_ids": positions}


def set_aside(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """Last pre-hook of a stack that takes no positions and counts slots itself, such as Dia's encoder: it renames the
    positions of other hooks, because the stack passes its own to its layers, beside all that it was given.
    """
    positions = kwargs.get("position_ids")
    if positions is None:
        return None
    others = {name: value for name, value in kwargs.items() if name != "position_ids"}
    return args, {**others, PASSED: positions}


@dataclass(eq=False)
class PassPositions:
    """Pre-hook of a stack that passes on the positions of a text, one for each token, to layers that would not receive
    them.

    A stack that reads positions on several axes gets the text's positions in front, as an additional axis, `(1 + axes,
    batch, length)`, and passes this axis to its layers. If the stack does not know this axis, or if blocks pass their
    attention no positions (Llama 4, Zaya) or the positions of all axes (GLM-4.5V), the layers receive the text's
    positions as another argument.

    Attributes:
        in_front: whether a stack of several axes knows the axis of the text.
        counts: whether the scheme only counts tokens and leaves the rotation to the model, like log-n.
    """

    scheme: Scheme
    axes: int
    in_front: bool
    as_argument: bool
    counts: bool

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Return the arguments with the positions of the text, `(batch, length)`.

        Raises:
            UnsupportedPositions: a token has different positions on the axes.
        """
        kwargs = by_name(module, args, kwargs)
        tokens = tokens_of(kwargs)
        if tokens is None or (self.axes == 1 and PASSED in kwargs):
            return None  # without tokens the model itself raises
        position_ids = kwargs.get("position_ids")
        if position_ids is None:  # such stacks count by slot
            slots = slot_positions(kwargs)
            position_ids = slots if self.axes == 1 else slots.expand(len(tokens), -1)
        if self.axes == 1:
            return (), {**kwargs, PASSED: position_ids[0] if position_ids.ndim == 3 else position_ids}
        text, on_axes = self._text_positions(position_ids, kwargs, tokens, module)
        if self.in_front:
            kwargs = {**kwargs, "position_ids": torch.cat([text.expand(1, *on_axes.shape[1:]), on_axes])}
        return (), {**kwargs, PASSED: text} if self.as_argument else kwargs

    def _text_positions(
        self, position_ids: torch.Tensor, kwargs: dict[str, Any], tokens: torch.Tensor, module: nn.Module
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions of the text, `(batch, length)`, and on the axes of the model, `(axes, batch, length)`."""
        if position_ids.ndim == 2:
            position_ids = position_ids[None].expand(1 + self.axes, -1, -1)
        has_text = position_ids.shape[0] == 1 + self.axes
        on_axes = (position_ids[1:] if has_text else position_ids).expand(self.axes, -1, -1)
        if not self.counts:
            return self._common_axis(on_axes, module), on_axes
        return position_ids[0] if has_text else _tokens_before(kwargs, tokens), on_axes

    def _common_axis(self, on_axes: torch.Tensor, module: nn.Module) -> torch.Tensor:
        """The positions on one axis, after a check that all axes agree; a compiled graph checks this when it runs."""
        if on_axes.stride(0) == 0:
            return on_axes[0]
        agree = (on_axes == on_axes[0]).all()
        reason = (
            f"{type(module).__name__}: position_ids of shape {tuple(on_axes.shape)} differ between axes (mRoPE, for "
            f"images), but {self.scheme} needs one position per token; with images you can use schemes of static "
            "frequencies (pi, ntk, yarn) and query scales (logn)"
        )
        require(agree, UnsupportedPositions, reason)
        return on_axes[0]


def _tokens_before(kwargs: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """The number of tokens before each token, without pads, `(batch, length)`."""
    positions = counted_positions(kwargs)
    return (slot_positions(kwargs) if positions is None else positions.clamp(min=0)).expand(tokens.shape[:2])


def pass_positions(scheme: Scheme, stack: Stack, counts: bool, changes: Changes) -> None:
    """Hook a stack whose layers would not receive positions in the form that a scheme reads; `counts` as in
    `PassPositions`.
    """
    rotary = max(stack.rotary, key=lambda tables: tables.axes, default=None)
    axes = 1 if rotary is None else rotary.axes
    layers = (*stack.layers, *stack.others)
    in_front = rotary is not None and axes > 1 and takes_text_axis(stack.module, rotary)
    as_argument = not all(layer.gets_positions for layer in layers)
    if axes > 1:  # blocks of other kinds may not accept another argument
        as_argument |= not in_front or len(layers) == stack.config.num_hidden_layers
    if axes > 1 or as_argument:
        changes.hook(stack.module, PassPositions(scheme, axes, in_front, as_argument, counts))
