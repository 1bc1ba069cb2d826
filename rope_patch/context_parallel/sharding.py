"""The sharding of a row over processes: which tokens each process holds, and how processes exchange them.

Every exchange is a linear map between the processes. Its backward is the transposed map, so gradients return to the
process that holds the token.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import distributed

Map = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Sharding:
    """The division of `length` slots over the `number` of processes in a `group`; this process is `rank`.

    The row is cut into twice as many runs as there are processes. Process r holds the runs r and 2 number - 1 - r
    (zigzag): its early tokens see few keys and its late tokens many, so all processes score equally many pairs of a
    causal row. Runs differ by at most one token; in a very short row some runs are empty.
    """

    length: int
    number: int
    rank: int
    group: Any = None

    @classmethod
    def of_row(cls, length: int, group: Any) -> Sharding:
        """Shard a row of `length` slots, as this process of a `group` sees it; a `group` of None means all
        processes.
        """
        return cls(length, distributed.get_world_size(group), distributed.get_rank(group), group)

    def runs(self, rank: int) -> tuple[slice, ...]:
        """The runs of slots of a process, in order."""
        bounds = [self.length * cut // (2 * self.number) for cut in range(2 * self.number + 1)]
        every = [slice(*pair) for pair in itertools.pairwise(bounds)]
        return tuple(run for run in (every[rank], every[-1 - rank]) if run.start < run.stop)

    def tokens(self, rank: int) -> int:
        """The number of tokens of a process."""
        return sum(run.stop - run.start for run in self.runs(rank))

    @property
    def longest(self) -> int:
        """The largest number of tokens of a process."""
        return max(map(self.tokens, range(self.number)))

    @functools.cached_property
    def _places(self) -> torch.Tensor:
        """The index of each slot of the row among the tokens of all processes, each padded to `longest`."""
        places = torch.empty(self.length, dtype=torch.long)
        for rank in range(self.number):
            start = rank * self.longest
            for run in self.runs(rank):
                places[run] = torch.arange(start, start := start + run.stop - run.start)
        return places

    def shard(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Take the part of this process of `x`, `(..., length, ...)` with the row along `dim`."""
        return torch.cat([x.narrow(dim, run.start, run.stop - run.start) for run in self.runs(self.rank)], dim)

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Gather the whole row, `(..., length, ...)`, from the tokens of each process along `dim`; gradients are
        summed.
        """
        there = cast(Map, functools.partial(self._gather, dim=dim))
        return _Exchanged.apply(x, there, functools.partial(self._scatter_sum, dim=dim))

    def by_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Exchange tokens for heads: `(batch, heads, tokens, head_dim)` for the tokens of this process becomes `(batch,
        heads / number, length, head_dim)`, all tokens for the heads of this process.
        """
        return _Exchanged.apply(x, self._to_heads, self._to_tokens)

    def by_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Undo `by_heads`: exchange heads for tokens, `(batch, heads, tokens, head_dim)`."""
        return _Exchanged.apply(x, self._to_tokens, self._to_heads)

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        """Pad the tokens, along the first axis, to `longest`."""
        return torch.cat([x, x.new_zeros(self.longest - len(x), *x.shape[1:])]).contiguous()

    def _in_order(self, x: torch.Tensor) -> torch.Tensor:
        """Put the padded tokens of all processes, `(number, longest, ...)`, into the order of the row, `(length,
        ...)`.
        """
        return x.flatten(0, 1)[self._places.to(x.device)]

    def _by_process(self, row: torch.Tensor) -> torch.Tensor:
        """Undo `_in_order`, with zeros as padding."""
        tokens = row.new_zeros(self.number * self.longest, *row.shape[1:])
        tokens[self._places.to(row.device)] = row
        return tokens.unflatten(0, (self.number, self.longest))

    def _gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        tokens = self._padded(x.movedim(dim, 0))
        every = tokens.new_empty(self.number, *tokens.shape)
        distributed.all_gather(list(every.unbind()), tokens, group=self.group)
        return self._in_order(every).movedim(0, dim)

    def _scatter_sum(self, row: torch.Tensor, dim: int) -> torch.Tensor:
        every = self._by_process(row.movedim(dim, 0))
        mine = torch.empty_like(every[0])
        distributed.reduce_scatter(mine, list(every.unbind()), group=self.group)
        return mine[: self.tokens(self.rank)].movedim(0, dim)

    def _to_heads(self, x: torch.Tensor) -> torch.Tensor:
        sent = self._padded(x.movedim(2, 0)).unflatten(2, (self.number, -1)).movedim(2, 0).contiguous()
        return self._in_order(self._sent(sent)).movedim(0, 2)

    def _to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        received = self._sent(self._by_process(x.movedim(2, 0)))
        return received.movedim(0, 2).flatten(2, 3)[: self.tokens(self.rank)].movedim(0, 2)

    def _sent(self, parts: torch.Tensor) -> torch.Tensor:
        """Send one part to each process, and return the parts that all processes sent to this one, `(number, ...)`."""
        received = torch.empty_like(parts)
        distributed.all_to_all_single(received, parts, group=self.group)
        return received


class _Exchanged(torch.autograd.Function):
    """Apply a linear map `there` between processes; backward applies its transpose `back`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Map, back: Map) -> torch.Tensor:
        ctx.maps = there, back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        there, back = ctx.maps
        return _Exchanged.apply(grad, back, there), None, None
