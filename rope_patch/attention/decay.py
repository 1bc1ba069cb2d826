"""Rotations with a decay: queries grow and keys decay, counted from the end of each block of queries.

The score of a pair (m, n) is multiplied by exp(-decay (m - n)), dimension by dimension. Counted from one fixed
position, the factors exp(-decay m) and exp(decay n) overflow or underflow in a long text. Counted from the last query
of a block, a query's factor is at most exp(decay * rows), and a key's factor underflows only where it is negligible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rope_patch.attention.inputs import AttentionInputs, Branch
from rope_patch.errors import UnsupportedPositions
from rope_patch.schemes.tools.rotary import RotaryLayout

ROWS = 1024  # queries per block: small enough for float16, large enough that keys are scaled only a few times
LARGEST_EXPONENT = 80.0  # reached only if positions skip by more than a block; its exp, and so the score, is finite

Output = tuple[torch.Tensor, "torch.Tensor | None"]


@dataclass(frozen=True)
class Decay:
    """The decay of the pairs of one layer, at a `rate` per token of distance, `(d/2,)`."""

    layout: RotaryLayout
    rate: torch.Tensor

    def factor(self, exponent: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """exp(rate * exponent) for each dimension of states `like` `(batch, heads, length, head_dim)`.

        Shape:
            exponent `(batch or 1, length)`, or with d/2 as an additional last axis if pairs differ; returns `(batch or
            1, 1, length, head_dim)`.
        """
        exponent = exponent if exponent.ndim == 3 else exponent[..., None]
        factor = (exponent * self.rate.to(like.device)).clamp(max=LARGEST_EXPONENT).exp()
        return self.layout.wide(factor[:, None].to(like.dtype), like.shape[-1])


def attend_with_decay(inputs: AttentionInputs, decay: Decay, score: Callable[[AttentionInputs], Output]) -> Output:
    """Attention under a decay, block by block. `score` returns the output of a block, `(batch, heads, rows,
    value_dim)`, and its weights or None.

    Raises:
        UnsupportedPositions: heads keep different keys.
    """
    if inputs.by_head:
        raise UnsupportedPositions(
            "heads keep different keys in past_key_values, but a scheme with a decay needs the same keys in all heads; "
            "keep the same keys for all heads of a layer"
        )
    outputs, weights = [], []
    for start in range(0, inputs.q_length, ROWS):
        block = inputs.rows(start, min(start + ROWS, inputs.q_length))
        output, weight = score(block.with_branches(tuple(_decayed(branch, block, decay) for branch in block.branches)))
        outputs.append(output)
        if weight is not None:
            hidden = inputs.kv_length - weight.shape[-1]
            weights.append(torch.nn.functional.pad(weight, (0, hidden)))
    return torch.cat(outputs, dim=2), torch.cat(weights, dim=2) if weights else None


def _decayed(branch: Branch, block: AttentionInputs, decay: Decay) -> Branch:
    m, n = block.query_positions.float(), block.key_positions.float()
    if branch.region is not None:
        m, n = branch.region.rotated_positions(m, n)
    last = m.amax(dim=1, keepdim=True)
    # keys after the last query are hidden and only need to stay finite
    keys = (n[:, branch.first :] - last).clamp(max=0)
    query = branch.query * decay.factor(last - m, branch.query)
    return Branch(branch.region, query, branch.key * decay.factor(keys, branch.key), branch.first)
