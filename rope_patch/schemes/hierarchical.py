"""Hierarchical decomposition: two digits per position turn a table of n learned positions into n^2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch

from rope_patch.errors import InvalidField
from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.rules import AtLeast, Between
from rope_patch.schemes.slots import ModelShape, Target, Tokens
from rope_patch.schemes.tools.tables import require_positions
from rope_patch.typing import NO_WEIGHTS, Weights


@dataclass(frozen=True)
class Hierarchical(Scheme):
    """Mix two vectors for position (i-1) n + j: one for block i, and one for place j within it.

    The vectors u_i are chosen so that the first block is the checkpoint's own table: q_j = alpha u_1 + (1-alpha) u_j =
    alpha p_1 + (p_j - alpha p_1) = p_j. Those n rows are copied bit for bit, so texts within the training length keep
    their meaning. All further rows lie in the span of the checkpoint's rows.

    A model without a table learns the n = L rows. Rows of further positions are mixed when they are read, and train the
    rows they are mixed from. The post extends BERT's trained table, so this form and its initial values are our choice.

    Args:
        alpha: weight of the block against the place within it, above 0 and below 1. At 0.5 the positions (i, j) and
            (j, i) would share a vector, so 0.5 is refused.
        num_positions: number of positions, n to n^2; default n^2; with a `target`, as many as its tokens, but at least
            n. In a model that stores them in a table, 512 rows of 768 numbers grow to 262,144 or 0.8 GB in float32: set
            fewer where texts are shorter.
        initial_std: standard deviation of the initial rows in a model without a table; default 0, which leaves the word
            vectors of a pretrained model unchanged. Models trained from scratch start with 0.02.
    """

    name = "hierarchical"
    summary = "builds n x n positions from a trained table of n"
    equation = "q_((i-1)n+j) = alpha u_i + (1-alpha) u_j, u_i = (p_i - alpha p_1) / (1-alpha)"
    source = Source(
        "Hierarchical decomposition of position embeddings, so that BERT can read very long texts (in Chinese)",
        2020,
        "https://kexue.fm/archives/7947",
        "https://github.com/bojone/bert4keras",
    )
    absolute = True
    keeps_rows = True
    shared = ("base_positions",)
    sweep = None  # for position tables, where the sliding window is not a reference

    alpha: Annotated[float, Between(0, 1, excluded=0.5)] = 0.4
    num_positions: Annotated[int, AtLeast(1)] | None = None
    initial_std: Annotated[float, AtLeast(0)] = 0.0

    @classmethod
    def fields_for(cls, target: Target) -> dict[str, Any]:
        n = target.training_length
        if target.tokens > n * n:
            raise InvalidField(
                f"hierarchical: target={target.tokens} is out of reach; the checkpoint's {n} positions decompose into "
                f"at most {n * n}"
            )
        return {"num_positions": max(target.tokens, n)}

    def parameters(self, shape: ModelShape, random: torch.Generator) -> dict[str, torch.Tensor]:
        n = shape.training_length
        self._count(n)
        return {"base_positions": self.initial_std * torch.randn(n, shape.hidden_size, generator=random)}

    def embedding(self, tokens: Tokens, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        x, p = tokens.states, weights["base_positions"]
        n = len(p)
        require_positions(tokens.positions, self._count(n), self.name)
        block = tokens.positions.div(n, rounding_mode="floor")
        return (x + self._mixture(p, block, tokens.positions % n)).to(x.dtype)

    def rows(self, native: torch.Tensor) -> torch.Tensor:
        n = len(native)
        rows = self._count(n)
        places = torch.arange(n, device=native.device)
        return self._mixture(native, places[: -(-rows // n), None], places).flatten(0, 1)[:rows]

    def _count(self, n: int) -> int:
        """The number of positions that n rows form, checked against the field `num_positions`."""
        count = n * n if self.num_positions is None else self.num_positions
        if not n <= count <= n * n:
            raise InvalidField(
                f"hierarchical: num_positions={count} is not allowed; the checkpoint's {n} positions "
                f"decompose into {n} to {n * n}"
            )
        return count

    def _mixture(self, p: torch.Tensor, block: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """The vector q of two digits, counted from 0, `(*their broadcast shape, hidden)`, in float32 at least."""
        wide = torch.promote_types(p.dtype, torch.float32)
        first, of_block, of_place = (p[index].to(wide) for index in (0, block, place))
        u_block, u_place = ((row - self.alpha * first) / (1 - self.alpha) for row in (of_block, of_place))
        mixed = torch.add(self.alpha * u_block, (1 - self.alpha) * u_place)
        return torch.where((block == 0)[..., None], of_place, mixed)  # equals the equation, without its rounding
