"""Scaling the base: NTK-aware, by an explicit base, and by the current length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rope_patch.errors import InvalidField, NotExpressible
from rope_patch.schemes.base import Scheme, Source, Sweep
from rope_patch.schemes.slots import Target
from rope_patch.schemes.tools.rotary import inverse_frequencies
from rope_patch.typing import NO_WEIGHTS, Frequencies, Lengths, RotarySpec, Weights


@dataclass(frozen=True)
class NTKScaling(Scheme):
    """Raise the base so that the fastest pair stays and the slowest is slowed by exactly k.

    Fast pairs tell neighbours apart and must not be squeezed; slow pairs tell far from near and must not leave the
    angles they were trained on. Changing the base does both, and spreads the change evenly between.

    Args:
        factor: k, at least 1; with a `target` of l tokens l / L, which keeps the slowest pair, and it alone, at the
            angles of L tokens. A sweep tries 2 l / L first (docs/sweep.md).
        variant: `"fixed"` is b k^(d/(d-2)), the slowest pair divided by exactly k; `"old"` is b k, the first form of
            Su's posts, whose slowest pair is divided by k^((d-2)/d) only.
    """

    name = "ntk"
    summary = "raises the base so that only the slowest pair is slowed by k"
    title = "NTK"
    equation = "b <- b k^(d/(d-2))"
    source = Source(
        "NTK-Aware Scaled RoPE (bloc97, July 2023); Transformer upgrade 10: RoPE is a base-beta encoding",
        2023,
        "https://kexue.fm/archives/9675",
        "https://github.com/bojone/rerope",
    )
    aliases = ("ntk_aware",)
    sweep = (Sweep("factor", "target", (2, 1, 1.5, 3)),)

    factor: float
    variant: str = "fixed"

    def __post_init__(self) -> None:
        self._at_least("factor", 1, float)
        self._one_of("variant", ("fixed", "old"))

    @classmethod
    def fields_for(cls, target: Target) -> dict[str, Any]:
        return {"factor": target.factor()}

    def base(self, rotary: RotarySpec) -> float:
        """The raised base, of the width and the base of `rotary`: all that `rope_parameters` need to say this scheme.

        Raises:
            InvalidField: it rotates one pair of dimensions alone.
        """
        exponent = _exponent(self.name, rotary) if self.variant == "fixed" else 1.0
        return rotary.base * self.factor**exponent

    def frequencies(self, rotary: RotarySpec, length: Lengths = None, weights: Weights = NO_WEIGHTS) -> Frequencies:
        return Frequencies(inverse_frequencies(rotary.dim, self.base(rotary)))

    def rope_parameters(self, rotary: RotarySpec) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": self.base(rotary)}


@dataclass(frozen=True)
class AdjustedBase(Scheme):
    """Another base, as chosen by who trained or will fine-tune: 500,000 for Llama 2 Long, 1,000,000 for Code Llama.

    Args:
        base: the new `rope_theta`, above 0.
    """

    name = "abf"
    summary = "gives the rotation a base of your choice"
    title = "ABF"
    equation = "b <- base"
    source = Source("Effective Long-Context Scaling of Foundation Models", 2023, "https://arxiv.org/abs/2309.16039")
    regime = "fine-tune"
    sweep = None  # a base of its own for every checkpoint; `ntk` tries those that a factor gives

    base: float

    def __post_init__(self) -> None:
        self._above_zero("base")

    def frequencies(self, rotary: RotarySpec, length: Lengths = None, weights: Weights = NO_WEIGHTS) -> Frequencies:
        return Frequencies(inverse_frequencies(rotary.dim, self.base))

    def rope_parameters(self, rotary: RotarySpec) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": self.base}


@dataclass(frozen=True)
class DynamicNTK(Scheme):
    """NTK scaling by the current length l of each row: plain RoPE up to L, a growing base beyond.

    A pure function of the length: it holds no state between calls and couples no rows. Transformers' own `dynamic`
    keeps the largest base it ever saw. Decoding with a cache can still not equal recomputation in a deep model,
    because older hidden states were made under the old base. It reaches any `target` as it is.

    Args:
        factor: f, at least 1.
        original_max_position_embeddings: L in tokens; default from the checkpoint.
        length: a length in tokens to scale for, whatever the text's length is: the way to keep one base for a whole
            request. Default: follow the text.
    """

    name = "dynamic_ntk"
    summary = "raises the base as the text grows; plain RoPE up to L"
    title = "dynamic NTK"
    equation = "b <- b (f l / L - (f - 1))^(d/(d-2)) for l > L"
    source = Source(
        "Dynamically Scaled RoPE (emozilla, July 2023); `dynamic` in Transformers",
        2023,
        "https://huggingface.co/docs/transformers/main/en/internal/rope_utils",
    )
    rope_type = "dynamic"
    sweep = (Sweep("factor", "one", (1, 2, 4)),)

    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        self._at_least("factor", 1, float)
        self._at_least("original_max_position_embeddings", 1, int, optional=True)
        self._at_least("length", 1, int, optional=True)

    @classmethod
    def fields_for(cls, target: Target) -> dict[str, Any]:
        return {}

    @property
    def length_dependent(self) -> bool:  # type: ignore[override]
        return self.length is None

    def frequencies(self, rotary: RotarySpec, length: Lengths = None, weights: Weights = NO_WEIGHTS) -> Frequencies:
        trained = self.original_max_position_embeddings or rotary.training_length
        if self.length is not None:
            length = torch.tensor([self.length])
        if length is None:
            length = torch.tensor([trained])
        growth = self.factor * length.clamp(min=trained).float() / trained - (self.factor - 1)
        base = rotary.base * growth ** _exponent(self.name, rotary)
        inv_freq = inverse_frequencies(rotary.dim, base[:, None])
        return Frequencies(inv_freq if self.length_dependent else inv_freq[0])

    def rope_parameters(self, rotary: RotarySpec) -> dict[str, Any]:
        if self.length is not None:
            raise NotExpressible("dynamic_ntk: Transformers' dynamic type cannot be fixed to one length")
        if self.original_max_position_embeddings not in (None, rotary.training_length):
            raise NotExpressible(
                f"dynamic_ntk: Transformers' dynamic type takes L = {rotary.training_length} from the config, "
                f"not {self.original_max_position_embeddings}"
            )
        return {"rope_type": "dynamic", "factor": self.factor}


def _exponent(name: str, rotary: RotarySpec) -> float:
    """d / (d - 2), by which the slowest pair becomes slower by the factor, whatever the number of pairs."""
    if rotary.dim == 2:
        raise InvalidField(f"{name} needs several pairs of dimensions, and this checkpoint rotates one alone")
    return rotary.dim / (rotary.dim - 2)
