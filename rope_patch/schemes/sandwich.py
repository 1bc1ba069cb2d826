"""Sandwich: the inner product of sinusoidal embeddings as a bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.rules import Above, EvenFrom
from rope_patch.schemes.tools.rotary import inverse_frequencies
from rope_patch.typing import NO_WEIGHTS, Weights

_WIDEST = 2**16  # the loop runs over single frequencies, so a larger dimension would take too long


@dataclass(frozen=True)
class Sandwich(Scheme):
    """Keep only the inner product of sinusoidal embeddings, p_m . p_n, which falls with the log of the distance.

    The embeddings are those of section 3.5 of "Attention Is All You Need"; their inner product depends on m - n alone.
    Head h of H divides it by 8h/H, which gives each head its own horizon, as ALiBi's slopes do. Half of embedding_dim
    is subtracted to keep the numbers small; softmax cancels it.

    Args:
        embedding_dim: d of the sinusoidal embedding, even, up to 65536, 128 by default; independent of the model's.
        base: b of its frequencies, 10000 by default.
    """

    name = "sandwich"
    summary = "a bias that falls with the logarithm of distance, nothing learned"
    equation = "(sum_i cos((m-n) b^(-2i/d)) - d/2) H / (8h)"
    source = Source(
        "Dissecting Transformer Length Extrapolation via the Lens of Receptive Field Analysis",
        2022,
        "https://arxiv.org/abs/2212.10356",
    )
    regime = "from-scratch"

    embedding_dim: Annotated[int, EvenFrom(2, _WIDEST)] = 128
    base: Annotated[float, Above(0)] = 10000.0

    def bias(self, distance: torch.Tensor, num_heads: int, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        inv_freq = inverse_frequencies(self.embedding_dim, self.base).to(distance.device)
        # one frequency at a time: all at once would need d/2 numbers for every pair of tokens
        product = sum((distance * frequency).cos() for frequency in inv_freq) - self.embedding_dim / 2
        horizon = 8 / num_heads * torch.arange(1, num_heads + 1, device=distance.device)
        return product / horizon.view(-1, *[1] * distance.ndim)
