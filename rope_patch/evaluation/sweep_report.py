"""What a sweep found, as a sentence, a table and a dict."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from rope_patch.evaluation.candidates import CONTENDERS, ROUNDS
from rope_patch.evaluation.report import Grid, NumberTable, cell, display_name, length_header
from rope_patch.evaluation.specs import CUT, PLAIN, REFERENCES
from rope_patch.evaluation.sweep import Outcome, Plan

NOISE = 0.005
"""Nats within which two lines count as equal where there are too few documents for a standard error."""

ERRORS = 2.0
"""Standard errors within which a difference counts as noise."""


def verdict(outcome: Outcome) -> str:
    """`better`, `noise` or `worse`: the best line against attention cut at L; `nothing` where there is no line."""
    if outcome.recommended is None:
        return "nothing"
    noise = NOISE if outcome.error is None else ERRORS * outcome.error
    if abs(outcome.difference) <= noise:
        return "noise"
    return "better" if outcome.difference < 0 else "worse"


def recommendation(outcome: Outcome) -> str:
    """One or two sentences: what to use, and on what evidence; or that nothing beats attention cut at L."""
    if outcome.recommended is None:
        return "Nothing could be tried: this model refuses every scheme of the sweep."
    grid, plan, best = Grid.of(outcome.rows), outcome.plan, outcome.recommended
    nll = f"{grid.nll(best, plan.target):.3f} at {plan.target} tokens"
    distance = f"{abs(outcome.difference):.3f}"
    cost = grid.nll(best, plan.training_length) - grid.nll(PLAIN, plan.training_length)
    price = f"It {'costs' if cost > 0 else 'gains'} {abs(cost):.3f} at {plan.training_length}."
    kind = verdict(outcome)
    if kind == "better":
        return f"{best}: {nll}, {distance} below attention cut at L ({_evidence(outcome)}). {price}" + _regime(
            grid, best
        )
    cut = f"attention cut at L (`{CUT}`, {grid.nll(CUT, plan.target):.3f} at {plan.target} tokens)"
    if kind == "noise":
        return (
            f"Nothing beats {cut} beyond noise: the best, {best}, is {distance} "
            f"{'below' if outcome.difference < 0 else 'above'} it ({_evidence(outcome)}). {price} "
            "More documents, or more windows of each, would tell them apart."
        ) + _regime(grid, best)
    return f"Nothing beats {cut}: the best of the others, {best}, is {distance} above it ({_evidence(outcome)})."


def _evidence(outcome: Outcome) -> str:
    if outcome.error is None:
        return f"too few documents for a standard error; within {NOISE} counts as equal"
    return f"standard error {outcome.error:.3f} over {outcome.documents} documents"


def _regime(grid: Grid, line: str) -> str:
    regime = next(row.regime for (of, _), row in grid.rows.items() if of == line)
    return "" if regime == "training-free" else " It is made to be fine-tuned, which it was not here."


def table(outcome: Outcome) -> Group:
    """The lines from best to worst at the target, references among them.

    Returns:
        something that `rich` prints. The target comes first; `- cut` is the difference to attention cut at L there,
        and the loss at L the difference to the plain checkpoint at the length of its training.
    """
    grid, plan = Grid.of(outcome.rows), outcome.plan
    middle = plan.lengths[1:-1]
    headers = [length_header(plan.target, plan.training_length), "- cut", "loss\nat L"]
    headers += [length_header(length, plan.training_length) for length in middle]
    shown = NumberTable({"scheme": 12}, headers)
    for line in _sorted(grid, plan):
        numbers = _numbers(grid, plan, line)
        style = "bold green" if line == outcome.recommended else "dim" if line in REFERENCES else ""
        cells = [cell(numbers["target"]), f"{numbers['above_cut']:+.3f}", f"{numbers['loss_at_L']:+.3f}"]
        cells += [cell(grid.nll(line, length)) for length in middle]
        shown.add_row(grid.name(line), *cells, style=style)
    title = Text(f"{grid.name_of_model}: NLL in nats per token, L = {plan.training_length}, best first", style="bold")
    notes = [
        "- cut: at the target, minus attention cut at L; loss at L: minus the plain checkpoint there",
        *grid.notes(),
        outcome.stopped,
        *(f"not tried, {display_name(line)}: {reason}" for line, reason in outcome.refused.items()),
    ]
    return Group(title, shown, *(Text(note, style="dim") for note in notes))


def print_outcome(outcome: Outcome, console: Console | None = None) -> None:
    """Print the table and the recommendation."""
    console = console or Console()
    console.print(table(outcome))
    console.print(Text(recommendation(outcome), style="bold"))


def to_dict(outcome: Outcome) -> dict[str, Any]:
    """For JSON."""
    grid, plan = Grid.of(outcome.rows), outcome.plan
    lines = []
    for line in _sorted(grid, plan):
        numbers = _numbers(grid, plan, line)
        row = grid.rows[line, plan.target]
        lines.append(
            {
                "line": line,
                "scheme": row.scheme,
                "regime": row.regime,
                "nll": {str(length): _finite(grid.nll(line, length)) for length in plan.lengths},
                "above_cut": _finite(numbers["above_cut"]),
                "loss_at_training_length": _finite(numbers["loss_at_L"]),
            }
        )
    return {
        "recommended": outcome.recommended if verdict(outcome) == "better" else None,
        "best": outcome.recommended,
        "verdict": verdict(outcome),
        "sentence": recommendation(outcome),
        "difference": _finite(outcome.difference),
        "standard_error": None if outcome.error is None else _finite(outcome.error),
        "documents": outcome.documents,
        "training_length": plan.training_length,
        "target": plan.target,
        "lines": lines,
        "refused": outcome.refused,
        "stopped": outcome.stopped,
        "results": str(outcome.results),
        "picture": None if outcome.picture is None else str(outcome.picture),
    }


def show_plan(plan: Plan) -> str:
    """What a sweep would do, as far as it is known before anything is measured."""
    lengths = ", ".join(map(str, plan.lengths))
    heading = f"lengths {lengths} (L = {plan.training_length}); references: {', '.join(REFERENCES)}"
    lines = plan.first_round
    first = f"round 1: {ROUNDS[0]} ({len(lines)} lines, {len(lines) * len(plan.lengths)} measurements)"
    others = [f"round {number}: {aim}" for number, aim in enumerate(ROUNDS[1:], start=2)]
    most = CONTENDERS + sum(sorted((len(family.values) - 1 for family in plan.families), reverse=True)[:CONTENDERS]) + 2
    return "\n".join(
        [
            heading,
            first,
            *(f"  {line}" for line in lines),
            *others,
            f"at most {most} lines after the first round",
        ]
    )


def _sorted(grid: Grid, plan: Plan) -> list[str]:
    """Best first at the target; numbers that are none come last."""

    def key(line: str) -> float:
        nll = grid.nll(line, plan.target)
        return math.inf if math.isnan(nll) else nll

    return sorted(grid.lines, key=key)


def _numbers(grid: Grid, plan: Plan, line: str) -> dict[str, float]:
    nll = grid.nll(line, plan.target)
    return {
        "target": nll,
        "above_cut": nll - grid.nll(CUT, plan.target),
        "loss_at_L": grid.nll(line, plan.training_length) - grid.nll(PLAIN, plan.training_length),
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
