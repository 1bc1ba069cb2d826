"""Positions that skip, so that rows of the training length show the distances of a longer one.

PoSE: a row of L tokens is cut at random into N chunks, and the positions of chunk i are moved on by u_i:

    u_0 = 0,    u_i ~ U{u_(i-1), ..., L_target - L}        positions of chunk i:  st_i + u_i, st_i + 1 + u_i, ...

where st_i is the place of the chunk in the row (eq. 3 and 4; N = 2 in the paper's experiments). Within a chunk
positions count as ever; between chunks every distance below L_target is met sooner or later, at the cost of rows of L.

Source: Zhu et al. 2023, "PoSE: Efficient Context Window Extension of LLMs via Positional Skip-wise Training",
arXiv 2309.10400; the authors' code: dwzhu-pku/PoSE, src/train_pose.py.

What the paper leaves open, and where the authors' code or this one differ:

* How long the chunks are. The paper: lengths vary from row to row. The code, for two chunks: the first one is at most
  half of the row. Here every place of the cuts is equally likely.
* What the chunks hold. Paper and code skip text as well, chunk i beginning v_i tokens later (eq. 5); the code draws it
  from a text of at most five times L. Here v_i = 0, the text goes on without a gap, so that every token is a target
  once in each epoch. Table 4 of the paper compares the two for 2k to 16k: perplexities differ by 0.08 at most.
* u_0 was drawn too in the first release of the code, and is 0 since its revision of October 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.description import check_at_least
from rope_patch.finetuning.rows import seeded


@dataclass(frozen=True)
class PoSE:
    """Skipping positions for each row: the `positions` of `RowSettings`.

    A piece shorter than the row is stretched over the whole target length as well.

    Attributes:
        target_length: L_target, one more than the highest position.
        chunks: N; a shorter piece has as many as it has tokens.
        seed: of the draws.
    """

    target_length: int
    chunks: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, 1, "target_length", "chunks")

    def __call__(self, pairs: int, row: int) -> torch.Tensor:
        """Positions `(pairs,)` of the piece in a row, a function of the row's place in the run.

        Raises:
            EvaluationError: the piece is longer than the target length.
        """
        return pose_positions(pairs, self.target_length, self.chunks, seeded(self.seed, "pose", row))


def pose_positions(length: int, target_length: int, chunks: int, generator: torch.Generator) -> torch.Tensor:
    """Positions of one row.

    A batch of them needs an `attention_mask`, be it of ones: without one Transformers and this library take every
    skip for the start of another document, and nothing is learned across it.

    Args:
        length: L, tokens of the row.
        target_length: L_target.
        chunks: N.
        generator: of the draws.

    Returns:
        `(length,)`, int64, strictly ascending from 0 to at most `target_length - 1`.

    Raises:
        EvaluationError: `target_length` is below `length`.
    """
    if target_length < length:
        raise EvaluationError(
            f"target_length={target_length} is not allowed; rows of {length} tokens need at least as much"
        )
    positions = torch.arange(length)
    cuts = torch.randperm(length - 1, generator=generator)[: chunks - 1].sort().values + 1
    u = 0
    for start, stop in pairwise([*cuts.tolist(), length]):
        u = int(torch.randint(u, target_length - length + 1, (), generator=generator))
        positions[start:stop] += u
    return positions
