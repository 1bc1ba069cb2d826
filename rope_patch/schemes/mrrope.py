"""MrRoPE: positions as numbers of mixed radix, whose middle digits grow uniformly or more and more."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from rope_patch.schemes.base import Scheme, Source, Sweep
from rope_patch.schemes.rules import Above, AtLeast
from rope_patch.schemes.slots import factor_for
from rope_patch.schemes.tools.rotary import inverse_frequencies
from rope_patch.typing import NO_WEIGHTS, Frequencies, Lengths, RotarySpec, Weights


@dataclass(frozen=True)
class MrRoPE(Scheme):
    """Keep pairs that turn often within L, slow those that never complete a turn by k, and spread k over the others.

    Each pair is a digit of the position, and slowing all later pairs by the same number raises its radix. YaRN raises
    the radix of the first digits of its ramp most. The form `pro` raises the radix of the last digits most, and `uni`
    raises all alike (equations 13 to 16 and 26). If no pair turns more than `beta_fast` times, the fastest one is kept;
    if every pair completes its turns, the slowest one is slowed by k. The paper does not define these two cases.

    Args:
        factor: k, at least 1; with a `target` of l tokens, l / L, the paper's S.
        form: `"pro"`, progressive, or `"uni"`, uniform.
        beta_fast: pairs with more rotations than this within L are kept, 32 by default.
        beta_slow: pairs with fewer rotations than this are slowed by k, 1 by default.
    """

    name = "mrrope"
    summary = "keeps fast pairs, slows the others more and more"
    equation = "theta_i k^(-p), p = q(q+1) / (n(n+1)) (pro) or q/n (uni), q = clip(i - l, 0, n); t = 0.1 ln k + 1"
    source = Source("MrRoPE: Mixed-radix Rotary Position Embedding", 2026, "https://arxiv.org/abs/2601.22181")
    sweep = (Sweep("factor", "target", (1, 1.5, 2)),)

    factor: Annotated[float, AtLeast(1)]
    form: Literal["pro", "uni"] = "pro"
    beta_fast: Annotated[float, AtLeast("beta_slow")] = 32.0
    beta_slow: Annotated[float, Above(0)] = 1.0

    fields_for = factor_for

    def frequencies(self, rotary: RotarySpec, length: Lengths = None, weights: Weights = NO_WEIGHTS) -> Frequencies:
        inv_freq = inverse_frequencies(rotary.dim, rotary.base)
        rotations, pairs = rotary.training_length * inv_freq / (2 * math.pi), len(inv_freq)
        last_kept = max(int((rotations > self.beta_fast).sum()) - 1, 0)
        first_slowed = min(int((rotations >= self.beta_slow).sum()), pairs - 1)
        n = max(first_slowed - last_kept, 1)
        q = (torch.arange(pairs).double() - last_kept).clamp(0, n)
        share = q / n if self.form == "uni" else q * (q + 1) / (n * (n + 1))
        slowed = (inv_freq.double() * self.factor**-share).float()
        return Frequencies(slowed, 0.1 * math.log(self.factor) + 1.0)
