"""Is a difference more than noise? Paired by document: what makes a text hard is hard for both."""

from __future__ import annotations

import statistics

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.rows import Row


def paired_difference(row: Row, reference: Row) -> tuple[float, float | None]:
    """NLL of one row minus that of another on the same texts, and the standard error of this difference.

    The error is s / sqrt(n) of the n differences of documents, or of blocks of windows where there is one document
    alone; None for fewer than two.

    Raises:
        EvaluationError: the rows are of different texts.
    """
    if (row.texts, row.protocol) != (reference.texts, reference.protocol):
        raise EvaluationError(f"{row.line} and {reference.line} were measured on different texts: nothing is paired")
    pairs = list(zip(row.nll_by_document, reference.nll_by_document, strict=False))  # rows of old files have none
    error = statistics.stdev(one - other for one, other in pairs) / len(pairs) ** 0.5 if len(pairs) > 1 else None
    return row.nll - reference.nll, error
