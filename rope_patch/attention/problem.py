"""One call to be scored: what every executor is asked about, and what it is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch

from rope_patch.attention.call import Call, Fused
from rope_patch.attention.decay import Decay
from rope_patch.attention.inputs import AttentionInputs, AttentionMode, Branch
from rope_patch.attention.slot_plan import EVERY
from rope_patch.attention.spans import Span
from rope_patch.schemes.slots import ALL_PAIRS, Region

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
        inputs: without branches where `call` rotates the states.
        mode: the executor that you asked for, or `auto`.
        call: queries and keys, and how they are rotated; None if the branches of `inputs` are rotated already.
        find_spans: the spans of some inputs, or None; called only where they help.
        compiling: whether a compiler traces the call, so that values are not known.
    """

    inputs: AttentionInputs
    mode: AttentionMode
    call: Call | None
    find_spans: Spans
    compiling: bool = field(default_factory=torch.compiler.is_compiling)

    def __post_init__(self) -> None:
        self.decay: Decay | None = None if self.call is None else self.call.decay()
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

    def rotated(self) -> Problem:
        """The problem with queries and keys rotated for each region."""
        if self.call is None:
            return self
        if self._rotated is None:
            later = self.mode not in ("oracle", "reference") and self.decay is None
            later = later and self.call.queries.is_cpu and not (self.biased or self.compiling)
            branches = tuple(self._branch(self.call, region, later) for region in self.call.regions)
            inputs = self.inputs.with_branches(branches)
            self._rotated = dataclasses.replace(self, inputs=inputs, call=None)
        return self._rotated

    def fused(self) -> Fused:
        """Queries and keys as they arrived, and their rotation in each region, for a kernel that scores all regions."""
        if self._fused is None:
            call, inputs = cast(Call, self.call), self.inputs
            in_order = not inputs.scattered and (inputs.q_length == 1 or self._in_order())
            self._fused = call.fused(in_order)
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
            self._spans = self.find_spans(dataclasses.replace(self.inputs, causal=True) if one else self.inputs)
        return self._spans  # type: ignore[return-value]

    def _branch(self, call: Call, region: Region, later: bool) -> Branch:
        """Queries and keys of one region, starting at the oldest key that a query may see there. Queries that are
        rotated `later` bring their rotation.
        """
        inputs = self.inputs
        if region == ALL_PAIRS:
            return Branch(None, call.query(region), call.key(region, EVERY, EVERY))
        first, in_order = 0, isinstance(inputs.query_start, int) and not inputs.scattered
        if in_order and region.translation_invariant and not self.compiling:
            oldest = region.slots(int(inputs.query_start), int(inputs.query_start)).start
            first = min(oldest, inputs.kv_length)  # a text may be too short for a region
        turn = call.query_turn(region) if later else None
        query = call.query(region) if turn is None else call.queries
        return Branch(region, query, call.key(region, slice(first, None), EVERY), first, turn)
