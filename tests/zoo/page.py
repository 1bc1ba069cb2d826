"""docs/families.md, from a row per model type."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import transformers

from tests.families import FAMILIES
from tests.zoo.checks import SPECS, TOLERANCE

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "families.md"
ROWS = ROOT / "docs" / "results" / "zoo" / "zoo.jsonl"
VERDICTS = ("right", "table", "refused", "not built", "WRONG", "FOREIGN")

_HEAD = """# Families

**{counts}**

This page covers every model type of Transformers {version} that has a vocabulary: decoders, encoders, encoder-decoders,
and the text part of image and audio models. `make zoo` builds a tiny random model of each type, checks it and writes
this page. T5 and models with a table of positions also have test suites of their own (`tests/models`).

| verdict | meaning |
|---|---|
| right | every scheme that is not refused gives the expected result |
| table | the model adds [learned positions](absolute.md), as BERT and GPT-2 do, and runs under `hierarchical` |
| refused | the error names the reason, and the model does not change |
| not built | the config does not give a tiny random model |
| WRONG | a result differs from the expected one |
| FOREIGN | an error comes from another library |

Each check compares a patched model with an expected result:

| check | patched model | expected result |
|---|---|---|
| `native` | the checkpoint's own scheme under the late mount (attention rotates) | the plain model |
| `beyond` | `rerope` with a window beyond the text | the plain model |
| `rerope` | `rerope` with a narrow window | dense attention in float64, from projections at constant positions |
| `alibi` | `alibi` | the plain model without rotation, with a dense bias |
| `pi`, `yarn` | new rotary tables | the late mount where it works, and plain Transformers with the exported config |
| `cache` | a prompt in two pieces, then single tokens | one forward |
| `pads` | three rows with left pads | each row alone |
| `unpatch` | the model after `unpatch` | its tensors, attributes, hooks, configs and outputs, bit for bit |

Differences are in standard deviations of the outputs. A difference of up to {tolerance:g} counts as right. A scheme
must change the outputs by five times as much, or the check proves nothing. Checks that the plain model itself fails are
left out.

## Every type

On the site, this section has a table with the verdict, the largest difference and the reasons of every type. A star
marks the types in the contract suite. To print the table from [the rows](results/zoo/zoo.jsonl), run
`python -c "from tests.zoo import page; print(page.table())"`.

<!-- table of the zoo -->
"""


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The last row of each type."""
    return {row["type"]: row for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())}


def store(rows: Iterable[dict[str, Any]]) -> None:
    """Keep the rows that the page is made of."""
    ROWS.parent.mkdir(exist_ok=True)
    lines = ({"transformers": transformers.__version__, **row} for row in rows)
    ROWS.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def write() -> None:
    """The page, from the rows that were kept."""
    if ROWS.exists():
        PAGE.write_text(page(read(ROWS).values()), encoding="utf-8")


def page(rows: Iterable[dict[str, Any]]) -> str:
    """The whole document."""
    rows = list(rows)
    by_verdict: dict[str, list[str]] = {}
    for row in rows:
        by_verdict.setdefault(verdict(row)[0], []).append(_name(row))
    counts = ", ".join(f"{len(by_verdict.get(kind, []))} {kind}" for kind in VERDICTS)
    return _HEAD.format(
        version=rows[0]["transformers"],
        tolerance=TOLERANCE,
        counts=f"Of {len(rows)} model types: {counts}.",
    )


def table() -> str:
    """A line for each type of the committed rows: its verdict, the largest difference, and the reasons."""
    lines = ["| model type | verdict | largest difference | what is refused, or left out |", "|---|---|---|---|"]
    for row in read(ROWS).values():
        kind, reason = verdict(row)
        lines.append(f"| {_name(row)} | {kind} | {_largest(row)} | {reason} |")
    return "\n".join(lines)


def _name(row: dict[str, Any]) -> str:
    contract = {values["model_type"] for values in FAMILIES.values()}
    return f"`{row['type']}`{'*' * (row['type'] in contract)}"


def verdict(row: dict[str, Any]) -> tuple[str, str]:
    """What becomes of a type, and why."""
    if "checks" not in row:
        return "not built", _sentence(row["reason"])
    checks = row["checks"]
    wrong = {
        name: f for name, f in checks.items() if (isinstance(f, float) and not f <= TOLERANCE) or "blind" in str(f)
    }
    foreign = {name: f for name, f in checks.items() if str(f).startswith("foreign")}
    if foreign:
        return "FOREIGN", _listed(foreign)
    if wrong:
        return "WRONG", ", ".join(f"`{name}` {figure}" for name, figure in wrong.items())
    if isinstance(checks.get("table"), float):
        return "table", ""
    if not any(isinstance(checks.get(name), float) for name in SPECS):
        return "refused", _sentence(str(checks["rerope"]))
    return "right", _listed({name: f for name, f in checks.items() if isinstance(f, str)})


def _listed(outcomes: dict[str, Any]) -> str:
    """Reasons, each with the checks that have it."""
    by_reason: dict[str, list[str]] = {}
    for name, outcome in outcomes.items():
        by_reason.setdefault(_sentence(outcome), []).append(f"`{name}`")
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())


def _largest(row: dict[str, Any]) -> str:
    figures = [figure for figure in row.get("checks", {}).values() if isinstance(figure, float)]
    return f"{max(figures):.0e}" if figures else ""


def _sentence(text: str) -> str:
    for kind in ("refused: ", "plain: ", "foreign: "):
        text = text.removeprefix(kind)
    for end in ("; ", ". "):
        text = text.partition(end)[0]
    return text.replace("|", "\\|").rstrip(".")
