"""Attention of one query under a bias by one call of PyTorch's attention, whose mask is the bias. How a token is scored
is a plan without states, as in `joined`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import cast

import torch

from rope_patch.attention.behind_cache import NEEDS, added_to, blind_queries, by_plan, place_of, planned_pieces
from rope_patch.attention.pieces import few_queries, narrowed
from rope_patch.attention.problem import Output, Problem
from rope_patch.attention.rotation import EVERY
from rope_patch.attention.table import Executor
from rope_patch.attention.turner import Turner


@dataclass(frozen=True)
class MaskPlan:
    """A plan for one token, which one layer after the other carries out.

    Attributes:
        pieces: how many.
        slots: of all keys that the query may see.
        scaling: multiplies the products.
        mask: added to the scores, `(batch * kv_heads or 1, 1, group or 1, slots)`.
        grouped: whether queries that share keys are the rows of one call, which reads the keys once.
        blind: marks queries that see no key, as in `joined.SlotRows`.
    """

    pieces: int
    slots: slice
    scaling: float
    mask: torch.Tensor
    grouped: bool
    blind: torch.Tensor | None

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The output for the states of one layer, `(batch, heads, 1, value_dim)`."""
        q, k, v = queries, narrowed(keys, self.slots), narrowed(value, self.slots)
        if self.grouped:
            q, k, v = (x.reshape(k.shape[0] * k.shape[1], 1, -1, x.shape[-1]) for x in (q, k, v))
        attend = torch.nn.functional.scaled_dot_product_attention
        out = attend(q, k, v, self.mask, scale=self.scaling, enable_gqa=k.shape[1] != q.shape[1])
        if self.blind is not None:
            rows = keys.shape[0] * keys.shape[1]
            out = out.reshape(rows, -1, out.shape[-1]).masked_fill(self.blind, 0)
        return out.reshape(*queries.shape[:3], -1)


def _objection(problem: Problem) -> str:
    """The reason why one query under a bias is not scored by one call, or an empty string."""
    query, key, value, turner = problem.query, problem.key, problem.value, cast(Turner, problem.turner)
    if len(turner.regions) > 1:
        return "it needs a single region"
    region = turner.regions[0]
    if turner.rotates(region.query_map) or turner.rotates(region.key_map):
        return "the states are not in the rotation of the region"
    if not region.translation_invariant:
        return "rows of the batch may begin their region at different slots"
    same = query is not None and key is not None and query.dtype == key.dtype == value.dtype
    return "" if same else "queries, keys and values differ in dtype"


supports = dataclasses.replace(
    NEEDS,
    compiling=False,
    on_gpu=False,
    one_query=True,
    half=False,
    biased=True,
    decays=False,
    by_head=False,
    further=_objection,
)
"""One query behind the keys of a cache under a bias, on a CPU in float32 or wider."""


def attend(problem: Problem) -> Output:
    """Attention of one query, `(batch, heads, 1, value_dim)`, without gradients. The problem keeps its plan."""
    return by_plan(problem, _plan(problem)), None


EXECUTOR = Executor("masked", "one query under a bias, which is the mask of SDPA", supports, attend, planned_pieces)


def _plan(problem: Problem) -> MaskPlan:
    query, turner = cast(torch.Tensor, problem.query), cast(Turner, problem.turner)
    (batch, heads), kv_heads, start = query.shape[:2], problem.value.shape[1], int(problem.query_start)
    (piece,) = few_queries(turner.regions, EVERY, 1, start, start)
    added = added_to(problem, turner.forward, turner.regions[0], heads, place_of(piece), start)
    assert added is not None  # for the type checker: see `supports`
    # one call for each key head does not employ more threads than there are key heads
    grouped = heads > kv_heads and batch * kv_heads >= torch.get_num_threads()
    mask = added[:, None]
    if not grouped:
        mask = added.expand(batch * kv_heads, heads // kv_heads, -1).reshape(batch, heads, 1, -1)
    blind = blind_queries(problem, turner.forward, (added,))
    return MaskPlan(1, piece.keys, problem.scaling, mask, grouped, blind)
