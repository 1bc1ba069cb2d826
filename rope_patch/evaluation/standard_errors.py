"""Standard errors, and tests whether a difference is more than noise. Differences are paired by text, because a hard
text is hard for both schemes.

The error of n documents is s / sqrt(n). With fewer than 8 documents it is the error of their windows, or of blocks of
adjacent windows, and allows for the correlation of neighbours (`error_of_neighbours`). It then describes only these
documents.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from rope_patch.data.windows import FEW
from rope_patch.errors import EvaluationError, counted
from rope_patch.evaluation.row import Row

FEW_TOKENS = 100  # with fewer tokens chosen by a protocol, nothing is claimed
TAIL = statistics.NormalDist().cdf(-2)  # the share of a normal distribution beyond two errors on one side
SHARED = 0.33  # correlation of neighbours for which `error_of_neighbours` is unbiased, amid those of 0 to 0.5


def standard_error(values: Sequence[float]) -> float | None:
    """The standard error s / sqrt(n) of independent values; None for fewer than two, or if one is not finite."""
    return statistics.stdev(values) / len(values) ** 0.5 if _usable(values) else None


def _usable(values: Sequence[float]) -> bool:
    return len(values) > 1 and all(map(math.isfinite, values))


def error_of_neighbours(values: Sequence[float]) -> float | None:
    """The standard error of the mean over neighbouring windows of a text, so that +-2 errors cover it in 95 % of texts.

        e = t_q / 2 sqrt(sum_j b_j^2 / (n sum_j f_j)),  j = 1, ..., q
        b_j = sqrt(2 / n) sum_i x_i cos(pi j (i + 1/2) / n)
        f_j = (1 - r)^2 / (1 - 2 r cos(pi j / n) + r^2),  r = 0.33

    The slowest cosines hold the part that neighbours share: their squares estimate the variance of the mean under any
    correlation that fades within the text. f_j is the share that they see if neighbours correlate by r. The estimate
    has q = n / 4 degrees of freedom, at least 2, for which Student's t_q allows.

    Source: Lazarus, Lewis, Stock & Watson 2018, "HAR Inference: Recommendations for Practice" (equal-weighted cosines);
    f_j from the spectrum of an autoregressive process.

        Returns: the error; None for fewer than two values, or if one is not finite.
    """
    if not _usable(values):
        return None
    n = len(values)
    waves = np.arange(1, _freedom_of_neighbours(n) + 1)[:, None] * np.pi / n
    squares = 2 / n * (np.cos(waves * (np.arange(n) + 0.5)) @ np.asarray(values)) ** 2
    seen = (1 - SHARED) ** 2 / (1 - 2 * SHARED * np.cos(waves) + SHARED**2)
    return student(TAIL, len(waves)) / 2 * math.sqrt(squares.sum() / seen.sum() / n)


def _freedom_of_neighbours(n: int) -> int:
    return min(n - 1, max(2, n // 4))


def loss_error(row: Row) -> float | None:
    """The standard error of a loss, over documents or over neighbouring windows; None if there is only one."""
    return _error(row, row.nll_by_document)


def _error(row: Row, values: Sequence[float]) -> float | None:
    return standard_error(values) if _by_document(row) else error_of_neighbours(values)


def _by_document(row: Row) -> bool:
    documents = row.documents or FEW  # rows of old files do not name them
    return documents >= FEW or len(row.nll_by_document) == documents


def paired_difference(row: Row, reference: Row) -> tuple[float, float | None]:
    """The NLL of one row minus that of another on the same texts, and the standard error of this difference.

    Raises:
        EvaluationError: the rows have different texts.
    """
    return contrast((1, row), (-1, reference))


def contrast(*terms: tuple[int, Row]) -> tuple[float, float | None]:
    """A signed sum of losses on the same texts, and the standard error of this sum.

    Raises:
        EvaluationError: the rows have different texts.
    """
    (_, first), *others = terms
    for _, row in others:
        if (row.texts, row.protocol) != (first.texts, first.protocol):
            raise EvaluationError(f"{first.line} and {row.line} were measured on different texts and cannot be paired")
    by_document = zip(*(row.nll_by_document for _, row in terms), strict=False)  # rows of old files have none
    sums = [math.fsum(sign * nll for (sign, _), nll in zip(terms, losses, strict=True)) for losses in by_document]
    return math.fsum(sign * row.loss for sign, row in terms), _error(first, sums)


def is_below(row: Row, reference: Row, tries: int = 1) -> bool:
    """Whether a loss is below another loss on the same texts by more than noise.

    Args:
        tries: the number of rows that this row is the best of.
    """
    difference, error = paired_difference(row, reference)
    return error is not None and not tells_nothing(row) and difference < -noise_of(row, tries) * error


def best_of_seeds(rows: Iterable[Mapping[str, Any]]) -> dict[int, str]:
    """The best encoding of each length, if it is below every other by more than noise, paired by seed.

    Args:
        rows: rows with `encoding`, `length`, `seed` and `nll`; `nll` is NaN or None if a training failed.
    """
    losses: dict[int, dict[str, dict[int, float]]] = {}
    for row in rows:
        if row["nll"] is not None and math.isfinite(row["nll"]):
            losses.setdefault(row["length"], {}).setdefault(row["encoding"], {})[row["seed"]] = row["nll"]
    best = {}
    for length, of in losses.items():
        first = min(of, key=lambda encoding: statistics.fmean(of[encoding].values()))
        others = [other for encoding, other in of.items() if encoding != first]
        pairs = [[loss - other[seed] for seed, loss in of[first].items() if seed in other] for other in others]
        if others and all(_below_zero(differences, len(others)) for differences in pairs):
            best[length] = first
    return best


def _below_zero(differences: Sequence[float], tries: int) -> bool:
    """Whether the mean of independent differences is below zero by more than noise."""
    error = standard_error(differences)
    return error is not None and statistics.fmean(differences) < -student(TAIL / tries, len(differences) - 1) * error


def tells_nothing(row: Row) -> bool:
    """Whether a protocol that scores only some tokens found too few tokens for a conclusion."""
    return row.chosen_share is not None and (row.scored_tokens or 0) < FEW_TOKENS


def noise_of(row: Row, tries: int = 1) -> float:
    """The number of standard errors that noise exceeds on one side in at most 2.3 % of texts: two, or more if this row
    has few units.

    Args:
        tries: the number of rows that this row is the best of; the winner of many looks better than it is (Bonferroni's
            correction).
    """
    n = len(row.nll_by_document)
    if _by_document(row):
        return student(TAIL / tries, n - 1)
    freedom = _freedom_of_neighbours(n)
    return 2 * student(TAIL / tries, freedom) / student(TAIL, freedom)


@cache
def student(tail: float, freedom: int) -> float:
    """The quantile t of Student's distribution with this share beyond it on one side: sqrt(freedom) tan(angle), where
    the density of the angle is proportional to cos(angle)^(freedom - 1).
    """
    angles = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos((angles[1:] + angles[:-1]) / 2) ** (freedom - 1)
    beyond = np.append(np.cumsum(density[::-1])[::-1], 0.0) / (2 * density.sum())
    return math.sqrt(freedom) * math.tan(np.interp(tail, beyond[::-1], angles[::-1]))


def pairs_of(row: Row) -> str:
    """Name the units of standard errors: `12 documents`, or `16 windows of 1 document`."""
    number = len(row.nll_by_document)
    if number == row.documents:
        return counted(number, "document")
    parts = "window" if number == row.windows else "block"
    return f"{counted(number, parts)}{' of windows' * (parts == 'block')} of {counted(row.documents or 0, 'document')}"
