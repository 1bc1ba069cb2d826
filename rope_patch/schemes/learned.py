"""Learned positions: a table with one trained row per position."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rope_patch.errors import InvalidField
from rope_patch.schemes.base import Scheme, Source


@dataclass(frozen=True)
class Learned(Scheme):
    """Row m of a table is added to the token at position m; past the last row there is nothing.

    Without fields it is the checkpoint's own table. New rows are drawn from a normal distribution with the mean and
    the standard deviation of the checkpoint's rows in each dimension: they disturb the layers above no more than the
    trained ones do, and they mean nothing until they are trained.

    Args:
        num_positions: replace the table by one of so many random rows, to train from scratch.
        extend: keep the checkpoint's n rows and add random ones after them, so that the table has `extend` rows in
            all; `extend=1024` lets a checkpoint of 512 positions be fine-tuned on texts of 1024 tokens.
        seed: of the random rows.
    """

    name = "learned"
    equation = "x_m + p_m"
    source = Source(
        "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding",
        2018,
        "https://arxiv.org/abs/1810.04805",
        "https://github.com/google-research/bert",
    )
    regime = "fine-tune"
    absolute = True

    num_positions: int | None = None
    extend: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self._at_least("num_positions", 1, int, optional=True)
        self._at_least("extend", 1, int, optional=True)
        self._at_least("seed", 0, int)
        if self.num_positions is not None and self.extend is not None:
            raise InvalidField(
                f"learned: num_positions={self.num_positions} and extend={self.extend} exclude each other: "
                "the first replaces the checkpoint's rows, the second keeps them"
            )

    @property
    def keeps_rows(self) -> bool:  # type: ignore[override]
        return self.num_positions is None

    def embedding(self, native: torch.Tensor) -> torch.Tensor:
        if self.num_positions is not None:
            return self._random_rows(self.num_positions, native)
        if self.extend is None:
            return native
        if self.extend <= len(native):
            raise InvalidField(
                f"learned: extend={self.extend} is not allowed; the checkpoint has {len(native)} positions, "
                "extend must be more"
            )
        return torch.cat([native, self._random_rows(self.extend - len(native), native)])

    def _random_rows(self, count: int, like: torch.Tensor) -> torch.Tensor:
        # drawn on the CPU, so that a seed means the same rows on every device
        noise = torch.randn(count, like.shape[1], generator=torch.Generator().manual_seed(self.seed))
        wide = like.float()
        return (wide.mean(dim=0) + wide.std(dim=0, correction=0) * noise.to(wide.device)).to(like.dtype)
