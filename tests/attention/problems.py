"""Calls of attention as executors are asked about them, and random ones."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rope_patch.attention.decay import Decay
from rope_patch.attention.forward import Forward
from rope_patch.attention.problem import Problem
from rope_patch.attention.spans import find_spans
from rope_patch.attention.terms import DistanceBias
from rope_patch.attention.turner import Turner
from rope_patch.schemes.slots import ALL_PAIRS, Region
from rope_patch.schemes.tools.positions import UNROTATED
from rope_patch.schemes.tools.rotary import half_split
from rope_patch.typing import Frequencies

# --- calls of rotated states ---


def spans_of(inputs):
    """The spans of a call whose queries are all of its tokens, or follow others."""
    rows = len(inputs.value)
    return find_spans(inputs.query_positions, inputs.mask, inputs.groups, inputs.query_start, rows, inputs.causal)


def supports(executor, inputs, spans=None, decay=None, compiling=False):
    """Whether an executor's module computes a call."""
    find_spans = spans_of if spans is None else lambda _: spans
    return executor.supports(inputs.replaced(decay=decay, find_spans=find_spans, compiling=compiling)) == ""


def in_spans(executor, inputs, spans):
    """The output of an executor's module for a call made of these spans."""
    return executor.attend(inputs.replaced(find_spans=lambda _: spans))[0]


def whole(inputs, query, key, mode="auto", regions=(ALL_PAIRS,), **others):
    """A call without rotations."""
    turner = Turner(Forward(), inputs.query_positions, inputs.key_positions, regions)
    return inputs.replaced(mode=mode, query=query, key=key, turner=turner, **others)


# --- random calls ---

