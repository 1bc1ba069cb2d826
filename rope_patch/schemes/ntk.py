"""Scale the base: NTK-aware, to an explicit base, or with the current length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch

from rope_patch.errors import InvalidField, NotExpressible
from rope_patch.schemes.base import Scheme, Source, Sweep
from rope_patch.schemes.rules import Above, AtLeast
from rope_patch.schemes.slots import factor_for, nothing_for
from rope_patch.schemes.tools.rotary import inverse_frequencies
from rope_patch.typing import NO_WEIGHTS, Frequencies, Lengths, RotarySpec, Weights


@dataclass(frozen=True)
class NTKScaling(Scheme):
    """Raise the base so that the fastest pair stays and the slowest is slowed by exactly k.

    Fast pairs distinguish neighbours and must not be squeezed; slow pairs distinguish far from near and must stay
    within their trained angles. Changing the base does both, and spreads the change evenly over the pairs in between.

    Args:
        factor: k, at least 1; with a `target` of l tokens, l / L, which keeps only the slowest pair within the angles
            of L tokens. A sweep tries 2 l / L first (docs/sweep.md).
        variant: `"fixed"` is b k^(d/(d-2)), which divides the slowest pair by exactly k; `"old"` is b k, the first form
            of Su's posts, which divides it only by k^((d-2)/d).
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

    factor: Annotated[float, AtLeast(1)]
    variant: Literal["fixed", "old"] = "fixed"

    fields_for = factor_for

    def base(self, rotary: RotarySpec) -> float:
        """The raised base b k^(d/(d-2)), or b k, from the width and the base of `rotary`; `rope_parameters` need
        nothing else.

        Raises:
            InvalidField: the checkpoint rotates only one pair of dimensions.
        """
        exponent = _exponent(self.name, rotary) if self.variant == "fixed" else 1.0
        return rotary.base * self.factor**exponent

    def frequencies(self, rotary: RotarySpec, length: Lengths = None, weights: Weights = NO_WEIGHTS) -> Frequencies:
        return Frequencies(inverse_frequencies(rotary.dim, self.base(rotary)))

    def rope_parameters(self, rotary: RotarySpec) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": self.base(rotary)}


@dataclass(frozen=True)
class AdjustedBase(Scheme):
    """Replace the base by the one to fine-tune with: 500,000 for Llama 2 Long, 1,000,000 for Code Llama.

    Args:
        base: the new `rope_theta`, above 0.
    """

    name = "abf"
    summary = "gives the rotation a base of your choice"
    title = "ABF"
    equation = "b <- base"
    source = Source("Effective Long-Context Scaling of Foundation Models", 2023, "https://arxiv.org/abs/2309.16039")
    aliases = ("rope_abf",)
    regime = "fine-tune"
    sweep = None  # every checkpoint needs its own base; `ntk` tries those that follow from a factor

    base: Annotated[float, Above(0)]

    def frequencies(self, rotary: RotarySpec, length: Lengths = None, weights: Weights = NO_WEIGHTS) -> Frequencies:
        return Frequencies(inverse_frequencies(rotary.dim, self.base))

    def rope_parameters(self, rotary: RotarySpec) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": self.base}


@dataclass(frozen=True)
class DynamicNTK(Scheme):
    """Scale the base by the current length l of each row: plain RoPE up to L, a growing base beyond.

    It is a pure function of the length, without state between calls or coupling between rows; Transformers' `dynamic`
    keeps the largest base it ever saw. In a deep model, cached decoding still differs from recomputation, because
    older hidden states were computed under the old base. Any `target` is reached without changes.

    Args:
        factor: f, at least 1.
        original_max_position_embeddings: L in tokens; default from the checkpoint.
        length: a fixed length in tokens to scale for, which keeps one base for a whole request; default: the length of
            each text.
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

    factor: Annotated[float, AtLeast(1)] = 1.0
    original_max_position_embeddings: Annotated[int, AtLeast(1)] | None = None
    length: Annotated[int, AtLeast(1)] | None = None

    fields_for = nothing_for

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
                f"dynamic_ntk: Transformers' dynamic type reads L = {rotary.training_length} from the config, "
                f"not {self.original_max_position_embeddings}"
            )
        return {"rope_type": "dynamic", "factor": self.factor}


def _exponent(name: str, rotary: RotarySpec) -> float:
    """The exponent d / (d - 2), by which the slowest pair is slowed by exactly the factor, for any number of pairs."""
    if rotary.dim == 2:
        raise InvalidField(f"{name} needs several pairs of dimensions; this checkpoint rotates only one")
    return rotary.dim / (rotary.dim - 2)
