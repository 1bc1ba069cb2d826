"""Which scheme suits a checkpoint at a target length: many tried within a budget, one recommended."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig

from rope_patch.errors import EvaluationError, RopePatchError, UnsupportedModel
from rope_patch.evaluation import chart, sharing
from rope_patch.evaluation.candidates import ROUNDS, Candidate, Family, candidates_of_round, chosen_families
from rope_patch.evaluation.description import check_at_least
from rope_patch.evaluation.figures import can_draw
from rope_patch.evaluation.loading import check_checkpoint, load_model, load_tokenizer
from rope_patch.evaluation.measurement import Measurement, Say, silent
from rope_patch.evaluation.perplexity import measure
from rope_patch.evaluation.results import ResultFile, Row
from rope_patch.evaluation.specs import CUT, REFERENCES
from rope_patch.evaluation.texts import select_windows
from rope_patch.evaluation.trained import Trained
from rope_patch.models.config import training_length
from rope_patch.models.reading import read_stacks
from rope_patch.saving.loading import make_loadable

SHOWN = 6
"""How many schemes the chart shows beside the references, each by its best line; with more it cannot be read."""

TIE = 0.001
"""Nats at the target by which a line may be worse and still be preferred, if it is better over all lengths."""


@dataclass(frozen=True)
class Sweep(Measurement):
    """What to look for, on what, and for how long. The fields are the keys of the YAML.

    Attributes:
        target: the length that matters, in tokens, or in multiples of L as `4x`.
        model, text, dataset, split, column, dtype, device, attention: see `Measurement`.
        schemes: names of those to try; default all that a sweep knows, see `candidates`.
        regime: `training-free`, or `fine-tune` to try those, too, that are made to be fine-tuned.
        budget_minutes: wall clock after which no other scheme is begun; default none, the plan ends by itself.
        budget_measurements: how many schemes at a length may be measured, references not counted; default none.
        targets: T, scored tokens per window; default min(L, 4096).
        documents: how many documents; default all.
        windows_per_document: how many places in each document are scored.
        output: folder of `sweep.jsonl` and `sweep.png`.
        seed: of the draw of documents.
    """

    target: str | int
    _: KW_ONLY
    schemes: tuple[str, ...] = ()
    regime: str = "training-free"
    budget_minutes: float | None = None
    budget_measurements: int | None = None
    targets: int | None = None
    documents: int | None = None
    windows_per_document: int = 1
    output: str = "runs/sweep"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "documents", "windows_per_document", "targets", "budget_measurements")
        check_at_least(self, 0, "budget_minutes")
        target_length(self.target, 1)
        chosen_families(self.regime, self.schemes)

    @property
    def families(self) -> tuple[Family, ...]:
        """What is tried."""
        return chosen_families(self.regime, self.schemes)


@dataclass(frozen=True)
class Plan:
    """What is known before anything is measured.

    Attributes:
        training_length: L in tokens.
        lengths: L, its doubles below the target, the target.
        families: in the order in which they are tried.
    """

    training_length: int
    lengths: tuple[int, ...]
    families: tuple[Family, ...]

    @property
    def target(self) -> int:
        """In tokens."""
        return self.lengths[-1]

    def line(self, candidate: Candidate) -> str:
        """As the table names it."""
        return candidate.line(self.training_length, self.target)

    @property
    def first_round(self) -> tuple[str, ...]:
        """The lines that are tried whatever comes out."""
        return tuple(self.line(candidate) for candidate in candidates_of_round(0, self.families, {}))


@dataclass(frozen=True)
class Outcome:
    """What a sweep found.

    Attributes:
        plan: what was planned.
        rows: references first, then the lines from best to worst at the target.
        refused: lines that this model cannot carry, with the reason.
        recommended: the best line at the target; None where no candidate could be measured.
        difference: its NLL at the target minus that of attention cut at L.
        error: standard error of the difference over documents; None for fewer than two documents.
        documents: how many documents the error is taken over.
        stopped: why the sweep ended.
        results: file of the rows.
        picture: file of the chart; None without matplotlib.
    """

    plan: Plan
    rows: list[Row]
    refused: dict[str, str]
    recommended: str | None
    difference: float
    error: float | None
    documents: int
    stopped: str
    results: Path
    picture: Path | None


def target_length(target: str | int, trained: int) -> int:
    """A target in tokens.

    Args:
        target: tokens, or multiples of L such as `4x`.
        trained: L in tokens.

    Raises:
        EvaluationError: it is neither.
    """
    multiple = re.fullmatch(r"(\d+(?:\.\d+)?)x", str(target))
    length = round(float(multiple[1]) * trained) if multiple else int(target) if str(target).isdigit() else 0
    if length < 1:
        raise EvaluationError(f"target {target!r} is not allowed; a number of tokens is, or multiples of L such as 4x")
    return length


def make_plan(sweep: Sweep, trained: int) -> Plan:
    """The lengths and the candidates.

    Raises:
        EvaluationError: the target is not beyond L.
    """
    target = target_length(sweep.target, trained)
    if target <= trained:
        raise EvaluationError(f"target {sweep.target} is {target} tokens; it has to be beyond L = {trained}")
    lengths = [trained]
    while 2 * lengths[-1] < target:
        lengths.append(2 * lengths[-1])
    return Plan(trained, (*lengths, target), sweep.families)


def plan_of(sweep: Sweep) -> Plan:
    """The plan, from the config of the checkpoint where that says L; else the checkpoint is loaded."""
    check_checkpoint(sweep.checkpoint)
    make_loadable(sweep.checkpoint)
    try:
        trained = training_length(AutoConfig.from_pretrained(sweep.checkpoint, trust_remote_code=False))
    except UnsupportedModel:
        trained = read_stacks(load_model(sweep.checkpoint, device="cpu"))[0].training_length
    return make_plan(sweep, trained)


def run(sweep: Sweep, say: Say = silent) -> Outcome:
    """Try round after round, writing every row as it comes, and recommend. Started again, it goes on where it stopped.

    Started by `torchrun` or `accelerate launch`, the processes divide the windows; the main one writes and speaks.

    Args:
        sweep: what to look for.
        say: see `Say`.

    Raises:
        RopePatchError, OSError: something is wrong with the description, the checkpoint, the text or the output.
    """
    say = sweep.begin(say)
    path = Path(sweep.output) / "sweep.jsonl"
    results = sharing.only_main(lambda: ResultFile(path))
    corpus = list(sweep.corpus())
    model, trained = sweep.load(say)
    plan = make_plan(sweep, read_stacks(model)[0].training_length)
    lengths = ", ".join(map(str, plan.lengths))
    say(f"trying {len(plan.families)} schemes at {lengths} tokens, best guesses first")
    tokenizer = RememberingTokenizer(load_tokenizer(sweep.checkpoint))
    search = _Search(sweep, plan, model, tokenizer, corpus, results, trained)
    search.measure(REFERENCES)
    stopped = search.go_through_rounds(say)
    ranked = search.ranked()
    rows = [row for line in (*REFERENCES, *ranked) for row in search.rows[line]]
    difference, error, documents = 0.0, None, 0
    if ranked:
        difference = search.at_target(ranked[0]) - search.at_target(CUT)
        error, documents = search.error_of_difference(ranked[0])
    shown = {*REFERENCES, *search.best_of_each(ranked)[:SHOWN]}
    drawn = [row for row in rows if row.line in shown]
    picture = sharing.on_main(lambda: chart.save(drawn, path.with_suffix(".png")) if can_draw(say) else None)
    recommended = ranked[0] if ranked else None
    return Outcome(plan, rows, search.refused, recommended, difference, error, documents, stopped, path, picture)


class RememberingTokenizer:
    """Tokenizes every text once: a sweep measures the same documents many times.

    Args:
        tokenizer: does the work; everything else is asked of it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[tuple[Any, ...], Any] = {}

    def __call__(self, text: str, **options: Any) -> Any:
        """What the tokenizer says of the text."""
        key = (text, *sorted(options.items()))
        if key not in self._known:
            self._known[key] = self._tokenizer(text, **options)
        return self._known[key]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@dataclass
