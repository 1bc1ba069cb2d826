"""One call to be scored: what every executor is asked about, and what it is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch

from rope_patch.attention.decay import Decay
from rope_patch.attention.inputs import AttentionInputs, AttentionMode, Branch
from rope_patch.attention.slot_plan import SlotPlan
from rope_patch.attention.spans import Span, spans_of
from rope_patch.attention.turner import Fused, Turner
from rope_patch.graphs import traced
from rope_patch.schemes.slots import ALL_PAIRS, Region
from rope_patch.typing import PositionMap

Output = tuple[torch.Tensor, "torch.Tensor | None"]
"""Output `(batch, heads, q_len, value_dim)`, and the weights `(batch, heads, q_len, kv_len)` where they were kept."""

Spans = Callable[[AttentionInputs], "tuple[Span, ...] | None"]

NOT_PRODUCTS = "scores are more than products and a bias by distance: a softcap, sinks, dropout, or a term by content"
"""The reason of every executor that computes products and biases alone."""

_UNKNOWN = object()


@dataclass(eq=False)
class Problem:
    """A call of attention.

    Attributes:
        inputs: without branches where `turner` rotates the states.
        mode: the executor that you asked for, or `auto`.
        query, key: as they arrived, `(batch, heads or kv_heads, length, head_dim)`; None if the branches of `inputs`
            are rotated already.
        turner: how they are rotated.
        decay: how scores decay with distance; None if they do not.
        find_spans: the spans of some inputs, or None; called only where they help. By default layers share them.
        compiling: whether a compiler traces the call, so that values are not known.
        taken: the name of the executor, once it was scored.
        plan: how a few queries were scored, if they were.
    """

    inputs: AttentionInputs
    mode: AttentionMode = "auto"
    query: torch.Tensor | None = None
    key: torch.Tensor | None = None
    turner: Turner | None = None
    decay: Decay | None = None
    find_spans: Spans | None = None
    compiling: bool = field(default_factory=traced)
    taken: str = field(default="", init=False)
    plan: SlotPlan | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.find_spans is None:
            self.find_spans = spans_of if self.turner is None else self.turner.forward.spans
        self._rotated: Problem | None = None
        self._spans: object = _UNKNOWN
        self._fused: Fused | None = None

    @property
    def is_cuda(self) -> bool:
        """Whether the states are on a GPU."""
        return self.inputs.value.is_cuda

    @property
    def pairs(self) -> int:
        """Number of pairs of a query and a key in each row and head."""
        return self.inputs.q_length * self.inputs.kv_length

    @property
    def biased(self) -> bool:
        """Whether scores have a bias by distance or by running sums."""
        return self.inputs.bias is not None or self.inputs.running_bias is not None

    @property
    def differentiable(self) -> bool:
        """Whether a gradient must flow into queries, or into the parameters of a rotation or bias."""
        turner, query = cast(Turner, self.turner), cast(torch.Tensor, self.query)
        return torch.is_grad_enabled() and any(x.requires_grad for x in (query, *turner.learned))

    def rotated(self) -> Problem:
        """The problem with queries and keys rotated for each region."""
        if self.turner is None:
            return self
        if self._rotated is None:
            inputs = self.inputs.with_branches(self._branches(self.turner))
            self._rotated = dataclasses.replace(self, inputs=inputs, query=None, key=None, turner=None)
        return self._rotated

    def fused(self) -> Fused:
        """Queries and keys as they arrived, and their rotation in each region, for a kernel that scores all regions."""
        if self._fused is None:
            turner, inputs = cast(Turner, self.turner), self.inputs
            in_order = not inputs.scattered and (inputs.q_length == 1 or self._in_order())
            self._fused = turner.fused(cast(torch.Tensor, self.query), cast(torch.Tensor, self.key), in_order)
        return self._fused

    def _in_order(self) -> bool:
        """Whether every distance of a visible pair is that of its slots."""
        spans = self.spans()
        return spans is not None and not any(span.skips(int(self.inputs.query_start)) for span in spans)

    def states(self) -> list[torch.Tensor]:
        """Values, and queries and keys of every branch, `(batch, heads or kv_heads, length, head_dim)`."""
        pairs = ((branch.query, branch.key) for branch in self.inputs.branches)
        return [self.inputs.value, *(state for pair in pairs for state in pair)]

    def by_spans(self) -> Problem:
        """The rotated call as spans describe it: one query sees all keys, as the last of a causal call does."""
        rotated = self.rotated()
        if self.inputs.q_length > 1 or self.inputs.causal:
            return rotated
        return dataclasses.replace(rotated, inputs=dataclasses.replace(rotated.inputs, causal=True))

    def spans(self) -> tuple[Span, ...] | None:
        """The runs of tokens in which distance is a difference of slots; None if the call is not made of such runs."""
        if self._spans is _UNKNOWN:
            one = self.inputs.q_length == 1 and not self.inputs.causal
            inputs = dataclasses.replace(self.inputs, causal=True) if one else self.inputs
            self._spans = cast(Spans, self.find_spans)(inputs)
        return self._spans  # type: ignore[return-value]

    def _branches(self, turner: Turner) -> tuple[Branch, ...]:
        """Queries and keys of each region, with keys from the oldest that a query may see there. Queries that are
        rotated a few at a time bring their rotation.
        """
        query, key = cast(tuple[torch.Tensor, torch.Tensor], (self.query, self.key))
        later = self.mode not in ("oracle", "reference") and self.decay is None
        later = later and query.is_cpu and not (self.biased or self.compiling)
        keys: dict[tuple[PositionMap, int], torch.Tensor] = {}  # regions with the same rotation share them
        branches = []
        for region in turner.regions:
            turn = turner.later(region, query) if later and region != ALL_PAIRS else None
            first = self._oldest(region)
            if (region.key_map, first) not in keys:
                own = key[:, :, first:] if first else key
                slots = slice(first, None) if first else None
                keys[region.key_map, first] = turner.turn(own, region, "key", slots)
            rotated = turner.turn(query, region, "query") if turn is None else query
            within = None if region == ALL_PAIRS else region
            branches.append(Branch(within, rotated, keys[region.key_map, first], first, turn))
        return tuple(branches)

    def _oldest(self, region: Region) -> int:
        """The oldest slot whose key a query may see in a region."""
        start = self.inputs.query_start
        known = isinstance(start, int) and not (self.inputs.scattered or self.compiling)
        if region == ALL_PAIRS or not known or not region.translation_invariant:
            return 0
        return min(region.slots(int(start), int(start)).start, int(start))  # positions of new tokens may skip
