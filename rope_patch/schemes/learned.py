"""Learned positions: a table with one trained row per position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rope_patch.errors import InvalidField
from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.slots import ModelShape, Target, Tokens
from rope_patch.schemes.tools.tables import rows_at
from rope_patch.typing import NO_WEIGHTS, Weights


@dataclass(frozen=True)
class Learned(Scheme):
    """Row m of a table is added to the token at position m; past the last row there is nothing.

    Where a model has such a table, it is the checkpoint's own as long as no field says otherwise. New rows are drawn
    from a normal distribution with the mean and the standard deviation of the checkpoint's rows in each dimension:
    they disturb the layers above no more than the trained ones do, and they mean nothing until they are trained.

    Where a model has none, it gets one. Its rows start as zeros, which leaves the word vectors of a pretrained model
    as they are; gradients reach every row that is read all the same.

    Args:
        num_positions: rows of a new table, which stands in the place of the checkpoint's own if there is one; default
            as many as the checkpoint has, or L where there is none.
        extend: keep the checkpoint's n rows and add random ones after them, so that the table has `extend` rows in
            all; `extend=1024` lets a checkpoint of 512 positions be fine-tuned on texts of 1024 tokens.
        seed: of the random rows beside or in the place of the checkpoint's own.
        initial_std: standard deviation of the rows that a model without a table starts with. Models that are trained
            from scratch start with 0.02, as BERT and GPT-2 did; default 0.

    With a `target` beyond the checkpoint's rows, `extend` is the target; `num_positions` where there is no table.
    """

    name = "learned"
    summary = "a table with a learned vector for each position"
    equation = "x_m + p_m"
    source = Source(
        "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding",
        2018,
        "https://arxiv.org/abs/1810.04805",
        "https://github.com/google-research/bert",
    )
    regime = "fine-tune"
    absolute = True
    shared = ("position_embeddings",)
    sweep = None  # learned: there is nothing to measure before it is trained

    num_positions: int | None = None
    extend: int | None = None
    seed: int = 0
    initial_std: float = 0.0

    def __post_init__(self) -> None:
        self._at_least("num_positions", 1, int, optional=True)
        self._at_least("extend", 1, int, optional=True)
        self._at_least("seed", 0, int)
        self._at_least("initial_std", 0, float)
        if self.num_positions is not None and self.extend is not None:
            raise InvalidField(
                f"learned: num_positions={self.num_positions} and extend={self.extend} exclude each other: "
                "the first replaces the checkpoint's rows, the second keeps them"
            )

    @classmethod
    def fields_for(cls, target: Target) -> dict[str, Any]:
        if target.tokens <= target.training_length or "num_positions" in target.given:
            return {}
        return {"extend" if target.checkpoint.has_table else "num_positions": target.tokens}

    @property
    def keeps_rows(self) -> bool:  # type: ignore[override]
        return self.num_positions is None

    def parameters(self, shape: ModelShape, random: torch.Generator) -> dict[str, torch.Tensor]:
        if self.extend is not None:
            raise InvalidField(
                f"learned: extend={self.extend} is not allowed; this model has no table of positions whose rows could "
                f"be kept, num_positions={self.extend} gives it one"
            )
        size = (self.num_positions or shape.training_length, shape.hidden_size)
        return {"position_embeddings": self.initial_std * torch.randn(size, generator=random)}

    def embedding(self, tokens: Tokens, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        x = tokens.states
        return (x + rows_at(weights["position_embeddings"], tokens.positions, self.name)).to(x.dtype)

    def rows(self, native: torch.Tensor) -> torch.Tensor:
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
