"""The tables of docs/real.md are those of the rows: `python -m tests.test_real_page` prints them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rope_patch.evaluation.row import Row, Rows
from rope_patch.evaluation.scheme_specs import display_name
from rope_patch.evaluation.standard_errors import loss_error, paired_difference

DOCS = Path(__file__).parents[1] / "docs"
NAMES = sorted(path.parent.name for path in DOCS.glob("results/real/*/perplexity.jsonl"))


def table(name: str) -> str:
    """NLL of each row, and its difference from the plain checkpoint at L, or at its own length where L is missing."""
    rows = Rows(DOCS / "results" / "real" / name / "perplexity.jsonl").rows
    plain = {row.length: row for row in rows if row.line == "plain"}
    trained = rows[0].training_length
    lengths = sorted({row.length for row in rows})
    names = dict.fromkeys(["plain", *(["window"] if any(row.line == "window" for row in rows) else [])])
    names |= dict.fromkeys(row.line for row in rows)
    cells = {(row.line, row.length): _cell(row, plain.get(trained) or plain[row.length]) for row in rows}
    lines = [["scheme", *(f"{length:,} ({length / trained:.2g}x)" for length in lengths)], ["---"] * (len(lengths) + 1)]
    lines += [[display_name(line), *(cells.get((line, length), "") for length in lengths)] for line in names]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(row: Row, reference: Row) -> str:
    if row == reference:
        return f"{row.nll:.3f} ± {loss_error(row):.3f}"
    difference, error = paired_difference(row, reference)
    return f"{row.nll:.3f} ({difference:+.3f} ± {error:.3f})"


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_the_table_of_the_rows(name: str) -> None:
    assert table(name) in (DOCS / "real.md").read_text()


if __name__ == "__main__":
    for name in NAMES:
        print(f"## {name}\n\n{table(name)}")
