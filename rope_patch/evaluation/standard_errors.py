"""Is a difference more than noise? Differences are paired by text, because a hard text is hard for both.

The error is s / sqrt(n) of n documents. With fewer than 8 documents it is that of their windows, or of blocks of
adjacent windows. Windows of one document are less independent than documents, above all if their contexts overlap: such
an error describes only this document, and is too small rather than too large.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from rope_patch.errors import EvaluationError, counted
from rope_patch.evaluation.row import Row

FEW = 8  # with fewer documents windows are counted; with fewer windows an error means little


def standard_error(values: Sequence[float]) -> float | None:
    """s / sqrt(n); None for fewer than two values, or if one is not finite."""
    finite = all(map(math.isfinite, values))
    return statistics.stdev(values) / len(values) ** 0.5 if finite and len(values) > 1 else None


def paired_difference(row: Row, reference: Row) -> tuple[float, float | None]:
    """NLL of one row minus that of another on the same texts, and the standard error of this difference.

    Raises:
        EvaluationError: the rows have different texts.
    """
    if (row.texts, row.protocol) != (reference.texts, reference.protocol):
        raise EvaluationError(f"{row.line} and {reference.line} were measured on different texts and cannot be paired")
    pairs = zip(row.nll_by_document, reference.nll_by_document, strict=False)  # rows of old files have none
    return row.loss - reference.loss, standard_error([one - other for one, other in pairs])


def pairs_of(row: Row) -> str:
    """The units of standard errors: `12 documents`, or `16 windows of 1 document`."""
    number = len(row.nll_by_document)
    if number == row.documents:
        return counted(number, "document")
    parts = "window" if number == row.windows else "block"
    return f"{counted(number, parts)}{' of windows' * (parts == 'block')} of {counted(row.documents or 0, 'document')}"
