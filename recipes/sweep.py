"""Try many schemes at a target length within a budget, and recommend one.

    rope-patch sweep --target 4x --dry-run
    rope-patch sweep --target 2x --documents 4 --schemes rerope yarn --budget-minutes 1
    torchrun --nproc-per-node 4 recipes/sweep.py recipes/configs/sweep_tiny.yaml

Every scheme scores the same tokens of one half of the text, from the training length L up to the target. The best guess
for each scheme comes first; the best schemes then get log-n, other values, and values in between. The other half of the
text, which was not used for the choice, then tests the winner. References such as truncated text (cut) are always
measured. Results are saved as you go: run the same command again to resume.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_type_hints

from rope_patch.cli.options import (
    Amount,
    Count,
    Folder,
    Length,
    Measured,
    Names,
    OptionalName,
    is_main,
    print_json,
    run,
    say,
)

CONTENDERS = 3  # how many of the best schemes go on to the next round
SHOWN = 6  # how many schemes the chart shows beside the references; with more it cannot be read
TIE = 0.001  # nats at the target by which a line may be worse and still be preferred, if it is better over all lengths
WORTHWHILE = 12  # lines of a sweep that a budget should reach
ROUNDS = (
    "the best guess of every scheme",
    f"log-n on top of the {CONTENDERS} best schemes",
    f"the other values of the {CONTENDERS} best schemes, with log-n where it helped",
    "values halfway between those tried, around the best of all",
    "curves by which a value follows the length, through the best one at each",
)


@dataclass(kw_only=True)
class Options(Measured):
    target: Length  # context length to reach: tokens, or a multiple of L such as 4x
    schemes: Names = ()  # schemes to try, such as rerope yarn (default: all)
    regime: Literal["training-free", "fine-tune"] = "training-free"  # fine-tune adds schemes made to be fine-tuned
    budget_minutes: Amount = None  # time limit for everything, including the confirmation of the winner
    budget_measurements: Count = None  # limit of new measurements, each of one candidate at one length
    protocol: Literal["last", "repeat", "far"] = "last"  # score ordinary text, or tokens that need far context
    targets: Count = None  # number of scored tokens in each window (default: L, at most 4096)
    documents: Count = None  # number of documents in each half, drawn at random (default: all)
    windows_per_document: Count = None  # windows scored in each document (default: enough for 16 in each half)
    # try only schemes for this server: vllm, llama.cpp, or config (any that reads rope_parameters)
    serve: OptionalName = None
    output: Folder = "runs/sweep"  # folder for sweep.jsonl and sweep.png
    dry_run: bool = False  # show the plan and measure nothing


def main(options: Options) -> None:
    """Plan, measure round after round, and recommend."""
    from rope_patch.cli.report import conclude, draw
    from rope_patch.data.corpora import load_text, name_of_text
    from rope_patch.data.held_out import halves
    from rope_patch.errors import RopePatchError, counted
    from rope_patch.evaluation.budget import (
        Part,
        documents_before,
        fewer_documents,
        halves_within,
        seconds_of_a_line,
        seconds_per_token,
    )
    from rope_patch.evaluation.measured_model import MeasuredModel, pop_scheme
    from rope_patch.evaluation.processes import on_main
    from rope_patch.evaluation.row import Rows, by_line
    from rope_patch.evaluation.run import run as run_task
    from rope_patch.evaluation.tables import shortfalls
    from rope_patch.evaluation.tasks.perplexity import Perplexity
    from rope_patch.evaluation.verdict import Verdict
    from rope_patch.models.config import checkpoint_of_config
    from rope_patch.saving.loading import (
        default_checkpoint,
        load_config,
        load_model,
        load_tokenizer,
        quiet_transformers,
    )

    # the plan, before anything slow
    began = time.monotonic()
    swept = schemes_to_sweep(options.regime, options.schemes)
    checkpoint = options.model or default_checkpoint()
    config = load_config(checkpoint)
    facts = checkpoint_of_config(config)
    trained = facts.max_length
    lengths = lengths_up_to(options.target, trained)
    wants = partial(is_served, server_named(options.serve), config)
    asked: dict[str, Any] = {"targets": options.targets, "documents": options.documents, "seed": options.seed}
    asked |= {"protocol": options.protocol, "windows_per_document": options.windows_per_document}
    plan = Perplexity(text=name_of_text(options.text, options.dataset, options.split), **asked)
    plan.check(lengths)
    references = plan.references()
    if options.budget_minutes is not None:
        say(f"a budget of {options.budget_minutes:g} minutes for all: references, candidates, and the confirmation")
    if options.dry_run:
        first = [line for each in candidates(1, swept, {}) if wants(line := each.line(facts, lengths[-1]))]
        if options.json:
            print_json({"lengths": lengths, "first_round": first})
        elif is_main():
            print(f"lengths {', '.join(map(str, lengths))} (L = {trained}); references {', '.join(references)}")
            print("round 1, and what follows from it:", *first, sep="\n  ")
        return

    # the model, and the text in two halves
    results = Rows(Path(options.output) / "sweep.jsonl")
    with quiet_transformers():
        tokenizer = load_tokenizer(checkpoint)
        corpus = load_text(options.text, options.dataset, split=options.split, column=options.column)
        model = load_model(checkpoint, dtype=options.dtype, device=options.device, attention=options.attention)
    learned = pop_scheme(model, say)
    say(f"trying {counted(len(swept), 'scheme')} at {', '.join(map(str, lengths))} tokens, best guesses first")

    def both_halves(documents: int | None) -> list[Any]:
        parts = halves(corpus, tokenizer, lengths[-1] + 1, documents, options.seed)
        return [
            replace(plan, tokenizer=tokenizer, corpus=half).resolve(MeasuredModel(model), lengths) for half in parts
        ]

    documents = options.documents
    if options.budget_minutes and documents is None:
        documents = documents_before(results.rows, lengths[-1], lambda number: both_halves(number)[0])
    choosing, confirming = both_halves(documents)
    if options.budget_minutes and documents == options.documents:  # a budget of 0 measures the references alone
        rates, always = seconds_per_token(model, choosing, lengths), len(references) + 1  # with a first candidate

        def parts_of(both: Sequence[Any]) -> list[Part]:
            two = [lengths[0], lengths[-1]]
            confirmed = Part(seconds_of_a_line(rates, both[1], two), always, always)
            return [Part(seconds_of_a_line(rates, both[0], lengths), always, always + WORTHWHILE), confirmed]

        left = options.budget_minutes - (time.monotonic() - began) / 60
        numbers = fewer_documents(choosing.selection.documents, chosen=documents is not None)
        choosing, confirming = halves_within(left, numbers, both_halves, parts_of, say)
    settings = {"rows": results, "name": options.model or "tiny-llama", "trained": learned}
    measured = partial(run_task, model, choosing, lengths=lengths, **settings)
    confirmed = partial(run_task, model, confirming, lengths=[lengths[0], lengths[-1]], **settings)

    # round after round; what follows depends on nothing but what was measured
    slowest, known = timed(partial(measured, schemes=references))  # seconds of the slowest line so far, or of these
    rows, confirmation = by_line(known), by_line(confirmed(schemes=references))
    for note in shortfalls(rows[references[-1]][-1]):
        say(note)
    tried: dict[str, Candidate] = {}
    refused: dict[str, str] = {}
    before, stopped = len(results.rows), ""
    for number, aim in enumerate(ROUNDS, start=1):
        by_length = {candidate: {row.length: row.nll for row in rows[line]} for line, candidate in tried.items()}
        at_target = {candidate: losses[lengths[-1]] for candidate, losses in by_length.items()}
        is_last = number == len(ROUNDS)
        next_ones = curves(by_length, trained) if is_last else candidates(number, swept, at_target)
        spelled = {each.line(facts, lengths[-1]): each for each in next_ones}
        wanted = {line: candidate for line, candidate in spelled.items() if wants(line)}
        say(f"round {number} of {len(ROUNDS)}: {aim} ({len(wanted)} lines)")
        for ahead, (line, candidate) in zip(reversed(range(len(wanted))), wanted.items(), strict=True):
            if line in rows or line in refused:
                continue  # two values may be spelled alike once they are rounded
            wanted_rows = len(results.rows) - before + len(lengths)  # those of an earlier run cost nothing
            seconds = time.monotonic() - began + 2 * slowest  # with this line, and the confirmation of the best
            if budget := on_main(partial(used_up, options, seconds, wanted_rows)):
                stopped = f"the budget of {budget} was used up in round {number} of {len(ROUNDS)}"
                break
            try:
                seconds, rows[line] = timed(partial(measured, schemes=[line], ahead=ahead))
                slowest = max(seconds, slowest) if tried else seconds
                if not math.isnan(rows[line][-1].nll):
                    tried[line] = candidate
            except RopePatchError as reason:
                refused[line] = " ".join(str(reason).split())
        if stopped:
            break

    # the best line, on the half that did not choose it, compared with what costs nothing
    untried = stopped or "the model refuses every scheme of the sweep, or the server has none"
    stopped = stopped or "every round was completed"
    ranked = rank({line: rows[line] for line in tried})
    best = ranked[0] if ranked else None
    if best:
        confirmation[best] = confirmed(schemes=[best])
    if not is_main():
        return
    verdict, difference, error = Verdict("nothing", f"Nothing was tried: {untried}.", advice(options)), None, None
    if best:
        verdict, difference, error = recommend(confirmation, best)
    by_target = sorted(rows, key=lambda line: math.inf if math.isnan(rows[line][-1].nll) else rows[line][-1].nll)
    if options.json:
        outcome = {"best": best, "recommended": best if verdict.kind == "better" else None, "verdict": verdict.kind}
        outcome |= {"sentence": verdict.sentence, "difference": difference, "standard_error": error}
        outcome |= {"refused": refused, "stopped": stopped}
        for name, found in (("rows", {line: rows[line] for line in by_target}), ("confirmation", confirmation)):
            outcome[name] = [json.loads(row.to_json()) for line in found for row in found[line]]
        print_json(outcome)
    else:
        print_table({line: rows[line] for line in by_target}, best, config)
        print(stopped, *(f"not tried, {line}: {reason}" for line, reason in refused.items()), sep="\n")
    best_of_each = {tried[line].scheme: line for line in reversed(ranked)}
    shown = (*references, *sorted(best_of_each.values(), key=ranked.index)[:SHOWN])
    draw([row for line in shown for row in rows[line]], results.path)
    conclude(verdict, options)


@dataclass(frozen=True)
class Candidate:
    """A scheme at one of the values that it declares, with or without log-n."""

    scheme: str
    sweep: Any  # of rope_patch.schemes.base.Sweep
    value: float
    logn: bool = False
    curve: tuple[tuple[str, float], ...] = ()  # fields that take the place of the value

    def line(self, checkpoint: Any, target: int) -> str:
        """The line on a checkpoint, or for L in tokens, in the spelling of `get_scheme`: `rerope:window=128`."""
        from rope_patch.schemes import Checkpoint, get_scheme, scheme_class
        from rope_patch.schemes.slots import Target

        if isinstance(checkpoint, int):
            checkpoint = Checkpoint(checkpoint, num_heads=1, max_length=checkpoint)
        if self.sweep.field:
            checkpoint = checkpoint.under(get_scheme(self.scheme, target=target))
        trained = checkpoint.training_length
        kind, field, unit, fields = scheme_class(self.scheme), self.sweep.field, self.sweep.unit, {}
        window = {"window": round(self.sweep.window * trained)} if self.sweep.window else {}
        if self.curve:
            fields = {name: f"{number:g}" for name, number in self.curve}
        elif unit == "L":
            fields[field] = max(1, round(self.value * trained))
        elif field:
            goal = Target(self.scheme, target, checkpoint, window)
            number = self.value * (kind.fields_for(goal)[field] if unit == "target" else 1)
            fields[field] = math.ceil(number) if get_type_hints(kind)[field] is int else f"{number:.4g}"
        spelled = ",".join(f"{name}={value}" for name, value in (fields | window).items())
        return ":".join(filter(None, [self.scheme, spelled])) + ("+logn" if self.logn else "")


def lengths_up_to(target: int, trained: int) -> list[int]:
    """L, its doublings below the target, and the target, in tokens."""
    from rope_patch.evaluation.scheme_specs import check_beyond

    check_beyond(target, trained)
    lengths = [trained]
    while 2 * lengths[-1] < target:
        lengths.append(2 * lengths[-1])
    return [*lengths, target]


def schemes_to_sweep(regime: str, only: Sequence[str]) -> list[tuple[str, Any]]:
    """Names of schemes with their sweeps; schemes that keep distances as they were trained come first."""
    from rope_patch.errors import EvaluationError, did_you_mean
    from rope_patch.schemes import Scheme, list_schemes, scheme_class

    declared = {name: scheme_class(name) for name in list_schemes() if scheme_class(name).sweep}
    only = [scheme_class(name).name for name in only]
    for name in only:
        if name not in declared:
            raise EvaluationError(f"a sweep does not try {name!r}; {did_you_mean(name, declared)}")
    regimes = ("training-free",) if regime == "training-free" else ("training-free", "fine-tune")
    names = [name for name in declared if declared[name].regime in regimes and (not only or name in only)]
    if not names:
        raise EvaluationError(f"{', '.join(only)}: made to be fine-tuned; ask for it with --regime fine-tune")
    names.sort(key=lambda name: (regimes.index(declared[name].regime), declared[name].segments is Scheme.segments))
    return [(name, sweep) for name in names for sweep in declared[name].sweep or ()]


def candidates(number: int, swept: Sequence[tuple[str, Any]], measured: Mapping[Candidate, float]) -> list[Candidate]:
    """The candidates of a round, from the NLL at the target of the candidates of earlier rounds."""
    if number == 1:
        return [Candidate(name, sweep, sweep.values[0]) for name, sweep in swept]
    order = sorted(measured, key=lambda candidate: measured[candidate])
    contenders = best_of_each(order)
    if number == 2:
        wanted = [replace(best, logn=True) for best in contenders]
    elif number == 3:
        wanted = [replace(best, value=value) for best in contenders for value in best.sweep.values]
    else:
        wanted = []
        for best in contenders[:1]:
            values = sorted({each.value for each in order if (each.scheme, each.sweep) == (best.scheme, best.sweep)})
            between = [(low + high) / 2 for low, high in pairwise(values) if best.value in (low, high)]
            wanted += [replace(best, value=value) for value in between]
    return [candidate for candidate in wanted if candidate not in measured]


def best_of_each(order: Sequence[Candidate]) -> list[Candidate]:
    """The best candidate of each of the best schemes, in this order."""
    best_of = {candidate.scheme: candidate for candidate in reversed(order)}
    return sorted(best_of.values(), key=order.index)[:CONTENDERS]


def curves(measured: Mapping[Candidate, Mapping[int, float]], trained: int) -> list[Candidate]:
    """Candidates of the last round, from the NLL by length of earlier ones. For each of the best schemes that has a
    `fit`, this is the curve through the best value at each length, among candidates that differ only in this value.
    """
    from rope_patch.schemes import scheme_class

    found = []
    for best in best_of_each(sorted(measured, key=lambda candidate: list(measured[candidate].values())[-1])):
        by_length: dict[int, dict[float, float]] = {}
        for each, losses in measured.items():
            for length, loss in losses.items() if replace(each, value=best.value) == best else ():
                by_length.setdefault(length, {})[each.value * trained] = loss
        # where no value makes a difference, a text is too short for the rule
        values = {length: lowest(losses) for length, losses in by_length.items() if len(set(losses.values())) > 1}
        if fields := scheme_class(best.scheme).fit(values):
            found.append(replace(best, curve=tuple(fields.items())))
    return found


def lowest(losses: Mapping[float, float]) -> float:
    """The value with the lowest loss: the vertex of the parabola through the best tried value and its two neighbours;
    the best value itself if it has only one neighbour.
    """
    values = sorted(losses)
    place = values.index(min(values, key=lambda value: losses[value]))
    if place in (0, len(values) - 1):
        return values[place]
    low, best, high = values[place - 1 : place + 2]
    left, right = (losses[low] - losses[best]) / (best - low), (losses[high] - losses[best]) / (high - best)
    return best + (left * (high - best) - right * (best - low)) / (2 * (left + right)) if left + right else best


def server_named(name: str | None) -> str | None:
    """The name of a server in tables."""
    from rope_patch.errors import EvaluationError, did_you_mean
    from rope_patch.saving.readers import SERVERS

    named = [server for server in SERVERS if name is not None and server.lower() == name.lower()]
    if name is not None and not named:
        raise EvaluationError(f"serve={name!r} is not allowed; {did_you_mean(name, SERVERS)}")
    return next(iter(named), None)


def is_served(server: str | None, config: Any, line: str) -> bool:
    """Whether a server can compute the scheme of a line; True without a server."""
    return server is None or any(name.startswith(server) for name in servers_of(line, config))


def servers_of(line: str, config: Any) -> list[str]:
    """Other programs that can compute the scheme of a line."""
    from rope_patch.evaluation.scheme_specs import scheme_at
    from rope_patch.saving.readers import served_by

    return served_by(scheme_at(line, 1), config)


def used_up(options: Options, seconds: float, measurements: int) -> str | None:
    """The budget that does not allow so many new measurements, or that is used up."""
    if options.budget_minutes is not None and seconds >= 60 * options.budget_minutes:
        return f"{options.budget_minutes:g} minutes"
    if options.budget_measurements is not None and measurements > options.budget_measurements:
        return f"{options.budget_measurements} measurements"
    return None


def rank(rows: Mapping[str, Sequence[Any]]) -> list[str]:
    """The lines from best to worst at the target; of equal lines, the better over all lengths comes first."""
    lines = sorted(rows, key=lambda line: rows[line][-1].nll)
    equals = [line for line in lines if rows[line][-1].nll <= rows[lines[0]][-1].nll + TIE]
    best = min(equals, key=lambda line: fmean(row.nll for row in rows[line]), default=None)
    return sorted(lines, key=lambda line: line != best)


def timed(measure: Any) -> tuple[float, Any]:
    """The seconds that a measurement takes, and its rows."""
    began = time.monotonic()
    rows = measure()
    return time.monotonic() - began, rows


def advice(options: Options) -> str:
    """The command to run next if no candidate was tried: twice the time, or `--dry-run`."""
    more = f"--budget-minutes {2 * options.budget_minutes:g}" if options.budget_minutes else "--dry-run"
    return f"sweep --target {options.target} {more}"


def recommend(confirmation: Mapping[str, Sequence[Any]], best: str) -> tuple[Any, float, float | None]:
    """The verdict on the best line, its difference at the target from the reference, and the error of this difference.

    Args:
        confirmation: rows of the references and of the best line at L and at the target, on text that was not used for
            the choice.
    """
    from rope_patch.evaluation.standard_errors import paired_difference
    from rope_patch.evaluation.verdict import of_losses, reference_of

    rows = [row for line in confirmation for row in confirmation[line]]
    verdict, at_l, at_target = of_losses(rows), confirmation[best][0], confirmation[best][-1]
    difference, error = paired_difference(at_target, reference_of(rows, at_target.length))
    told = verdict.sentence[:1].lower() + verdict.sentence[1:]
    verdict = replace(verdict, sentence=f"On the half of the text that did not choose it, {told}")
    if "plain" in confirmation:
        cost = at_l.nll - confirmation["plain"][0].nll
        price = f"It {'costs' if cost > 0 else 'gains'} {abs(cost):.3f} at {at_l.length} tokens."
        verdict = replace(verdict, sentence=f"{verdict.sentence} {price}")
    return verdict, difference, error


def print_table(rows: Mapping[str, Sequence[Any]], best: str | None, config: Any) -> None:
    """Print the lines from best to worst at the target, with references, and with other programs that can compute each
    line.
    """
    from rich.console import Console
    from rich.table import Table

    from rope_patch.evaluation.scheme_specs import CONTROLS, in_a_sentence
    from rope_patch.evaluation.tables import Grid, signed

    grid = Grid.from_rows([row for line in rows for row in rows[line]])
    (first, *middle, target), trained = grid.lengths, grid.any.training_length
    free = in_a_sentence(grid.baseline)
    table = Table("scheme", str(target), "minus reference", f"minus plain at {first}", *map(str, middle))
    table.title = f"{grid.any.model}: NLL in nats per token, L = {trained}, best first"
    table.add_column("served by")
    for series in grid.series:
        losses = [f"{row.nll:.3f}" if (row := grid.row(series, length)) else "" for length in (target, *middle)]
        apart = "0" if series.line == grid.baseline else grid.below(series, target)
        at_first, plain = grid.row(series, first), grid.row("plain", first)
        cost = signed(at_first.nll - plain.nll) if at_first and plain else ""
        served = "" if series.line in CONTROLS else ", ".join(servers_of(series.line, config)) or "this library"
        style = "bold green" if series.line == best else None
        table.add_row(grid.name(series), losses[0], apart, cost, *losses[1:], served, style=style)
    errors = (
        f"minus reference: loss minus that of {free}, ± the error of this difference; minus plain: loss minus that of "
        "the plain checkpoint"
    )
    servers = "served by: config is any server that reads Transformers' rope_parameters, see rope-patch export"
    Console().print(table, errors, *grid.notes(), servers, sep="\n")


if __name__ == "__main__":
    run(Options, main)
