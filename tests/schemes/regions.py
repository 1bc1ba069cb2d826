"""Reading the regions of a segment scheme, pair by pair."""

from __future__ import annotations

import torch

from rope_patch import Scheme


def rotated_distances(scheme: Scheme, length: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """m `(length, 1)`, n `(1, length)` and phi_q(m) - phi_k(n) in float64; NaN where no region holds the pair."""
    m, n = torch.arange(length)[:, None], torch.arange(length)[None, :]
    found = torch.full((length, length), torch.nan, dtype=torch.float64)
    for region in scheme.segments():
        inside = region.contains(m, n)
        assert found[inside].isnan().all(), "regions overlap"
        found = torch.where(inside, region.query_map(m).double() - region.key_map(n).double(), found)
    return m, n, found
