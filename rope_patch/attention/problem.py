"""One call of attention: the facts that every executor reads to decide whether it can compute it, and to compute it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol, cast

import torch

from rope_patch.attention import decay
from rope_patch.attention.decay import Decay
from rope_patch.attention.spans import Span, spans_between
from rope_patch.attention.terms import HALF, Content, DistanceBias
from rope_patch.attention.turner import Branch, Fused, Turner
from rope_patch.attention.visibility import Visibility
from rope_patch.errors import UnsupportedPositions
from rope_patch.graphs import traced

# fmt: off
AttentionMode = Literal[
    "auto", "oracle", "chunked", "segmented", "fused",
    "flex", "reference", "joined", "one_call", "traced", "merged", "products", "block", "graph", "decayed",
    "intervals", "one_rotation", "masked"
]
# fmt: on
"""The way to score: `auto` takes the fastest exact executor. `oracle`, `chunked`, `segmented` and `fused` prefer one
and take another if it does not apply; the names of executors force one."""

Output = tuple[torch.Tensor, "torch.Tensor | None"]
"""Output `(batch, heads, q_len, value_dim)`, and the weights `(batch, heads, q_len, kv_len)` where they were kept."""


class TokenPlan(Protocol):
    """How a few queries behind a cache are scored, without their states: other layers of the forward repeat it."""

    @property
    def pieces(self) -> int:
        """The number of pieces that are scored."""

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, value: torch.Tensor, /) -> torch.Tensor:
        """The output `(batch, heads, q_len, value_dim)` for the states of one layer: queries `(batch, heads, q_len,
        head_dim)`, keys and values `(batch, kv_heads, kv_len, dim)`, unrotated as they arrived.
        """


@dataclass(eq=False)
class Problem:
    """A call of attention. Queries and keys are either `query` and `key` as they arrived, with a `turner` that rotates
    them, or `branches` that are rotated already.

    Attributes:
        branches: the rotated queries and keys of each region.
        value: `(batch, kv_heads, kv_len, value_dim)`.
        query_positions, key_positions: integer, `(batch or 1, q_len)` and `(batch or 1, kv_len)`; the latter
            `(batch, kv_heads, kv_len)` if heads keep different keys, see `by_head`.
        mask, groups, causal, query_start: which keys a query may see, as in `Visibility`.
        scaling: multiplies the scores.
        bias: by distance, added after scaling.
        running_bias: c of a bias c_m - c_n, by slot: float64, `(batch or 1, heads, kv_len)`.
        softcap: c in c tanh(s / c), applied to the scaled scores before any bias or mask.
        sinks: one extra score per head that enters the softmax without a value.
        dropout: probability, applied to the attention weights.
        content: all other terms of the scheme.
        scattered: whether the distance of some visible cached key differs from its difference of slots.
        mode: the executor that you asked for, or `auto`.
        query, key: as they arrived, `(batch, heads or kv_heads, length, head_dim)`; None beside `branches`.
        turner: how they are rotated; None beside `branches`.
        decay: how scores decay with distance; None if they do not.
        find_spans: finds the spans of a problem, or None; called only where they help. By default layers share them.
        compiling: whether a compiler traces the call, so that values are not known.
        taken: the name of the executor, once it was scored.
        plan: the plan by which an executor scored a few queries behind a cache; None before, and where it made none.
    """

    branches: tuple[Branch, ...]
    value: torch.Tensor
    query_positions: torch.Tensor
    key_positions: torch.Tensor
    mask: torch.Tensor | None
    causal: bool
    query_start: int | torch.Tensor
    scaling: float
    bias: DistanceBias | None = None
    running_bias: torch.Tensor | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    dropout: float = 0.0
    groups: torch.Tensor | None = None
    content: Content | None = None
    scattered: bool = False
    mode: AttentionMode = "auto"
    query: torch.Tensor | None = None
    key: torch.Tensor | None = None
    turner: Turner | None = None
    decay: Decay | None = None
    find_spans: Callable[[Problem], tuple[Span, ...] | None] | None = None
    compiling: bool = field(default_factory=traced)
    taken: str = field(default="", init=False)
    plan: TokenPlan | None = field(default=None, init=False)
    _rotated: Problem | None = field(default=None, init=False, repr=False)
    _spans: tuple[Span, ...] | Literal["unknown"] | None = field(default="unknown", init=False, repr=False)
    _fused: Fused | None = field(default=None, init=False, repr=False)

    # --- facts, of which none reads a value on a device ---

    @property
    def q_length(self) -> int:
        """Number of queries."""
        return self.query_positions.shape[-1]

    @property
    def kv_length(self) -> int:
        """Number of key slots."""
        return self.value.shape[2]

    @property
    def pairs(self) -> int:
        """Number of pairs of a query and a key in each row and head."""
        return self.q_length * self.kv_length

    @property
    def on_gpu(self) -> bool:
        """Whether the values are on a CUDA device."""
        return self.value.is_cuda

    @property
    def half(self) -> bool:
        """Whether the values are in bfloat16 or float16."""
        return self.value.dtype in HALF

    @property
    def one_query(self) -> bool:
        """Whether each row has one query."""
        return self.q_length == 1

    @property
    def behind_cache(self) -> bool:
        """Whether the queries follow keys of a cache, without seeing later keys; always true for one query."""
        return self.q_length == 1 or (self.causal and self.q_length < self.kv_length)

    @property
    def is_rotated(self) -> bool:
        """Whether queries and keys are rotated for each region already."""
        return self.turner is None

    @property
    def decays(self) -> bool:
        """Whether scores decay with distance by factors on the states."""
        return self.decay is not None

    @property
    def mask_is_added(self) -> bool:
        """Whether the mask is a term of the scores, instead of boolean."""
        return self.mask is not None and self.mask.dtype != torch.bool

    @property
    def by_head(self) -> bool:
        """Whether heads keep different keys in the cache, as after eviction by some libraries."""
        return self.key_positions.ndim == 3

    @property
    def biased(self) -> bool:
        """Whether scores have a bias by distance or by running sums."""
        return self.bias is not None or self.running_bias is not None

    @property
    def fits_kernels(self) -> bool:
        """Whether scores are products of rotated states plus a bias by distance, as plain kernels compute them."""
        return self.softcap is None and self.sinks is None and self.dropout == 0.0 and self.content is None

    @property
    def differentiable(self) -> bool:
        """Whether a gradient must flow into states, or into the parameters of a rotation or bias."""
        if not torch.is_grad_enabled():
            return False
        learned = () if self.turner is None else self.turner.learned
        return any(x is not None and x.requires_grad for x in (*learned, self.query, self.key, *self.states()))

    # --- positions and visibility of pairs ---

    @property
    def m(self) -> torch.Tensor:
        """Positions of the queries, `(batch or 1, 1, q_len, 1)`."""
        return self.query_positions[:, None, :, None]

    @property
    def n(self) -> torch.Tensor:
        """Positions of the keys, `(batch or 1, heads or 1, 1, kv_len)`."""
        if not self.by_head:
            return self.key_positions[:, None, None, :]
        repeats = self.branches[0].query.shape[1] // self.key_positions.shape[1]
        return self.key_positions.repeat_interleave(repeats, dim=1)[:, :, None, :]

    @property
    def running_bias_of_pairs(self) -> torch.Tensor | None:
        """c_m - c_n of all pairs, float64, `(batch or 1, heads, q_len, kv_len)`; None without one."""
        if self.running_bias is None:
            return None
        queries = torch.arange(self.q_length, device=self.running_bias.device) + self.query_start
        return self.running_bias[..., queries, None] - self.running_bias[..., None, :]

    @property
    def visibility(self) -> Visibility:
        """The rule by which queries see keys: mask, segment ids and causality."""
        return Visibility(self.mask, self.groups, self.causal, self.query_start, self.q_length, self.kv_length)

    def visible(self) -> torch.Tensor | None:
        """The mask, or a boolean `(batch or 1, 1, q_len, kv_len)` by slot and segment id; None if every query sees
        every key.
        """
        return self.visibility.pairs(self.value.device)

    # --- the call in another form ---

    def replaced(self, **changed: object) -> Problem:
        """Copy the problem with some fields changed."""
        return dataclasses.replace(self, **changed)  # type: ignore[arg-type]

    @property
    def rotated(self) -> Problem:
        """Rotate keys for each region, and queries, unless they are rotated a few at a time: then `Branch.turn` has the
        rotation that they still need, see `turned`. Apply the decay to the states if the queries fit into one block.
        """
        decays_here = self.decay is not None and self.q_length <= decay.ROWS
        if self.turner is None and not decays_here:
            return self
        if self._rotated is None:
            call = self
            if self.turner is not None:
                call = self.replaced(branches=self._branches(self.turner), query=None, key=None, turner=None)
            self._rotated = call.decayed() if decays_here else call
        return self._rotated

    def decayed(self) -> Problem:
        """Apply the decay to a rotated problem of one block of queries: its queries grow, and its keys decay.

        Raises:
            UnsupportedPositions: heads keep different keys.
        """
        if self.by_head:
            raise UnsupportedPositions(
                "heads keep different keys in past_key_values, but a scheme with a decay needs the same keys in all "
                "heads; keep the same keys for all heads of a layer"
            )
        branches = tuple(self._decayed(branch, cast(Decay, self.decay)) for branch in self.branches)
        return self.replaced(branches=branches, decay=None)

    def _decayed(self, branch: Branch, decay: Decay) -> Branch:
        m, n = self.query_positions.float(), self.key_positions.float()
        if branch.region is not None:
            m, n = branch.region.rotated_positions(m, n)
        last = m.amax(dim=1, keepdim=True)
        # keys after the last query are hidden and only need to stay finite
        keys = (n[:, branch.first :] - last).clamp(max=0)
        query = branch.query * decay.factor(last - m, branch.query)
        return Branch(branch.region, query, branch.key * decay.factor(keys, branch.key), branch.first)

    @property
    def as_causal(self) -> Problem:
        """Mark a call of one query as causal: the query sees all keys, as the last one of a causal call does."""
        return self if self.q_length > 1 or self.causal else self.replaced(causal=True)

    @property
    def rotation(self) -> str:
        """How the states were rotated for each region, and why not by one kernel; empty if they were not, or on a CPU,
        for which there is no such kernel.
        """
        if self._rotated is None or self.turner is None or self.value.is_cpu:
            return ""
        why = self.turner.region_by_region(*self._unrotated, self._definition)
        return f"region by region; not by one kernel: {why}" if why else "one kernel for all regions"

    def turned(self) -> Problem:
        """The rotated problem after its queries received the rotation that they still need."""
        call = self.rotated
        if all(branch.turn is None for branch in call.branches):
            return call
        return call.replaced(branches=tuple(branch.turned() for branch in call.branches))

    def rows(self, start: int, stop: int) -> Problem:
        """Restrict the rotated problem to the queries `start` to `stop`, without keys that none of them can see."""
        keys = slice(None)
        if self.mask is None and self.causal and isinstance(self.query_start, int):
            keys = slice(0, self.query_start + stop)
        return self.replaced(
            branches=tuple(branch.rows(start, stop, keys.stop) for branch in self.branches),
            value=self.value[:, :, keys],
            query_positions=self.query_positions[:, start:stop],
            key_positions=self.key_positions[..., keys],
            mask=None if self.mask is None else self.mask[:, :, start:stop],
            groups=None if self.groups is None else self.groups[:, keys],
            query_start=self.query_start + start,
            running_bias=None if self.running_bias is None else self.running_bias[..., keys],
            content=None if self.content is None else self.content.rows(slice(start, stop), keys),
        )

    @property
    def fused(self) -> Fused:
        """Unrotated queries and keys with the tables of each region, for a kernel that scores all regions."""
        if self._fused is None:
            in_order = not self.scattered and (self.q_length == 1 or self._in_order())
            self._fused = cast(Turner, self.turner).fused(*self._unrotated, in_order)
        return self._fused

    @property
    def spans(self) -> tuple[Span, ...] | None:
        """The runs of tokens in which distance is a difference of slots; None if the call is not made of such runs."""
        if self._spans == "unknown":
            self._spans = self.as_causal._found_spans()
        return self._spans

    def _found_spans(self) -> tuple[Span, ...] | None:
        if self.find_spans is not None:
            return self.find_spans(self)
        compute = spans_between if self.turner is None else self.turner.forward.shared(spans_between)
        positions, sees = (self.query_positions, self.key_positions), (self.mask, self.groups)
        return compute(*positions, *sees, int(self.query_start), len(self.value), self.causal)

    def _in_order(self) -> bool:
        """Whether the distance of every visible pair equals the difference of its slots."""
        return self.spans is not None and not any(span.skips(int(self.query_start)) for span in self.spans)

    def states(self) -> list[torch.Tensor]:
        """Values, and rotated queries and keys of every branch, `(batch, heads or kv_heads, length, head_dim)`."""
        pairs = ((branch.query, branch.key) for branch in self.branches)
        return [self.value, *(state for pair in pairs for state in pair)]

    @property
    def _unrotated(self) -> tuple[torch.Tensor, torch.Tensor]:
        return cast(tuple[torch.Tensor, torch.Tensor], (self.query, self.key))

    @property
    def _definition(self) -> str:
        """The reason why plain operators rotate the states, with all results in memory, or an empty string."""
        if self.compiling:
            return "the model is compiled"
        return f"attention={self.mode!r} is the definition" if self.mode in ("oracle", "reference") else ""

    def _branches(self, turner: Turner) -> tuple[Branch, ...]:
        """Queries and keys of each region; on a CPU executors rotate queries a few at a time."""
        start, definition = self.query_start, self._definition
        known = isinstance(start, int) and not (self.scattered or self.compiling)
        later = self.value.is_cpu and not (definition or self.biased or self.decays)
        return turner.branches(*self._unrotated, cast(int, start) if known else None, definition, later)
