"""The effective length of a scheme: the longest text about which it still answers questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rope_patch.evaluation.row import Row

SHARE = 0.85  # the share of the best score at the shortest lengths that still counts
NEAR_NOTHING = 0.1  # with a lower score within the training length, the checkpoint cannot do the task


@dataclass(frozen=True)
class EffectiveLength:
    """An effective length in tokens, with the bounds `low` and `high` within two errors; `base` is the best score at
    the shortest lengths.
    """

    length: int
    low: int
    high: int
    base: float

    def __str__(self) -> str:
        near = "" if self.low == self.high else f" ({self.low} to {self.high} within two errors)"
        return f"{self.length} tokens{near}"


def effective_length(rows: Sequence[Row]) -> EffectiveLength | None:
    """The longest length at which the mean score of a scheme is at least 0.85 of its best one at the shortest lengths.

    The shortest lengths are all lengths up to L, or the first length if none is. `low` and `high` are the longest
    lengths at which the mean, lowered or raised by two errors, still reaches the threshold. The errors are those of
    shares of as many questions, which are at least as large as the errors of the scores.

    Source: Modarressi et al. 2025, "NoLiMa", arXiv 2502.05167, section 4.1.

    Args:
        rows: rows of one scheme, with all depths or all tasks.

    Returns:
        the effective length; None if fewer than a tenth of the answers at the shortest lengths are correct, so that the
        scheme cannot do the task.
    """
    cells = {n: [row for row in rows if row.length == n] for n in sorted({row.length for row in rows})}
    means = {n: fmean(row.share for row in cell) for n, cell in cells.items()}
    shortest = [n for n in cells if n <= rows[0].training_length] or list(cells)[:1]
    best = max(shortest, key=lambda n: means[n])
    if not means[best] >= NEAR_NOTHING:
        return None
    spare = {n: means[n] - SHARE * means[best] for n in cells}
    errors = {
        n: (variance_of(cells[n]) + SHARE**2 * variance_of(cells[best])) ** 0.5 if n != best else 0 for n in cells
    }
    length, low, high = (max(n for n in cells if spare[n] + side * errors[n] >= -1e-9) for side in (0, -2, 2))
    return EffectiveLength(length, low, high, means[best])


def variance_of(cell: Sequence[Row]) -> float:
    """The variance of the mean of shares p of n questions. Each share has p (1 - p) / n, with two right and two wrong
    answers added (Agresti).
    """
    variances = []
    for row in cell:
        asked = (row.trials or len(row.scores or [0])) + 4
        share = (row.share * (asked - 4) + 2) / asked
        variances.append(share * (1 - share) / asked)
    return sum(variances) / len(cell) ** 2