class _Search:
    """A sweep under way: what was measured, what was refused, what is left of the budget.

    Several processes go through it alike; the main one alone has results, and decides whether the budget is used up.
    """

    sweep: Sweep
    plan: Plan
    model: nn.Module
    tokenizer: Any
    corpus: Sequence[Mapping[str, str]]
    results: ResultFile | None
    trained: Trained | None
    rows: dict[str, list[Row]] = field(default_factory=dict)
    candidates: dict[Candidate, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    spent: int = 0

    def measure(self, lines: Sequence[str]) -> None:
        """All lengths of these lines."""
        for row in self._measure(self.corpus, lines, self.plan.lengths, self.sweep.documents):
            self.rows.setdefault(row.line, []).append(row)

    def go_through_rounds(self, say: Say) -> str:
        """Measure until the plan or the budget ends; says which of them it was."""
        began = time.monotonic()
        for number, aim in enumerate(ROUNDS):
            measured = {candidate: self.at_target(line) for candidate, line in self.candidates.items()}
            wanted = candidates_of_round(number, self.plan.families, measured)
            say(f"round {number + 1} of {len(ROUNDS)}: {aim} ({len(wanted)} lines)")
            for candidate in wanted:
                line = self.plan.line(candidate)
                if line in self.rows or line in self.refused:
                    continue  # two values may be spelled alike once they are rounded
                if (reason := sharing.on_main(lambda: self._over_budget(began))) is not None:
                    return f"{reason} was used up in round {number + 1} of {len(ROUNDS)}"
                self._try(candidate, line)
        return "the plan was carried out to its end"

    def _try(self, candidate: Candidate, line: str) -> None:
        before = self._written()
        try:
            self.measure([line])
        except RopePatchError as error:
            self.refused[line] = " ".join(str(error).split())
            return
        self.candidates[candidate] = line
        self.spent += self._written() - before

    def _written(self) -> int:
        """How many rows the file of this process has."""
        return len(self.results.rows) if self.results else 0

    def _over_budget(self, began: float) -> str | None:
        """The budget that does not allow another line; rows of an earlier run have cost nothing."""
        minutes, measurements = self.sweep.budget_minutes, self.sweep.budget_measurements
        if minutes is not None and time.monotonic() - began >= 60 * minutes:
            return f"the budget of {minutes:g} minutes"
        if measurements is not None and self.spent + len(self.plan.lengths) > measurements:
            return f"the budget of {measurements} measurements"
        return None

    def at_target(self, line: str) -> float:
        """NLL at the target."""
        return self.rows[line][-1].nll

    def ranked(self) -> list[str]:
        """The candidates from best to worst at the target; among equals, the one that is better over all lengths."""
        lines = sorted(self.candidates.values(), key=self.at_target)
        if not lines:
            return []
        equals = [line for line in lines if self.at_target(line) <= self.at_target(lines[0]) + TIE]
        best = min(equals, key=lambda line: statistics.fmean(row.nll for row in self.rows[line]))
        return [best, *(line for line in lines if line != best)]

    def best_of_each(self, ranked: Sequence[str]) -> list[str]:
        """The best line of every scheme, in the order of the ranking."""
        schemes = {line: candidate.family.scheme for candidate, line in self.candidates.items()}
        best = {schemes[line]: line for line in reversed(ranked)}
        return sorted(best.values(), key=list(ranked).index)

    def error_of_difference(self, line: str) -> tuple[float | None, int]:
        """Standard error of the difference to attention cut at L, paired by document, and how many there are."""
        differences = []
        for document in self._documents():
            try:
                cut, other = self._measure([document], [CUT, line], self.plan.lengths[-1:], None)
            except EvaluationError:  # a short document that is named like one that was scored
                continue
            differences.append(other.nll - cut.nll)
        if len(differences) < 2:
            return None, len(differences)
        return statistics.stdev(differences) / len(differences) ** 0.5, len(differences)

    def _documents(self) -> list[Mapping[str, str]]:
        """Those that every row was measured on."""
        selection = select_windows(
            self.corpus,
            self.tokenizer,
            longest=self.plan.target,
            targets=self.rows[CUT][0].targets,
            documents=self.sweep.documents,
            windows_per_document=self.sweep.windows_per_document,
            seed=self.sweep.seed,
        )
        names = {window.document for window in selection.windows}
        return [document for document in self.corpus if document["name"] in names]

    def _measure(
        self, corpus: Sequence[Mapping[str, str]], lines: Sequence[str], lengths: Sequence[int], documents: int | None
    ) -> list[Row]:
        return measure(
            self.model,
            self.tokenizer,
            corpus,
            lines,
            lengths,
            targets=self.sweep.targets or self._targets(),
            documents=documents,
            windows_per_document=self.sweep.windows_per_document,
            seed=self.sweep.seed,
            name=self.sweep.name,
            results=self.results,
            trained=self.trained,
        )

    def _targets(self) -> int | None:
        """What the references were scored on, once they are there; a single document is scored on the same."""
        return self.rows[CUT][0].targets if CUT in self.rows else None
