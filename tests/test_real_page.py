"""The tables of docs/real.md are those of the rows: `python -m tests.test_real_page` prints them."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from rope_patch.evaluation.row import Row, Rows
from rope_patch.evaluation.scheme_specs import display_name
from rope_patch.evaluation.standard_errors import loss_error, paired_difference, standard_error

DOCS = Path(__file__).parents[1] / "docs"
NAMES = sorted(path.parent.name for path in DOCS.glob("results/real/*/perplexity.jsonl"))
FAR = sorted([*DOCS.glob("results/real/*/repeat.jsonl"), *DOCS.glob("results/real/*/far.jsonl")])


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


def by_text(path: Path) -> str:
    """NLL on far tokens by text, the difference from the text cut to L with its error, over windows of one text or over
    several texts, and NLL of the other tokens.
    """
    rows = Rows(path).rows
    cells = {(row.line, row.text): row for row in rows}
    texts, lines = (list(dict.fromkeys(each)) for each in zip(*((row.text, row.line) for row in rows), strict=True))
    table = [["scheme", *(f"{text} ({rows_of(rows, text).windows})" for text in texts), "beside the cut"]]
    table[0] += [f"the other tokens of {text}" for text in texts if cells["cut", text].others_nll]
    table += [["---"] * len(table[0])]
    for line in lines:
        pairs = [(cells[line, text], cells["cut", text]) for text in texts if (line, text) in cells]
        shown = [f"{cells[line, text].nll:.3f}" if (line, text) in cells else "" for text in texts]
        apart = [paired_difference(row, cut) for row, cut in pairs]
        error = apart[0][1] if len(texts) == 1 else standard_error([difference for difference, _ in apart])
        mean = f"{statistics.fmean(difference for difference, _ in apart):+.2f}{f' ± {error:.2f}' if error else ''}"
        others = [f"{row.others_nll:.3f}" for row, _ in pairs if row.others_nll]
        table += [[display_name(line), *shown, mean if line != "cut" and len(pairs) == len(texts) else "", *others]]
    return "".join(f"| {' | '.join(line)} |\n" for line in table)


def rows_of(rows: list[Row], text: str) -> Row:
    """Any row of a text."""
    return next(row for row in rows if row.text == text)


@pytest.mark.parametrize("path", FAR, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_page_has_the_table_of_the_far_tokens(path: Path) -> None:
    assert by_text(path) in (DOCS / "real.md").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_the_table_of_the_rows(name: str) -> None:
    assert table(name) in (DOCS / "real.md").read_text()


if __name__ == "__main__":
    for name in NAMES:
        print(f"## {name}\n\n{table(name)}")
    for path in FAR:
        print(f"## {path.parent.name}, {path.stem}\n\n{by_text(path)}")
