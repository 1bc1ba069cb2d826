"""The tables of docs/real.md, from the rows in docs/results/real: `python -m tools.real_tables` prints them.

The page has most of them; where it has `<!-- rows of NAME -->` instead, the site puts the table (docs/hooks/real.py).
"""

from __future__ import annotations

import statistics
from pathlib import Path

from rope_patch.evaluation.row import Row, Rows
from rope_patch.evaluation.scheme_specs import display_name
from rope_patch.evaluation.standard_errors import loss_error, paired_difference, standard_error

DOCS = Path(__file__).parents[1] / "docs"
NAMES = sorted(path.parent.name for path in DOCS.glob("results/real/*/perplexity.jsonl"))
SHORT = [("qwen2.5-coder-1.5b", stem) for stem in ("short", "short_prose")]
"""The checkpoint and the files of rows within L: of code, and of prose."""
LAYOUTS = {
    "fetched": "none: as fetched",
    "randomized": "`randomized`, 2,048 tokens",
    "pose": "`pose`, 2,048 tokens",
    "packed": "`packed`, 16,384 tokens",
}
"""The files of `layouts`, with the rows of the training in words."""
FAR = sorted([*DOCS.glob("results/real/*/repeat.jsonl"), *DOCS.glob("results/real/*/far.jsonl")])


def table(name: str, stem: str = "perplexity") -> str:
    """NLL of each row, and its difference from the plain checkpoint on the same tokens: at L, or at its own length
    where other tokens were scored at L, or none.
    """
    rows = Rows(DOCS / "results" / "real" / name / f"{stem}.jsonl").rows
    plain = {row.length: row for row in rows if row.line == "plain"}
    trained = rows[0].training_length
    lengths = sorted({row.length for row in rows})
    names = dict.fromkeys(["plain", *(["window"] if any(row.line == "window" for row in rows) else [])])
    names |= dict.fromkeys(row.line for row in rows)
    at_l = plain.get(trained)

    def reference(row: Row) -> Row:
        return at_l if at_l is not None and at_l.texts == row.texts else plain[row.length]

    cells = {(row.line, row.length): _cell(row, reference(row)) for row in rows}
    lines = [["scheme", *(f"{length:,} ({length / trained:.2g}x)" for length in lengths)], ["---"] * (len(lengths) + 1)]
    lines += [[display_name(line), *(cells.get((line, length), "") for length in lengths)] for line in names]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(row: Row, reference: Row) -> str:
    if row == reference:
        return f"{row.nll:.3f} ± {loss_error(row):.3f}"
    difference, error = paired_difference(row, reference)
    return f"{row.nll:.3f} ({difference:+.3f} ± {error:.3f})"


def by_text(path: Path) -> str:
    """NLL on far tokens and its difference from truncated text, text by text; over several texts the mean of these,
    with its error over them; and that of the other tokens.
    """
    rows = Rows(path).rows
    cells = {(row.line, row.text): row for row in rows}
    texts, lines = (list(dict.fromkeys(each)) for each in zip(*((row.text, row.line) for row in rows), strict=True))
    head = ["scheme", *(f"{Path(text or '').stem} ({cells['cut', text].windows})" for text in texts)]
    head += [*["minus truncated text"] * (len(texts) > 1), *["the other tokens"] * (rows[0].others_nll is not None)]
    table = [head, ["---"] * len(head)]
    for line in lines:
        pairs = {text: (cells[line, text], cells["cut", text]) for text in texts if (line, text) in cells}
        apart = {text: paired_difference(*pair) for text, pair in pairs.items()}
        shown = [f"{pairs[text][0].nll:.3f}{_minus(*apart[text])}" if text in pairs else "" for text in texts]
        if len(texts) > 1:
            mean, error = (f([one for one, _ in apart.values()]) for f in (statistics.fmean, standard_error))
            shown.append(f"{mean:+.2f} ± {error:.2f}" if len(pairs) == len(texts) and line != "cut" else "")
        others = [row.others_nll - cut.others_nll for row, cut in pairs.values() if row.others_nll and cut.others_nll]
        table.append([display_name(line), *shown, *([f"{statistics.fmean(others):+.2f}"] if others else [])])
    return "".join(f"| {' | '.join(line)} |\n" for line in table)


def finetuned(path: Path) -> str:
    """NLL on far tokens before and after a training, under each scheme, and its difference from truncated text under
    the same weights.
    """
    lines = [["weights", "truncated text", "passage inside L", "under the scheme"], ["---"] * 4]
    rows = Rows(path).rows
    for weights in dict.fromkeys(row.weights for row in rows):
        of_weights = {row.line: row for row in rows if row.weights == weights}
        cut, near = of_weights.pop("cut"), of_weights.pop("near")
        trained = "as fetched" if len(of_weights) > 1 else "trained"
        for line, row in of_weights.items():
            under = f"{display_name(line)}: {row.nll:.3f}{_minus(*paired_difference(row, cut))}"
            lines.append([trained, f"{cut.nll:.3f}", f"{near.nll:.3f}{_minus(*paired_difference(near, cut))}", under])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def layouts(folder: Path) -> str:
    """NLL under YaRN at 2L before and after a training in rows of each layout: of a passage that stands again at the
    end (`repeat`), with its difference from truncated text under the same weights; of tokens that repeat something more
    than L back (`far`), with its difference from before; and of all others among the last ones.
    """
    head = "rows", "truncated text", "passage inside L", "the passage under YaRN", "far tokens", "other tokens"
    lines = [[*head], ["---"] * len(head)]
    before: Row | None = None
    for name, said in LAYOUTS.items():
        of_name = Rows(folder / f"{name}.jsonl").rows
        # the passage under the weights as fetched was measured before another training
        elsewhere = (row for row in Rows(folder.parent / "finetuned.jsonl").rows if row.weights == of_name[0].weights)
        rows = {(row.protocol, row.line): row for row in (*elsewhere, *of_name)}
        far, cut = rows["far", "yarn:target=auto"], rows["repeat", "cut"]
        before = before or far
        cells = [f"{cut.nll:.3f}"]
        for line in ("near", "yarn:target=auto"):
            row = rows["repeat", line]
            cells.append(f"{row.nll:.3f}{_minus(*paired_difference(row, cut))}")
        others = "" if far.others_nll is None else f"{far.others_nll:.3f}"
        lines.append([said, *cells, f"{far.nll:.3f}{_minus(*paired_difference(far, before))}", others])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _minus(difference: float, error: float | None) -> str:
    if not difference:
        return ""
    return f" ({difference:+.2f}{'' if error is None else f' ± {error:.2f}'})"


if __name__ == "__main__":
    for name in NAMES:
        print(f"## {name}\n\n{table(name)}")
    for name, stem in SHORT:
        print(f"## {name}, {stem}\n\n{table(name, stem)}")
    print(f"## layouts\n\n{layouts(DOCS / 'results/real/smollm2-135m/layouts')}")
    for path in FAR:
        print(f"## {path.parent.name}, {path.stem}\n\n{by_text(path)}")
