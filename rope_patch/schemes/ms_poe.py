"""Ms-PoE: position interpolation with a factor for each head."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated

import torch

from rope_patch.errors import InvalidField
from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.rules import AtLeast, Permutation
from rope_patch.schemes.slots import Checkpoint
from rope_patch.schemes.tools.rotary import inverse_frequencies
from rope_patch.typing import NO_WEIGHTS, Frequencies, Lengths, RotarySpec, Weights


@dataclass(frozen=True)
class MsPoE(Scheme):
    """Squeeze the positions of each query head by its own factor, so that some heads see the middle of a text closer
    than others do.

    The heads that are most aware of positions keep the smallest factors. `rope_patch.rank_heads` measures the order of
    the heads of each layer on your text, and leaves the first two layers unchanged, as the authors do. The authors rank
    the heads again for every prompt. Here the order is a field of the scheme, so that the rows of a batch, a cache and
    a saved folder all use the same order.

    Heads that share a key rotate it by different factors: each call repeats keys and values for every query head, and
    rotates all cached keys. A decoded token therefore costs more than under a scheme without factors by head.

    The authors' code (`utils/modify_arch/llama.py`) differs in three more ways. It divides by H instead of H - 1, so
    that its largest factor is one step below `max_factor`. It indexes the factors by the sorted order of the heads, and
    not by their ranks: head h gets the factor of the rank order[h], which belongs to another head. And it rotates a
    shared key by the factor of the first of its heads, so that the scores of the others depend on the two positions,
    and not on their distance alone.

    Args:
        min_factor, max_factor: k of the head that is most aware of positions, and of the head that is least aware; the
            other heads get factors in equal steps between them.
        order: the heads, from the most aware to the least aware; default the order of their numbers.
    """

    name = "ms_poe"
    summary = "squeezes positions by a factor for each head"
    title = "Ms-PoE"
    equation = "theta_i / k_h, k_h = k_min + (k_max - k_min) r_h / (H - 1), r_h = rank of head h"
    source = Source(
        "Found in the Middle: How Language Models Use Long Contexts Better via Plug-and-Play Positional Encoding",
        2024,
        "https://arxiv.org/abs/2403.04797",
        "https://github.com/VITA-Group/Ms-PoE",
    )
    by_head = True
    sweep = None  # it does not reach longer texts, and `rank_heads` measures its order

    min_factor: Annotated[float, AtLeast(1)] = 1.2
    max_factor: Annotated[float, AtLeast("min_factor")] = 1.8
    order: Annotated[tuple[int, ...], Permutation("head")] | None = None

    def resolve(self, checkpoint: Checkpoint) -> Scheme:
        heads = checkpoint.num_heads
        if self.order is not None and len(self.order) != heads:
            raise InvalidField(f"ms_poe: order has {len(self.order)} heads; this checkpoint has {heads}")
        return dataclasses.replace(self, order=self.order or tuple(range(heads)))

    def frequencies(self, rotary: RotarySpec, length: Lengths = None, weights: Weights = NO_WEIGHTS) -> Frequencies:
        ranks = torch.tensor(self.order or (0,)).argsort()
        steps = torch.linspace(self.min_factor, self.max_factor, len(ranks), dtype=torch.float64)
        return Frequencies((inverse_frequencies(rotary.dim, rotary.base) / steps[ranks].float()[:, None])[None])
