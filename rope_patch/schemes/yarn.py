"""YaRN and its parts: interpolate the slow pairs, leave the fast ones, and sharpen the softmax."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import torch

from rope_patch.errors import NotExpressible
from rope_patch.schemes.base import Scheme, Source, Sweep, Sweeps
from rope_patch.schemes.rules import Above, AtLeast
from rope_patch.schemes.slots import factor_for, nothing_for
from rope_patch.schemes.tools.rotary import periods
from rope_patch.typing import NO_WEIGHTS, Frequencies, Lengths, RotarySpec, Weights

_PAPER = Source(
    "YaRN: Efficient Context Window Extension of Large Language Models",
    2023,
    "https://arxiv.org/abs/2309.00071",
    "https://github.com/jquesnelle/yarn",
)

_Number = TypeVar("_Number", float, "torch.Tensor")


@dataclass(frozen=True)
class YaRN(Scheme):
    """Scale frequencies by parts (NTK-by-parts), with a temperature. Pairs that turn often within L keep their
    frequency, pairs that never complete a turn are interpolated, and a ramp joins the two. All scores grow with the log
    of k, because a longer context spreads the softmax thinner.

    Args:
        factor: k, at least 1; with a `target` of l tokens, l / L, the paper's s.
        beta_fast: pairs with more rotations than this within L are kept, 32 by default.
        beta_slow: pairs with fewer rotations than this are interpolated, 1 by default.
        attention_factor: multiplies cos and sin; default 0.1 ln k + 1.
        truncate: round the ends of the ramp outwards to whole dimensions, True by default.
        mscale, mscale_all_dim: if both are set, DeepSeek's form of the temperature,
            (0.1 mscale ln k + 1) / (0.1 mscale_all_dim ln k + 1).
        original_max_position_embeddings: L in tokens; default from the checkpoint.
        ramp: `"index"` is linear in the index of the dimension, as in all released code; `"rotations"` is linear in
            the number of rotations, as in the paper (equations 17 and 18).
    """

    name = "yarn"
    summary = "keeps fast pairs, interpolates slow ones and sharpens attention"
    equation = "theta_i/k r_i + theta_i (1 - r_i), r = ramp(low, high); t = 0.1 ln k + 1"
    source = _PAPER
    aliases = ("deepseek_yarn",)
    rope_type: ClassVar[str | None] = "yarn"
    sweep: ClassVar[Sweeps] = (Sweep("factor", "target", (1, 1.5, 2)),)

    factor: Annotated[float, AtLeast(1)]
    beta_fast: Annotated[float, AtLeast("beta_slow")] = 32.0
    beta_slow: Annotated[float, Above(0)] = 1.0
    attention_factor: Annotated[float, Above(0)] | None = None
    truncate: bool = True
    mscale: Annotated[float, Above(0)] | None = None
    mscale_all_dim: Annotated[float, Above(0)] | None = None
    original_max_position_embeddings: Annotated[int, AtLeast(1)] | None = None
    ramp: Literal["index", "rotations"] = "index"

    fields_for = factor_for

    def frequencies(self, rotary: RotarySpec, length: Lengths = None, weights: Weights = NO_WEIGHTS) -> Frequencies:
        return Frequencies(self._blend(rotary, self.factor), self._attention_scaling(math.log(self.factor)))

    def _blend(self, rotary: RotarySpec, factor: float | torch.Tensor) -> torch.Tensor:
        """The blended frequencies theta_i/k r_i + theta_i (1 - r_i), `(d/2,)`, or `(batch, d/2)` for factors `(batch,
        1)`.
        """
        period = periods(rotary.dim, rotary.base)
        keep = 1 - self._ramp(rotary)
        if isinstance(factor, torch.Tensor):
            period, keep = period.to(factor.device), keep.to(factor.device)
        extrapolated, interpolated = 1.0 / period, 1.0 / (factor * period)
        return interpolated * (1 - keep) + extrapolated * keep

    def _ramp(self, rotary: RotarySpec) -> torch.Tensor:
        """The ramp r, `(d/2,)`: 0 for pairs that are kept, 1 for pairs that are interpolated."""
        trained = self._trained(rotary)
        if self.ramp == "rotations":
            rotations = trained / (2 * math.pi * periods(rotary.dim, rotary.base))
            span = max(self.beta_fast - self.beta_slow, 0.001)
            return 1 - ((rotations - self.beta_slow) / span).clamp(0, 1)

        def dimension(rotations: float) -> float:
            return rotary.dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(rotary.base))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary.dim - 1)
        if low == high:
            high += 0.001  # a step instead of a division by zero
        return ((torch.arange(rotary.dim // 2).float() - low) / (high - low)).clamp(0, 1)

    def _trained(self, rotary: RotarySpec) -> int:
        return self.original_max_position_embeddings or rotary.training_length

    def _attention_scaling(self, log_factor: _Number) -> float | _Number:
        if self.attention_factor is not None:
            return self.attention_factor
        if isinstance(log_factor, float):
            log_factor = max(log_factor, 0.0)  # a checkpoint's factor may be below 1, which sharpens nothing
        if self.mscale and self.mscale_all_dim:
            return (0.1 * self.mscale * log_factor + 1.0) / (0.1 * self.mscale_all_dim * log_factor + 1.0)
        return 0.1 * log_factor + 1.0

    def rope_parameters(self, rotary: RotarySpec) -> dict[str, Any]:
        if self.ramp != "index":
            raise NotExpressible("yarn: the ramp of Transformers is linear in the index, not in rotations")
        parameters = super().rope_parameters(rotary)
        del parameters["ramp"]
        return parameters


@dataclass(frozen=True)
class NTKByParts(Scheme):
    """Blend frequencies as YaRN does, without its temperature; the name is the paper's.

    `part_ntk` in the authors' repository is a different blend of three kinds of frequencies: it keeps pairs with more
    than 16 rotations within L, interpolates those with fewer than 0.75, and blends the others with the raised base of
    `ntk`. At L = 4096 and k = 32 the two differ by up to 0.62 of a frequency.

    Args:
        factor: k, at least 1; with a `target` of l tokens, l / L, the paper's s.
        beta_fast: pairs with more rotations than this within L are kept, 32 by default.
        beta_slow: pairs with fewer rotations than this are interpolated, 1 by default.
    """

    name = "ntk_by_parts"
    summary = "keeps fast pairs and interpolates slow ones"
    title = "NTK-by-parts"
    equation = "theta_i/k r_i + theta_i (1 - r_i), r = ramp(low, high)"
    source = _PAPER
    sweep = (Sweep("factor", "target", (1, 1.5, 2)),)

    factor: Annotated[float, AtLeast(1)]
    beta_fast: Annotated[float, AtLeast("beta_slow")] = 32.0
    beta_slow: Annotated[float, Above(0)] = 1.0

    fields_for = factor_for

    def _as_yarn(self) -> YaRN:
        return YaRN(self.factor, self.beta_fast, self.beta_slow, attention_factor=1.0)

    def frequencies(self, rotary: RotarySpec, length: Lengths = None, weights: Weights = NO_WEIGHTS) -> Frequencies:
        return self._as_yarn().frequencies(rotary)

    def rope_parameters(self, rotary: RotarySpec) -> dict[str, Any]:
        return self._as_yarn().rope_parameters(rotary)


@dataclass(frozen=True)
class DynamicYaRN(YaRN):
    """Apply YaRN with a k that follows the current length l of each row: max(1, l/L), or `factor` if that is larger.
    Any `target` is reached without changes.

    Args:
        factor: minimum of k, at least 1, 1 by default.
        length: a fixed length in tokens to scale for, which keeps one k for a whole request; default: the length of
            each text. The other fields mean the same as in `YaRN`.
    """

    name = "dynamic_yarn"
    summary = "YaRN whose factor follows the length of the text"
    title = "dynamic YaRN"
    equation = "YaRN with k = max(1, l/L)"
    rope_type = None
    sweep = (Sweep(),)

    factor: Annotated[float, AtLeast(1)] = 1.0
    length: Annotated[int, AtLeast(1)] | None = None

    fields_for = nothing_for

    @property
    def length_dependent(self) -> bool:  # type: ignore[override]
        return self.length is None

    def frequencies(self, rotary: RotarySpec, length: Lengths = None, weights: Weights = NO_WEIGHTS) -> Frequencies:
        trained = self._trained(rotary)
        if self.length is not None or length is None:
            factor = max(self.factor, (self.length or trained) / trained)
            return Frequencies(self._blend(rotary, factor), self._attention_scaling(math.log(factor)))
        factors = (length.float() / trained).clamp(min=self.factor)[:, None]
        return Frequencies(self._blend(rotary, factors), self._attention_scaling(factors.log()))

    def rope_parameters(self, rotary: RotarySpec) -> dict[str, Any]:
        raise NotExpressible("dynamic_yarn: Transformers has no yarn that follows the length")
