"""What docs/explorer.html has to show, from the library in double precision. Models are those of `explorer.MODELS`."""

from __future__ import annotations

import math
from typing import Any

import torch

from rope_patch.schemes import Checkpoint, Scheme, get_scheme
from rope_patch.schemes.slots import ALL_PAIRS
from rope_patch.typing import RotarySpec


def checkpoint_of(model: dict[str, Any]) -> Checkpoint:
    return Checkpoint(model["L"], model["heads"], model["L"], pairs=model["d"] // 2)


def rotary_of(model: dict[str, Any]) -> RotarySpec:
    return RotarySpec(model["d"], model["theta"], model["L"])


def resolved(name: str, fields: dict[str, Any], model: dict[str, Any]) -> Scheme:
    return get_scheme(name, **fields).resolve(checkpoint_of(model))


def every_distance(scheme: Scheme, length: int, pairs: int) -> torch.Tensor:
    """`(pairs, length, length)`, double; NaN where the query does not see the key."""
    m, n = torch.arange(length).double()[:, None], torch.arange(length).double()
    found = torch.full((pairs, length, length), math.nan, dtype=torch.float64)
    for region in scheme.at_length(length).segments():
        there = region.rotated_distance(m, n).double()
        there = there.movedim(-1, 0) if region.pairs else there.expand(pairs, -1, -1)
        found = torch.where(region.contains(m, n), there, found)
    return found.masked_fill(m < n, math.nan)


def distances_of(scheme: Scheme, m: int, n: int) -> list[float]:
    """By what a query at m and a key at n are rotated, for each pair of dimensions that differs; empty if hidden."""
    query, key = torch.tensor(m).double(), torch.tensor(n).double()
    for region in scheme.segments() if "segments" in scheme.slots else [ALL_PAIRS]:
        if m >= n and region.contains(query, key):
            return region.rotated_distance(query, key).double().view(-1).unique().tolist()
    return []


def slow_angles(
    scheme: Scheme, model: dict[str, Any], length: int, m: int, n: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The angles of a pair of tokens, and the widest ones of training, for the pairs of dimensions without a full turn
    within L, `(slow pairs,)`. The tokens are a query and a key that it sees, in a text of some length.
    """
    own = float(model["theta"]) ** -(torch.arange(0, model["d"], 2).double() / model["d"])
    theta = own * (not scheme.brings_bias)
    if "frequencies" in scheme.slots:
        lengths = torch.tensor([length]) if scheme.length_dependent else None
        theta = scheme.frequencies(rotary_of(model), lengths).inv_freq.double().view(-1)
    distance = torch.tensor(m - n).double()
    for region in scheme.segments() if "segments" in scheme.slots else ():
        if region.contains(torch.tensor(m), torch.tensor(n)):
            distance = region.rotated_distance(torch.tensor(m).double(), torch.tensor(n).double())
    slow = own * model["L"] < 2 * math.pi
    return (theta * distance)[slow], own[slow] * model["L"]
