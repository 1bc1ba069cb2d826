"""LongRoPE: one factor per pair, found by search."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from rope_patch.errors import InvalidField, NotExpressible
from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.rules import Above, AtLeast, NumbersAboveZero
from rope_patch.schemes.slots import Checkpoint, ModelShape, factor_for
from rope_patch.schemes.tools.rotary import periods
from rope_patch.typing import NO_WEIGHTS, Frequencies, Lengths, RotarySpec, Weights


@dataclass(frozen=True)
class LongRoPE(Scheme):
    """Slow each pair by its own factor, from one list for texts up to L and another for longer ones.

    Args:
        short_factor, long_factor: one number above 0 per pair (d/2), found by search; there is no default.
        factor: k for the temperature, at least 1; default the checkpoint's maximum length over L; with a `target` of l
            tokens, l / L.
        attention_factor: multiplies cos and sin; default sqrt(1 + ln k / ln L).
        original_max_position_embeddings: L in tokens; default from the checkpoint.
        length: a length in tokens that selects the list for a whole request; default: the length of each text.
        mixed: each document of a packed row selects its own list, so that one training run teaches both lists
            (LongRoPE2, arXiv 2502.20082, section 3.3). If False, the longest document of a row selects the list of the
            whole row. A forward with a cache has one text in a row.
        learned: each layer trains the factors, starting from the given ones; with `length`, only the factors of one
            list.
    """

    name = "longrope"
    summary = "slows every pair by a factor of its own, found by search"
    equation = "theta_i / lambda_i, lambda = short_factor up to L, long_factor beyond; t = sqrt(1 + ln k / ln L)"
    source = Source(
        "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens",
        2024,
        "https://arxiv.org/abs/2402.13753",
        "https://github.com/microsoft/LongRoPE",
    )
    regime = "fine-tune"
    aliases = ("su",)
    rope_type = "longrope"
    precise = ("short_factor", "long_factor")
    sweep = None  # `rope-patch search` finds a factor for each pair

    short_factor: Annotated[tuple[float, ...], NumbersAboveZero("pair")]
    long_factor: Annotated[tuple[float, ...], NumbersAboveZero("pair")]
    factor: Annotated[float, AtLeast(1)] | None = None
    attention_factor: Annotated[float, Above(0)] | None = None
    original_max_position_embeddings: Annotated[int, AtLeast(2)] | None = None
    length: Annotated[int, AtLeast(1)] | None = None
    learned: bool = False
    mixed: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.short_factor) != len(self.long_factor):
            raise InvalidField(
                f"longrope: short_factor has {len(self.short_factor)} numbers, long_factor {len(self.long_factor)}"
            )

    fields_for = factor_for

    def resolve(self, checkpoint: Checkpoint) -> Scheme:
        if self.factor is not None:
            return self
        trained = self.original_max_position_embeddings or checkpoint.training_length
        filled = copy.copy(self)  # not `replace`: a checkpoint may have values that no new scheme may have
        object.__setattr__(filled, "factor", max(1.0, checkpoint.max_length / trained))
        return filled

    @property
    def learns(self) -> bool:
        return self.learned

    @property
    def learned_frequencies(self) -> bool:  # type: ignore[override]
        return self.learned

    @property
    def length_dependent(self) -> bool:  # type: ignore[override]
        return self.length is None and (self.learned or self.short_factor != self.long_factor)

    @property
    def by_document(self) -> bool:  # type: ignore[override]
        return self.mixed and self.length_dependent

    def parameters(self, shape: ModelShape, random: torch.Generator) -> dict[str, torch.Tensor]:
        if not self.learned:
            return {}
        lists = {"short_factor": self.short_factor, "long_factor": self.long_factor}
        self._check_numbers(shape.pairs)
        if self.length is not None:
            is_long = self.length > (self.original_max_position_embeddings or shape.training_length)
            del lists["short_factor" if is_long else "long_factor"]
        return {name: torch.tensor(factors) for name, factors in lists.items()}

    def frequencies(self, rotary: RotarySpec, length: Lengths = None, weights: Weights = NO_WEIGHTS) -> Frequencies:
        self._check_numbers(rotary.dim // 2)
        trained = self.original_max_position_embeddings or rotary.training_length
        short, long = (self._slowed(rotary, name, weights) for name in ("short_factor", "long_factor"))
        temperature = self._temperature(trained)
        if self.length is not None:
            return Frequencies(long if self.length > trained else short, temperature)
        if length is None:
            return Frequencies(short, temperature)
        chosen = torch.where((length > trained)[..., None], long.to(length.device), short.to(length.device))
        return Frequencies(chosen if length.ndim == 1 else chosen[:, None], temperature)

    def _slowed(self, rotary: RotarySpec, name: str, weights: Weights) -> torch.Tensor:
        """The frequencies theta_i / lambda_i, with the factors of the field `name` or their trained values."""
        period = periods(rotary.dim, rotary.base)
        factors = weights[name].float() if name in weights else torch.tensor(getattr(self, name))
        return 1.0 / (factors * period.to(factors.device))

    def _check_numbers(self, pairs: int) -> None:
        """Refuse a list without a number for each of the checkpoint's `pairs`; a damaged config has any number."""
        for name in ("short_factor", "long_factor"):
            if (numbers := len(getattr(self, name))) != pairs:
                raise InvalidField(f"longrope: {name} has {numbers} numbers; this checkpoint has {pairs} pairs")

    def _temperature(self, trained: int) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor is None or self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(trained))

    def rope_parameters(self, rotary: RotarySpec) -> dict[str, Any]:
        if self.length is not None:
            raise NotExpressible("longrope: Transformers' longrope cannot be fixed to one length")
        if self.learned:
            raise NotExpressible("longrope: the factors of Transformers' longrope are the same in all layers")
        parameters = super().rope_parameters(rotary)
        del parameters["learned"], parameters["mixed"]  # a text of its own selects the same list
        return parameters
