"""Positions with skips, so that rows of the training length contain the distances of a longer text.

PoSE: a row of L tokens is cut at random into N chunks, and the positions of chunk i are shifted by u_i:

    u_0 = 0,    u_i ~ U{u_(i-1), ..., L_target - L}        positions of chunk i:  st_i + u_i, st_i + 1 + u_i, ...

where st_i is the start of the chunk in the row (eq. 3 and 4; N = 2 in the paper's experiments). All cuts are equally
likely, and the text itself has no gaps (v_i = 0 in eq. 5, which is as good in table 4 of the paper).

CREAM: a row is a head, a middle and a tail, with head and tail of L // 3 tokens or of 4 L_target / L, each in half of
the rows. The head begins at 0, the tail ends at L_target - 1, and the middle of M tokens ends at

    P_e ~ U{head + (M - 1) a / 2, ..., L a / 2 - tail - 1},    a = floor of N(1 + L_target / L, 3^2)

where the Gaussian is truncated to [2, 2 L_target / L].

Source: Zhu et al. 2023, "PoSE: Efficient Context Window Extension of LLMs via Positional Skip-wise Training",
arXiv 2309.10400; the authors' code: dwzhu-pku/PoSE, src/train_pose.py. Wu et al. 2024, "An Efficient Recipe for Long
Context Extension via Middle-Focused Positional Encoding", arXiv 2406.07138; its formula is read from bigai-nlco/CREAM
5b18833, src/train.py, which moves values beyond the two ends onto the ends instead of truncating.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import Literal

import torch

from rope_patch.data.placing import PlacingCollator, Row


@dataclass(frozen=True)
class PoSECollator(PlacingCollator):
    """A data collator that pads rows on the right, and spreads their positions over the whole target length.

    The positions of a row depend only on its tokens and the seed, so a resumed run sees the same positions. The batch
    always has an `attention_mask`: without it every skip would count as the start of another document.
    """

    target_length: int  # L_target, one more than the highest position; nothing skips if it is the length of the rows
    chunks: int = 2  # N; a short row has at most one chunk per token
    seed: int = 0
    middle: Literal["uniform", "gaussian"] = "uniform"  # gaussian: CREAM, with three pieces whatever `chunks` is

    def _place(self, ids: torch.Tensor, row: Row) -> torch.Tensor:
        length, room = len(ids), self._room(ids, target_length=self.target_length)
        generator = self._generator(ids)
        if self.middle == "gaussian":
            return self._around_a_middle(length, generator)
        positions, u = torch.arange(length), 0
        cuts = torch.randperm(length - 1, generator=generator)[: self.chunks - 1].sort().values + 1
        for start, stop in pairwise([*cuts.tolist(), length]):
            u = int(torch.randint(u, room + 1, (), generator=generator))
            positions[start:stop] += u
        return positions

    def _around_a_middle(self, length: int, generator: torch.Generator) -> torch.Tensor:
        factor = self.target_length / length
        coin, quantile = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
        end = length // 3 if coin < 0.5 else min(round(4 * factor), length // 3)
        middle, gaussian = length - 2 * end, NormalDist(1 + factor, 3)
        low, high = gaussian.cdf(2), gaussian.cdf(2 * factor)
        a = min(max(2, int(gaussian.inv_cdf(low + quantile * (high - low)))), 2 * factor)
        first, last = math.ceil(end + (middle - 1) * a / 2), int(length * a / 2) - end - 1
        stop = int(torch.randint(first, max(first, last) + 1, (), generator=generator)) + 1
        ends = torch.arange(end), torch.arange(self.target_length - end, self.target_length)
        return torch.cat([ends[0], torch.arange(stop - middle, stop), ends[1]])
