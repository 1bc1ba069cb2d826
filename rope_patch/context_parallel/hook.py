"""The hook that tells each process of a group the whole row before a stack runs, and its installation."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import distributed, nn

from rope_patch.attention.masks import groups_of_pads
from rope_patch.context_parallel.attention import shared_attention
from rope_patch.context_parallel.row import Backend, Row, RowMask
from rope_patch.context_parallel.sharding import Sharding
from rope_patch.errors import UnsupportedPositions
from rope_patch.models.arguments import (
    Arguments,
    by_name,
    cache_in,
    check_tokens,
    counted_positions,
    slot_positions,
    tokens_of,
)
from rope_patch.models.base import Stack, is_causal
from rope_patch.mounting.hooks import groups_of_row
from rope_patch.mounting.registration import SHARED, Registration
from rope_patch.mounting.undo import Changes


@dataclass(eq=False)
class RowHook:
    """Pre-hook of a stack: the processes of a group exchange their positions and pads, and the mask becomes a
    `RowMask`.

    Attributes:
        counts: whether positions count tokens without pads if none are given.
        of_batch: whether all rows count as long as the longest, as in Transformers' own models.
    """

    group: Any
    backend: Backend
    counts: bool
    of_batch: bool = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return the arguments with positions in the whole row, and with the `RowMask`.

        Raises:
            UnsupportedPositions: processes have different batches, or parts that do not come from `shard`; there are
                keys from an earlier forward, or a mask that is not `(batch, tokens)`.
        """
        kwargs = by_name(module, args, kwargs)
        check_tokens(module, kwargs)
        tokens, mask, positions = tokens_of(kwargs), kwargs.get("attention_mask"), kwargs.get("position_ids")
        if tokens is None:
            return (), kwargs  # the model itself raises
        if cache_in(kwargs) is not None:
            raise UnsupportedPositions("a cache is given, but a row that processes share has no cache")
        for name, value in (("attention_mask", mask), ("position_ids", positions)):
            if value is not None and getattr(value, "ndim", None) != 2:
                raise UnsupportedPositions(f"{name} of a row that processes share has two axes, (batch, tokens)")
        sharding = self._agreed_sharding(tokens, mask, positions)
        mask, positions = (
            None if x is None else sharding.all_gather(x.long().expand(len(tokens), -1), dim=1)
            for x in (mask, positions)
        )
        whole = {"input_ids": tokens.new_zeros(len(tokens), sharding.length, dtype=torch.long), "attention_mask": mask}
        causal = is_causal(module, kwargs.get("is_causal"))
        arguments = {**whole, "position_ids": positions, "use_cache": False}
        groups = groups_of_row(arguments, cast(Any, module).config, causal, compiling=torch.compiler.is_compiling())
        if positions is None:
            positions = counted_positions(whole) if self.counts else None
            positions = slot_positions(whole) if positions is None else positions.clamp(min=0)
        if groups is None:
            groups = groups_of_pads(torch.ones_like(positions))
        seen = groups >= 0
        jumps = (positions.diff() != 1) & (groups.diff() == 0) & seen[:, 1:]
        lengths = torch.where(seen, positions, 0).amax(dim=-1) + 1
        if self.of_batch:
            lengths = (positions.amax() + 1).expand(len(positions))
        row = Row(sharding, self.backend, positions, groups, lengths, scattered=bool(jumps.any()))
        changed: dict[str, Any] = {
            "position_ids": sharding.shard(positions, 1),
            "attention_mask": RowMask.from_row(row),
        }
        if "use_cache" in inspect.signature(type(module).forward).parameters:
            changed["use_cache"] = False
        return (), {**kwargs, **changed}

    def _agreed_sharding(self, tokens: torch.Tensor, *optional: torch.Tensor | None) -> Sharding:
        """The sharding of the row, after a check that all processes agree on it."""
        number = distributed.get_world_size(self.group)
        mine = torch.tensor([tokens.shape[1], len(tokens), *(x is not None for x in optional)], device=tokens.device)
        every = mine.new_empty(number, len(mine))
        distributed.all_gather(list(every.unbind()), mine, group=self.group)
        lengths, *others = every.T.tolist()
        sharding = Sharding.of_row(sum(lengths), self.group)
        if lengths != [sharding.tokens(rank) for rank in range(number)]:
            raise UnsupportedPositions(f"the processes hold {lengths} tokens of a row; divide it with shard")
        if any(len(set(each)) > 1 for each in others):
            raise UnsupportedPositions(
                "the processes that share a row pass different batches: "
                + "; ".join(f"{rows} rows, mask {bool(m)}, positions {bool(p)}" for _, rows, m, p in every.tolist())
            )
        return sharding


def install_sharing(stack: Stack, group: Any, backend: Backend, changes: Changes, of_batch: bool = False) -> None:
    """Install the hooks that let the processes of a group share the rows of a stack; `of_batch` as in `RowHook`."""
    counts = not stack.has_positions or not of_batch
    changes.hook(stack.module, RowHook(group, backend, counts, of_batch), first=True)
    changes.log(stack.module, Registration(SHARED, shared_attention))
    for layer in (*stack.layers, *stack.others):
        live = copy.copy(cast(Any, layer.module).config)
        live._attn_implementation_internal = SHARED
        changes.set(layer.module, "config", live)
