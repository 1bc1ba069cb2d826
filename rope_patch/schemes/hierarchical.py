"""Hierarchical decomposition: a table of n learned positions read as two digits, which makes n^2 of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rope_patch.errors import InvalidField
from rope_patch.schemes.base import Scheme, Source


@dataclass(frozen=True)
class Hierarchical(Scheme):
    """Position (i-1) n + j is a mixture of two vectors, one for the block i and one for the place j in it.

    The vectors u_i are chosen so that the first block is the checkpoint's own table: q_j = alpha u_1 + (1-alpha) u_j =
    alpha p_1 + (p_j - alpha p_1) = p_j. Those n rows are taken over bit for bit, so texts within the training length
    mean what they meant before. Every further row lies in the span of rows that the checkpoint knows.

    Args:
        alpha: weight of the block against the place in it, above 0 and below 1. At 0.5 the positions (i, j) and
            (j, i) would be the same vector, so 0.5 is refused.
        num_positions: rows of the table, n to n^2; default n^2. For 512 rows of 768 numbers that is 262,144 rows or
            0.8 GB in float32: ask for fewer where texts are shorter.
    """

    name = "hierarchical"
    equation = "q_((i-1)n+j) = alpha u_i + (1-alpha) u_j, u_i = (p_i - alpha p_1) / (1-alpha)"
    source = Source(
        "Hierarchical decomposition of position embeddings, so that BERT can read very long texts (in Chinese)",
        2020,
        "https://kexue.fm/archives/7947",
        "https://github.com/bojone/bert4keras",
    )
    absolute = True
    keeps_rows = True

    alpha: float = 0.4
    num_positions: int | None = None

    def __post_init__(self) -> None:
        between = isinstance(self.alpha, (int, float)) and 0 < self.alpha < 1 and self.alpha != 0.5
        self._require("alpha", float, between, "a number above 0 and below 1, and not 0.5")
        self._at_least("num_positions", 1, int, optional=True)

    def embedding(self, native: torch.Tensor) -> torch.Tensor:
        n = len(native)
        rows = n * n if self.num_positions is None else self.num_positions
        if not n <= rows <= n * n:
            raise InvalidField(
                f"hierarchical: num_positions={rows} is not allowed; {n} positions of the checkpoint "
                f"decompose into {n} to {n * n}"
            )
        p = native.to(torch.promote_types(native.dtype, torch.float32))
        u = (p - self.alpha * p[0]) / (1 - self.alpha)
        blocks = u[: -(-rows // n)]
        table = torch.add(self.alpha * blocks[:, None], (1 - self.alpha) * u)
        table[0] = p  # what the equation says, without its rounding
        return table.flatten(0, 1)[:rows]
