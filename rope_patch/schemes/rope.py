"""The two baselines of every table, RoPE and no position; and RoPE with learned frequencies."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.slots import ModelShape
from rope_patch.schemes.tools.rotary import inverse_frequencies
from rope_patch.typing import NO_WEIGHTS, Frequencies, Lengths, RotarySpec, Weights


@dataclass(frozen=True)
class RoPE(Scheme):
    """Rotate queries and keys (rotary position embedding): scores depend on m - n because R(m)^T R(n) = R(n - m).

    Past the training length this is direct extrapolation: the slow pairs meet angles they were never trained on. A bias
    replaces the checkpoint's rotation; list `RoPE()` as well to keep it.
    """

    name = "rope"
    summary = "the rotation itself, as most checkpoints were trained"
    equation = "theta_i = b^(-2i/d)"
    source = Source(
        "RoFormer: Enhanced Transformer with Rotary Position Embedding",
        2021,
        "https://arxiv.org/abs/2104.09864",
        "https://github.com/ZhuiyiTechnology/roformer",
    )
    rope_type = "default"
    sweep = None  # the reference `plain`

    def frequencies(self, rotary: RotarySpec, length: Lengths = None, weights: Weights = NO_WEIGHTS) -> Frequencies:
        return Frequencies(inverse_frequencies(rotary.dim, rotary.base))


@dataclass(frozen=True)
class NoPE(Scheme):
    """Use no position at all: every frequency is zero, so every rotation is the identity.

    The causal mask alone still gives a decoder some information about order, so this is a useful baseline.
    """

    name = "nope"
    summary = "no positions at all; the order comes from the causal mask alone"
    equation = "theta_i = 0"
    source = Source(
        "The Impact of Positional Encoding on Length Generalization in Transformers",
        2023,
        "https://arxiv.org/abs/2305.19466",
        "https://github.com/McGill-NLP/length-generalization",
    )
    regime = "from-scratch"
    stills = True

    def frequencies(self, rotary: RotarySpec, length: Lengths = None, weights: Weights = NO_WEIGHTS) -> Frequencies:
        return Frequencies(torch.zeros(rotary.dim // 2))


@dataclass(frozen=True)
class LearnedRoPE(Scheme):
    """Train the frequencies, starting from those of the checkpoint or of the scheme listed with it.

    The parameter is the logarithm of each pair's speed-up, zero at first. The frequencies of a head span orders of
    magnitude. Equal steps, such as Adam's, change all of them in proportion; equal steps of the frequencies themselves
    would throw the slow ones far off. The post trained the frequencies and found that they barely moved. LeRoPE
    (2607.10134) shares one parameter among all layers and trains it without weight decay.

    Args:
        per_layer: False gives all layers the same frequencies.
    """

    name = "learned_rope"
    summary = "every layer trains the frequencies of its rotation"
    title = "learned RoPE"
    equation = "theta_i <- theta_i exp(w_i), w learned"
    source = Source("Transformer upgrade 2: rotary position embedding", 2021, "https://kexue.fm/archives/8265")
    regime = "fine-tune"
    refines = True
    learned_frequencies = True
    precise = ("log_speed",)
    sweep = None  # untrained it is RoPE

    per_layer: bool = True

    @property
    def shared(self) -> tuple[str, ...]:  # type: ignore[override]
        return () if self.per_layer else self.precise

    def parameters(self, shape: ModelShape, random: torch.Generator) -> dict[str, torch.Tensor]:
        return {"log_speed": torch.zeros(shape.pairs)}

    def refine(self, frequencies: Frequencies, rotary: RotarySpec, weights: Weights = NO_WEIGHTS) -> Frequencies:
        if not weights:
            return frequencies  # their initial values
        speed = weights["log_speed"].float().exp()
        return dataclasses.replace(frequencies, inv_freq=frequencies.inv_freq.to(speed.device) * speed)
