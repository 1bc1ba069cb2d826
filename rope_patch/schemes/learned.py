"""Learned positions: a table with one trained row per position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch

from rope_patch.errors import InvalidField
from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.rules import AtLeast
from rope_patch.schemes.slots import ModelShape, Target, Tokens
from rope_patch.schemes.tools.tables import rows_at
from rope_patch.typing import NO_WEIGHTS, Weights


@dataclass(frozen=True)
class Learned(Scheme):
    """Add row m of a table to the token at position m. Positions past the last row are an error.

    A model with such a table keeps the checkpoint's rows unless a field changes them. New rows are drawn from a normal
    distribution with the checkpoint's mean and standard deviation in each dimension: they disturb the layers above no
    more than the trained rows do, and they carry no information until they are trained.

    A model without a table gets one. Its rows start at zero, which leaves the word vectors of a pretrained model
    unchanged; gradients still reach every row that is read.

    Args:
        num_positions: rows of a new table, which replaces the checkpoint's own if there is one; default as many as the
            checkpoint has, or L without a table.
        extend: keep the checkpoint's n rows and append random ones up to `extend` rows in total; `extend=1024` lets you
            fine-tune a checkpoint of 512 positions on texts of 1024 tokens.
        seed: seed of the random rows.
        initial_std: standard deviation of the initial rows in a model without a table; default 0. Models trained from
            scratch start with 0.02, as BERT and GPT-2 did.

    A `target` beyond the checkpoint's rows sets `extend`, or `num_positions` in a model without a table.
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

    num_positions: Annotated[int, AtLeast(1)] | None = None
    extend: Annotated[int, AtLeast(1)] | None = None
    seed: Annotated[int, AtLeast(0)] = 0
    initial_std: Annotated[float, AtLeast(0)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_positions is not None and self.extend is not None:
            raise InvalidField(
                f"learned: num_positions={self.num_positions} and extend={self.extend} exclude each other: "
                "num_positions replaces the checkpoint's rows, extend keeps them"
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
                f"learned: extend={self.extend} is not allowed; this model has no position table to extend; use "
                f"num_positions={self.extend} to add one"
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
                f"learned: extend={self.extend} is not allowed; it must be above the checkpoint's {len(native)} "
                "positions"
            )
        return torch.cat([native, self._random_rows(self.extend - len(native), native)])

    def _random_rows(self, count: int, like: torch.Tensor) -> torch.Tensor:
        # drawn on the CPU, so that a seed gives the same rows on every device
        noise = torch.randn(count, like.shape[1], generator=torch.Generator().manual_seed(self.seed))
        wide = like.float()
        return (wide.mean(dim=0) + wide.std(dim=0, correction=0) * noise.to(wide.device)).to(like.dtype)
