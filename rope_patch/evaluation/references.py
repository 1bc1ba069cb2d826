"""What a table compares schemes with, and where that cannot be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rope_patch.evaluation.protocols.last import Last
from rope_patch.evaluation.row import Row
from rope_patch.evaluation.scheme_specs import PLAIN, TEXT_CUT
from rope_patch.evaluation.standard_errors import paired_difference
from rope_patch.evaluation.tasks.perplexity import PROTOCOLS

LOST = 0.1  # nats above the text cut to L from which on attention cut at L counts as another model


def with_text_cut(rows: Sequence[Row]) -> list[Row]:
    """The rows, and those of the text cut to L behind the plain checkpoint's, which give them where old files do not.

    The text cut to L is the plain checkpoint at L, or at a length below L, on the same targets.
    """
    protocol, trained = PROTOCOLS.get(rows[0].protocol or "", Last), rows[0].training_length
    plain = {row.length: row for row in rows if row.line == PLAIN and not row.step}
    if any(row.line == TEXT_CUT for row in rows) or not {PLAIN, TEXT_CUT} <= {*protocol.references}:
        return list(rows)
    sources = {length: plain.get(min(length, trained)) for length in sorted({row.length for row in rows})}
    scheme = {"name": PLAIN, TEXT_CUT: trained}
    cut = [replace(row, line=TEXT_CUT, scheme=scheme, length=length) for length, row in sources.items() if row]
    behind = max((place for place, row in enumerate(rows, start=1) if row.line == PLAIN), default=0)
    return [*rows[:behind], *cut, *rows[behind:]] if trained in plain and max(sources) > trained else list(rows)


def lost_its_sinks(cut: Row | None, text_cut: Row | None) -> bool:
    """Whether attention cut at L is no reference at this length, because the model needs the first tokens of a text.

    Source: Xiao et al., 2309.17453 (attention sinks).
    """
    if not cut or not text_cut:
        return False
    difference, error = paired_difference(cut, text_cut)
    return error is not None and difference >= max(LOST, 4 * error)
