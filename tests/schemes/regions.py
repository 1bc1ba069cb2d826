"""Reading the regions of a segment scheme, pair by pair."""

from __future__ import annotations

import torch

from rope_patch import Scheme


def rotated_distances(scheme: Scheme, length: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """m `(length, 1)`, n `(1, length)` and phi_q(m) - phi_k(n) in float64; NaN where no region holds the pair.

    With d/2 as a last axis if a map of the scheme has a pair axis.
    """
    m, n = torch.arange(length)[:, None], torch.arange(length)[None, :]
    regions = scheme.at_length(length).segments()
    maps = [phi for region in regions for phi in (region.query_map, region.key_map)]
    pairs = {phi.pairs for phi in maps if hasattr(phi, "pairs")}

    def at(phi, positions):
        moved = phi(positions).double()
        return moved[..., None] if pairs and not hasattr(phi, "pairs") else moved

    found = torch.full((length, length, *pairs), torch.nan, dtype=torch.float64)
    for region in regions:
        inside = region.contains(m, n)
        assert found[inside].isnan().all(), "regions overlap"
        inside = inside[..., None] if pairs else inside
        found = torch.where(inside, at(region.query_map, m) - at(region.key_map, n), found)
    return m, n, found