AXES: dict[str, tuple[Any, ...]] = {
    "length": (3, 73, 73, 423),
    "heads_per_key": (1, 3, 5, 8),
    "key_heads": (1, 2),
    "width": (16, 40, 64, 128, 256),
    "value_width": ("as keys", "as keys", "half"),
    "rows": ("full", "left pads", "right pads", "both pads", "packed", "skipping", "keys of each head"),
    "queries": ("all", "all", "one", "few", "half"),
    "causal": (True, True, True, False),
    "regions": ("all pairs", "near and far", "grouped", "chunks", "first keys", "window", "window beyond the text"),
    "terms": ("none", "none", "linear", "curved", "window", "hides itself", "sums", "linear and sums"),
    "scores": ("products", "products", "products", "products", "softcap", "sinks"),
    "mask": ("none", "none", "none", "none", "boolean", "sliding", "of each head", "lowest", "added"),
    "decay": (False, False, False, False, True),
    "dtype": (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "gradient": (True, False),
    "compiling": (False, False, True),
}
"""What a random call is drawn from; a value that stands twice is drawn twice as often."""

ORDINARY: dict[str, tuple[Any, ...]] = {
    "rows": ("full", "left pads", "right pads", "both pads", "packed", "skipping"),
    "scores": ("products",),
    "mask": ("none", "none", "boolean", "sliding"),
    "decay": (False,),
}
STRATA: tuple[dict[str, tuple[Any, ...]], ...] = (
    {},
    ORDINARY,
    ORDINARY | {"regions": ("all pairs",), "heads_per_key": (1,)},
    ORDINARY | {"queries": ("one", "few"), "gradient": (False,)},
)
"""Limits of the axes, in turn: without them, few calls would be ordinary in all respects at once."""

WITH_DECAY = 240
DECAYING = ORDINARY | {"decay": (True,), "queries": ("all", "half"), "causal": (True,)}
"""Limits of the seeds from `WITH_DECAY` on: scores decay, between many queries."""


def regions_of(kind: str, length: int) -> tuple[Region, ...]:
    """Disjoint regions, those of keys after the query included."""
    beyond = length + 10

    def same(x):
        return x

    def at(value):
        return lambda x: torch.full_like(x, value, dtype=torch.float32)

    def within(unit, shift=0):
        return lambda x: x % unit + shift

    return {
        "all pairs": (ALL_PAIRS,),
        "near and far": (Region(same, same, -5, 6), Region(at(6), at(0), 6), Region(at(0), at(6), stop=-5)),
        "grouped": (Region(same, same, -6, 7), Region(lambda x: x // 4 + 6, lambda x: x // 4, 7)),
        "chunks": (
            Region(within(9), within(9), 0, 1, 9),
            Region(within(9, 9), within(9), 1, 2, 9),
            Region(at(17), within(9), 2, chunk=9),
        ),
        "first keys": (Region(same, same, -6, 7), Region(at(9), same, 7, keys_below=3)),
        "window": (Region(same, same, -6, 7),),
        "window beyond the text": (Region(same, same, 1 - beyond, beyond), Region(at(beyond), at(0), beyond)),
    }[kind]


def bias_of(kind: str, slopes: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """b(distance), `(heads, *shape)`, in the dtype of `slopes` `(heads,)`."""
    if kind in ("none", "sums"):
        return None

    def bias(distance: torch.Tensor) -> torch.Tensor:
        d = distance.to(slopes.dtype).abs()
        by_head = slopes.view(-1, *[1] * d.ndim)
        if "linear" in kind:
            return -by_head * d
        values = by_head * (d / 5).cos()
        hidden = {"window": d >= 9, "hides itself": d == 0, "curved": d < 0}[kind]
        return values.masked_fill(hidden, -math.inf)

    return bias


@dataclass(frozen=True)
class Drawn:
    """A random call of two rows.

    Attributes:
        drawn: its value on each of the `AXES`, as far as they go together.
        leaves: what a gradient flows to, by name: `queries` `(batch, heads, q_len, head_dim)`, `keys` and `values`
            `(batch, kv_heads, kv_len, head_dim)`, `slopes` and `sinks` `(heads,)`, `sums` `(batch, heads, kv_len)`.
        regions: disjoint.
        groups: `(batch, kv_len)`; below zero for pads.
        m, n: positions of queries and keys.
        mask: `(batch, heads or 1, q_len, kv_len)`; None without one.
    """

    drawn: dict[str, Any]
    leaves: dict[str, torch.Tensor]
    regions: tuple[Region, ...]
    groups: torch.Tensor
    m: torch.Tensor
    n: torch.Tensor
    mask: torch.Tensor | None

    def __getattr__(self, name: str) -> Any:
        try:
            return self.drawn[name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def start(self) -> int:
        return self.groups.shape[1] - self.m.shape[1]

    @property
    def scaling(self) -> float:
        return self.leaves["queries"].shape[-1] ** -0.5

    @property
    def softcap(self) -> float | None:
        return 3.0 if self.scores == "softcap" else None

    @property
    def inv_freq(self) -> torch.Tensor:
        half = self.leaves["queries"].shape[-1] // 2
        return 100.0 ** -(torch.arange(half, dtype=torch.float64) / half)

    @property
    def rate(self) -> torch.Tensor | None:
        return torch.linspace(0.001, 0.05, len(self.inv_freq)) if self.decay else None

    @property
    def kept(self) -> torch.Tensor:
        """Queries that are tokens, `(batch, 1, q_len, 1)`."""
        return (self.groups[:, self.start :] >= 0)[:, None, :, None]

    @property
    def scattered(self) -> bool:
        """Whether the distance of a visible cached key to the first query is not that of their slots."""
        past = self.n[..., : self.start]
        expected = self.m[:, :1] + torch.arange(-self.start, 0)
        expected, tokens = (x if past.ndim == 2 else x[:, None] for x in (expected, self.groups[:, : self.start] >= 0))
        return bool(((past != expected) & tokens).any())

    def fresh(self) -> dict[str, torch.Tensor]:
        """Copies of the leaves, which want gradients if the call does."""
        return {name: leaf.detach().clone().requires_grad_(self.gradient) for name, leaf in self.leaves.items()}

    def problem(
        self,
        mode: str = "auto",
        leaves: dict[str, torch.Tensor] | None = None,
        earlier: Problem | None = None,
    ) -> Problem:
        """The call as executors are asked about it. Layers of one forward share what an `earlier` one computed."""
        leaves = self.fresh() if leaves is None else leaves
        function = bias_of(self.terms, leaves["slopes"])
        bias = None if function is None else DistanceBias(function, linear="linear" in self.terms)
        forward = Forward() if earlier is None else earlier.turner.forward
        layout, frequencies = half_split(2 * len(self.inv_freq)), Frequencies(self.inv_freq)
        return Problem(
            branches=(),
            value=leaves["values"],
            query_positions=self.m,
            key_positions=self.n,
            mask=self.mask,
            causal=self.causal,
            query_start=self.start,
            scaling=self.scaling,
            bias=bias if earlier is None else earlier.bias,
            running_bias=leaves["sums"] if "sums" in self.terms else None,
            softcap=self.softcap,
            sinks=leaves["sinks"] if self.scores == "sinks" else None,
            groups=None if self.mask is not None or self.rows == "full" else self.groups,
            scattered=self.scattered,
            mode=mode,
            query=leaves["queries"],
            key=leaves["keys"],
            turner=Turner(forward, self.m, self.n, self.regions, layout, frequencies, UNROTATED),
            decay=None if self.rate is None else Decay(layout, self.rate),
            compiling=self.compiling,
        )


def values_of(seed: int) -> dict[str, Any]:
    """The values of a seed on the axes."""
    limits = STRATA[seed % len(STRATA)] if seed < WITH_DECAY else DECAYING
    chance, axes = random.Random(seed), AXES | limits
    return _together({axis: chance.choice(values) for axis, values in axes.items()})


def draw(seed: int) -> Drawn:
    """The random call of a seed."""
    numbers = torch.Generator().manual_seed(seed)
    drawn = values_of(seed)
    length, dtype, width = drawn["length"], drawn["dtype"], drawn["width"]
    heads = drawn["heads_per_key"] * drawn["key_heads"]
    q_length = {"all": length, "one": 1, "few": min(5, length - 1), "half": length // 2}[drawn["queries"]]
    start = length - q_length

    def states(*shape: int) -> torch.Tensor:
        return torch.randn(2, *shape, generator=numbers, dtype=torch.float64).to(dtype)

    groups, positions = _tokens(drawn["rows"], length, start, numbers)
    keys = positions
    if drawn["rows"] == "keys of each head":
        gaps = torch.randint(1, 4, (2, drawn["key_heads"], length), generator=numbers)
        keys = gaps.cumsum(-1)
        positions = keys.amax(dim=1)[:, start - 1 : start] + torch.arange(1 - start, length - start + 1)
        keys[..., start:] = positions[:, None, start:]
    leaves = {
        "queries": states(heads, q_length, width),
        "keys": states(drawn["key_heads"], length, width),
        "values": states(drawn["key_heads"], length, width if drawn["value_width"] == "as keys" else width // 2),
        "slopes": torch.rand(heads, generator=numbers),
        "sinks": torch.randn(heads, generator=numbers).to(dtype),
        "sums": -torch.rand(2, heads, length, generator=numbers, dtype=torch.float64).cumsum(dim=-1) / 3,
    }
    sees_later = not drawn["causal"] and drawn["queries"] != "one"
    regions = tuple(region for region in regions_of(drawn["regions"], length) if region.stop > 0 or sees_later)
    mask = _mask(drawn["mask"], groups, start, drawn["causal"], heads, dtype, numbers)
    found = Drawn(drawn, leaves, regions, groups, positions[:, start:], keys, mask)
    # heads with keys at the same positions are no different from others
    return found if keys.ndim == 2 or found.scattered else dataclasses.replace(found, n=keys[:, 0])


def _together(drawn: dict[str, Any]) -> dict[str, Any]:
    """The values that go together: others give way to those that are named first here."""
    if drawn["rows"] == "packed":  # such rows have no cache
        drawn |= {"queries": "all"}
    if drawn["rows"] == "keys of each head":  # a cache that keys were taken from; sums and decays refuse it
        drawn |= {"queries": "few" if drawn["queries"] == "all" else drawn["queries"], "decay": False}
        drawn |= {"terms": "none"} if "sums" in drawn["terms"] else {}
    if drawn["decay"]:  # for causal attention, by distance
        drawn |= {"causal": True, "length": min(drawn["length"], 73)}
        drawn |= {} if drawn["regions"] in ("all pairs", "near and far", "window") else {"regions": "all pairs"}
    if drawn["mask"] == "sliding":
        drawn |= {"causal": True}
    return drawn


def _tokens(kind: str, length: int, start: int, numbers: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups and positions of two rows, `(2, length)`; positions count tokens, and pads before them are at 0."""
    groups, slots = torch.zeros(2, length, dtype=torch.long), torch.arange(length)
    left = {"left pads": (1, length // 2), "both pads": (0, length // 3)}.get(kind, (0, 0))
    right = {"right pads": (0, length // 2), "both pads": (0, length // 4)}.get(kind, (0, 0))
    for row in range(2):
        groups[row, : left[row]] = -1
        groups[row, length - right[row] :] = -1
    positions = (slots - torch.tensor(left)[:, None]).clamp(min=0)
    if kind == "packed":
        cuts = torch.tensor([length // 3, length - 1])
        groups = torch.stack([(slots >= cuts[0]).long(), (slots[:, None] >= cuts).sum(-1)])
        positions = torch.stack([slots - torch.searchsorted(row, row) for row in groups])
    if kind == "skipping":
        skips = torch.rand(2, length, generator=numbers) < 3 / length
        if start and torch.rand((), generator=numbers) < 0.5:  # among the queries alone
            skips = (slots > start) & (torch.rand(2, length, generator=numbers) < 0.5)
        positions = (1 + 11 * skips.long()).cumsum(dim=-1) - 1
    return groups, positions


def _mask(
    kind: str,
    groups: torch.Tensor,
    start: int,
    causal: bool,
    heads: int,
    dtype: torch.dtype,
    numbers: torch.Generator,
) -> torch.Tensor | None:
    """A mask of all pairs, pads and documents included; None without one."""
    if kind == "none":
        return None
    length = groups.shape[1]
    distance = torch.arange(start, length)[:, None] - torch.arange(length)
    seen = (groups[:, start:, None] == groups[:, None]) & (groups[:, None] >= 0)
    seen = (seen & (distance >= 0) if causal else seen)[:, None]
    shape = (2, heads if kind == "of each head" else 1, length - start, length)
    if kind == "sliding":
        return seen & (distance < 7)
    if kind in ("boolean", "of each head"):
        return seen & ((torch.rand(shape, generator=numbers) < 0.7) | (distance == 0))
    added = torch.zeros(shape) if kind == "lowest" else torch.randn(shape, generator=numbers)
    return added.to(dtype).masked_fill(~seen, torch.finfo(dtype).min)
