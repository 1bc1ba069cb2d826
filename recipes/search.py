"""Search the frequencies of a checkpoint for a longer context: a factor for each pair of dimensions, or for each layer.

    rope-patch search --target 4x --budget-minutes 1
    rope-patch search --model DIR --text book.txt --target 4x --budget-minutes 60
    rope-patch search --model DIR --text book.txt --target 4x --by layer
    rope-patch search --model DIR --text book.txt --target 8x --candidates-per-forward 8
    torchrun --nproc-per-node 4 recipes/search.py --target 8x

Lists of factors evolve from the lists of PI, NTK, YaRN and MrRoPE (docs/search.md). One half of the text scores them,
on tokens that only a farther context can predict. The best list is then compared with YaRN on the other half, which was
not used for the choice, also on ordinary text and at L. It is written as a `longrope` that every reader of `rope-patch
export` accepts. With `--by layer` curves over depth evolve instead, which give each layer a YaRN with its own factor.
Results are saved as you go: run the same command again to resume.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rope_patch.cli.options import (
    Amount,
    Count,
    Folder,
    Length,
    Measured,
    is_main,
    print_json,
    run,
    say,
)
from rope_patch.errors import EvaluationError

STARTS = ("pi", "ntk", "yarn", "mrrope")
COMPARED = ("yarn", "mrrope")  # those that are confirmed beside what was found
CONFIRMING = 16  # windows at least, of the half that does not choose
FOUND, KEPT = "found", "found, plain up to L"  # as tables name them: one list for all lengths, and two lists
LOST = 0.005  # nats that may be lost at L
ATTEMPTS = 20  # at a child that was not measured yet
NEXT = {
    "pair": 'rope-patch export {checkpoint} --scheme "$(cat {folder}/scheme.txt)" --output {folder}/exported',
    "layer": 'rope-patch serve {checkpoint} --scheme "$(cat {folder}/scheme.txt)"',
}

Factors = tuple[float, ...]
"""lambda_i of theta_i / lambda_i, from the fastest pair to the slowest; or the points of a curve over depth."""


@dataclass(kw_only=True)
class Options(Measured):
    target: Length  # context length to reach: tokens, or a multiple of L such as 4x
    by: Literal["pair", "layer"] = "pair"  # search a factor for each pair of dimensions, or for each layer under YaRN
    budget_minutes: Amount = None  # time limit for everything, including the confirmation of the winner
    generations: int = 40  # number of generations at most
    population: int = 64  # size of the population; half of it are parents, and a generation has as many new lists
    protocol: Literal["repeat", "far", "last"] = "repeat"  # score tokens that need far context, or ordinary text
    targets: Count = None  # number of scored tokens in each window (default: the protocol's own)
    documents: Count = None  # number of documents in each half, drawn at random (default: all)
    windows_per_document: Count = None  # windows scored in each document (default: the protocol's own)
    attention_factor: Amount = None  # factor on cos and sin at all lengths; 1 is none (default: YaRN's 0.1 ln k + 1)
    candidates_per_forward: int = 1  # lists that share a forward; more are faster only on a GPU
    output: Folder = "runs/search"  # folder for search.jsonl, search.png, scheme.txt and scheme-short.txt


def main(options: Options) -> None:
    """Measure the starting lists, let them evolve, and compare the best with YaRN."""
    from rope_patch.data.corpora import load_text, name_of_text
    from rope_patch.data.held_out import halves
    from rope_patch.errors import MissingPackage
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
    from rope_patch.evaluation.row import Rows
    from rope_patch.evaluation.run import run as run_task
    from rope_patch.evaluation.scheme_specs import TRUNCATED
    from rope_patch.evaluation.side_by_side import measure_together
    from rope_patch.evaluation.tables import print_table
    from rope_patch.evaluation.tasks.perplexity import Perplexity
    from rope_patch.mounting.plan import plan_mounts
    from rope_patch.saving.loading import (
        default_checkpoint,
        load_model,
        load_tokenizer,
        quiet_transformers,
        trained_length,
    )
    from rope_patch.schemes import PerLayer, get_scheme

    # the plan, before anything slow
    began = time.monotonic()
    checkpoint, target = options.model or default_checkpoint(), options.target
    trained = trained_length(checkpoint)
    check(options, trained)
    asked: dict[str, Any] = {"documents": options.documents, "seed": options.seed, "protocol": options.protocol}
    asked |= {"windows_per_document": options.windows_per_document, "targets": options.targets}
    plan = Perplexity(text=name_of_text(options.text, options.dataset, options.split), **asked)
    plan.check([trained, target])

    # the model, and the text in two halves
    rows = Rows(Path(options.output) / "search.jsonl")
    with quiet_transformers():
        tokenizer = load_tokenizer(checkpoint)
        corpus = load_text(options.text, options.dataset, split=options.split, column=options.column)
        model = load_model(checkpoint, dtype=options.dtype, device=options.device, attention=options.attention)
    pop_scheme(model, say)
    measured, name = MeasuredModel(model), options.model or "tiny-llama"
    lengths = [trained, target]

    def both_halves(documents: int | None) -> tuple[Any, dict[str, Any]]:
        choosing, confirming = halves(corpus, tokenizer, target + 1, documents, options.seed)
        each = math.ceil(CONFIRMING / len(confirming))
        other = replace(plan, tokenizer=tokenizer, corpus=confirming, windows_per_document=each)
        ordinary = replace(other, protocol="last", targets=None)
        choice = replace(plan, tokenizer=tokenizer, corpus=choosing).resolve(measured, [target])
        return choice, {one.protocol: one.resolve(measured, lengths) for one in (ordinary, other)}

    documents = options.documents
    if options.budget_minutes and documents is None:
        documents = documents_before(rows.rows, target, lambda number: both_halves(number)[0])
    choice, tests = both_halves(documents)
    if options.budget_minutes and documents == options.documents:
        rates = seconds_per_token(model, tests["last"], lengths)

        def parts_of(both: tuple[Any, dict[str, Any]]) -> list[Part]:
            starts = Part(seconds_of_a_line(rates, both[0], [target]), len(STARTS), len(STARTS) + options.population)
            lines = {name: len(test.references) + len(COMPARED) + 1 for name, test in both[1].items()}
            others = [Part(seconds_of_a_line(rates, both[1][name], lengths), *[lines[name]] * 2) for name in lines]
            return [starts, *others]

        left = options.budget_minutes - (time.monotonic() - began) / 60
        numbers = fewer_documents(choice.selection.documents, chosen=documents is not None)
        choice, tests = halves_within(left, numbers, both_halves, parts_of, say)

    # YaRN and others on the half that does not choose; then the starts
    stack = measured.stacks[0]
    if stack.checkpoint.pairs is None or stack.native is None:
        raise EvaluationError(f"{checkpoint} has no pairs of dimensions that rotate alike in all layers")
    spec, factor = stack.layers[0].spec, target / stack.training_length
    starts = {start: get_scheme(start, factor=factor) for start in STARTS}
    if options.by == "pair":
        factors = {start: factors_of(scheme, spec) for start, scheme in starts.items()}
        evolution = Evolution(tuple(factors.values()), factor, options.population, options.seed)
        temperature = options.attention_factor or starts["yarn"].frequencies(spec).attention_scaling
        longrope = partial(get_scheme, "longrope", factor=factor, attention_factor=float(temperature))
        plain = factors_of(stack.native.resolve(stack.checkpoint), spec)

        def schemes_of(each: Factors) -> dict[str, Any]:
            kept = longrope(short_factor=plain, long_factor=each)
            return {FOUND: longrope(short_factor=each, long_factor=each), KEPT: kept}

    else:
        layers = [layer.index for layer in plan_mounts(starts["yarn"], stack).touched(stack)]
        factors = curves_to(factor)
        evolution = Curves(tuple(factors.values()), factor, options.population, options.seed)
        yarn = partial(get_scheme, "yarn", attention_factor=options.attention_factor)

        def schemes_of(each: Factors) -> dict[str, Any]:
            by_layer = zip(layers, over_depth(each, len(layers)), strict=True)
            return {FOUND: PerLayer({**{index: yarn(factor=own) for index, own in by_layer}, "rest": None})}

    confirmation = {}
    for protocol, test in tests.items():
        free = test.references if protocol == options.protocol else (TRUNCATED,)
        lines = [*free, *(f"{start}:factor={factor:g}" for start in COMPARED)]
        confirmation[protocol] = run_task(model, test, lines, lengths, rows, name=name)
    reserve = sum(row.seconds or 0 for each in confirmation.values() for row in each if row.line.startswith(COMPARED))

    # generation after generation; what follows depends on nothing but what was measured
    losses: dict[Factors, float] = {}
    slowest, spent, stopped = 0.0, False, f"all {options.generations} generations were measured"
    for generation in range(options.generations + 1):
        wanted = evolution.generation(generation, losses)
        for place in range(0, len(wanted), options.candidates_per_forward):
            group = wanted[place : place + options.candidates_per_forward]
            seconds = time.monotonic() - began + slowest + reserve
            spent = bool(generation) and on_main(partial(is_over, options.budget_minutes, seconds))
            if spent:
                stopped = f"the budget of {options.budget_minutes:g} minutes was used up in generation {generation}"
                break
            schemes = [schemes_of(each)[FOUND] for each in group]
            new = measure_together(measured, choice, target, schemes, rows, name)
            losses |= {
                each: math.inf if math.isnan(row.loss) else row.loss for each, row in zip(group, new, strict=True)
            }
            slowest = max(slowest, sum(row.seconds or 0 for row in new))
        best = min(losses, key=lambda each: losses[each])
        if not math.isfinite(losses[best]):
            raise EvaluationError(
                f"protocol {options.protocol!r} scores no token of the half that chooses; use a longer text"
            )
        minutes = (time.monotonic() - began) / 60
        say(
            f"generation {generation} of {options.generations}: best {losses[best]:.4f} (YaRN's "
            f"{losses[factors['yarn']]:.4f}), {len(losses)} lists, {minutes:.1f} minutes"
        )
        if spent:
            break

    # the best list, on the half that did not choose it
    found = schemes_of(best)
    for protocol, test in tests.items():
        for line, scheme in found.items():
            new = [measure_together(measured, test, length, [scheme], rows, name)[0] for length in lengths]
            confirmation[protocol] += [replace(row, line=line) for row in new]
    if not is_main():
        return
    verdict = judge(confirmation[options.protocol], confirmation["last"], NEXT[options.by])
    folder = rows.path.parent
    for file, scheme in zip(("scheme.txt", "scheme-short.txt"), found.values(), strict=False):
        (folder / file).write_text(str(scheme).replace(" ", "") + "\n")
    if options.json:
        short = {"short": str(found[KEPT])} if KEPT in found else {}
        outcome = {"scheme": str(found[FOUND]), **short, "verdict": verdict.kind, "stopped": stopped}
        outcome |= {"sentence": verdict.sentence, "lists": len(losses), "choosing": list(losses.values())}
        shown = [json.loads(row.to_json()) for each in confirmation.values() for row in each]
        print_json(outcome | {"confirmation": shown})
    else:
        for each in confirmation.values():
            print_table(each)
        print(stopped)
    try:
        picture(losses, factors, best, folder / "search.png", f"{Path(name).name} at {target} tokens", options.by)
    except MissingPackage as missing:
        say(str(missing))
    short = " and its form with the plain factors up to L" if KEPT in found else ""
    say(f"wrote {rows.path}, the scheme ({folder / 'scheme.txt'}){short}")
    for sentence in (verdict.sentence, f"Next: {verdict.command.format(checkpoint=checkpoint, folder=folder)}"):
        say(sentence) if options.json else print(sentence)


@dataclass(frozen=True)
class Evolution:
    """Monotone evolution: no list slows a pair less than a faster pair.

    Generation 0 has the starting lists. Each later generation has mutations and crossovers of the best lists so far,
    half a population of them, so the best never gets worse. A mutation moves pairs to places between their neighbours;
    a crossover takes the fast pairs of one parent and the slow pairs of the other. A parent is the better of two that
    are drawn. A generation depends only on its number, the seed and the losses.

    Source: LongRoPE2, 2502.20082 (population 64, 16 mutations with p = 0.3, 16 crossovers, 32 parents, step 0.01; its
    code, branch `longrope2` of microsoft/LongRoPE, was not read); the mutation comes from LongRoPE, microsoft/LongRoPE
    c9e56aa `evolution/algorithms/dim_mono.py`. Both fill the first population with mutations of the start; here only
    lists that the losses favour are mutated.

    Args:
        starts: lists of equal length, with all factors from 1 to 1 + k.
        factor: k.
        population: size of the population, at least 4: half are parents; a quarter each are mutations and crossovers.
        chance: p, the probability that a mutation moves a pair.
        step: step of the grid on which pairs move.

    Raises:
        EvaluationError: a start or the population is not allowed.
    """

    starts: tuple[Factors, ...]
    factor: float
    population: int = 64
    seed: int = 0
    chance: float = 0.3
    step: float = 0.01

    def __post_init__(self) -> None:
        if self.population < 4:
            raise EvaluationError(f"population={self.population} is not allowed; it must be at least 4")
        for start in self.starts:
            self.check(start)

    def check(self, start: Factors) -> None:
        """Refuse a start that falls, or leaves the bounds."""
        if any(low > high for low, high in pairwise((1.0, *start, 1 + self.factor))):
            raise EvaluationError(f"start {start}: factors must ascend from 1 to 1 + k = {1 + self.factor:g}")

    def generation(self, number: int, losses: Mapping[Factors, float]) -> list[Factors]:
        """The lists of a generation.

        Args:
            losses: losses of all lists of earlier generations, in nats.
        """
        if number == 0:
            return list(dict.fromkeys(self.starts))
        random = np.random.default_rng([self.seed, number])
        ranked = sorted(losses, key=lambda factors: losses[factors])
        parents, quarter = ranked[: self.population // 2], self.population // 4
        children: dict[Factors, None] = {}
        for kind in (self.mutated, self.crossed):
            for _ in range(quarter * ATTEMPTS):
                better, other = (parents[random.integers(len(parents), size=2).min()] for _ in range(2))
                child = kind(better, other, random)
                if child not in losses:
                    children[child] = None
                if len(children) == quarter * (1 + (kind == self.crossed)):
                    break
        return list(children)

    def mutated(self, factors: Factors, _: Factors, random: np.random.Generator) -> Factors:
        """Move each pair with the probability p to a random place between its neighbours."""
        found = [1.0, *factors, 1 + self.factor]
        for pair in range(1, len(found) - 1):
            if random.random() < self.chance:
                low, high = found[pair - 1], found[pair + 1]
                place = round(random.uniform(low, high) / self.step) * self.step
                found[pair] = min(max(round(place, 9), low), high)
        return tuple(found[1:-1])

    def crossed(self, fast: Factors, slow: Factors, random: np.random.Generator) -> Factors:
        """Join the fast pairs of one list and the slow pairs of another; the slow ones are slowed at least as much."""
        cut = int(random.integers(1, max(2, len(fast))))
        return tuple(np.maximum.accumulate([*fast[:cut], *slow[cut:]]).tolist())


@dataclass(frozen=True)
class Curves(Evolution):
    """Evolution of curves over depth: four points of a Bezier curve, each from 1 to 1 + k, from which `over_depth`
    takes the factor of every layer. A mutation moves points to any place within the bounds; a crossover takes the first
    points of one parent and the last points of the other.

    Source: 2503.04355, where layers have their own factors, on a Bezier curve that a genetic algorithm finds. Only its
    abstract was read; the points, the bounds and the operators are this library's.
    """

    def check(self, start: Factors) -> None:
        """Refuse a start that leaves the bounds."""
        if not all(1 <= point <= 1 + self.factor for point in start):
            raise EvaluationError(f"start {start}: points must be from 1 to 1 + k = {1 + self.factor:g}")

    def mutated(self, factors: Factors, _: Factors, random: np.random.Generator) -> Factors:
        """Move each point with the probability p to a random place."""
        moves = random.random(len(factors)) < self.chance
        places = (random.uniform(1, 1 + self.factor, len(factors)) / self.step).round() * self.step
        return tuple(np.where(moves, places.round(9), factors).tolist())

    def crossed(self, fast: Factors, slow: Factors, random: np.random.Generator) -> Factors:
        """Join the first points of one curve and the last points of another."""
        cut = int(random.integers(1, len(fast)))
        return (*fast[:cut], *slow[cut:])


def curves_to(factor: float) -> dict[str, Factors]:
    """The curves that evolution starts with for a factor k: YaRN's k in all layers, half of it, and ramps."""
    half = max(1.0, factor / 2)
    return {"yarn": (factor,) * 4, "half": (half,) * 4, "rising": tuple(np.linspace(half, factor, 4).tolist())} | {
        "falling": tuple(np.linspace(factor, half, 4).tolist())
    }


def over_depth(points: Factors, layers: int) -> Factors:
    """The Bezier curve of some points at the depth of each layer, from 0 for the first layer to 1 for the last, rounded
    to 4 digits.
    """
    depths, last = np.linspace(0, 1, layers), len(points) - 1
    curve = sum(math.comb(last, i) * depths**i * (1 - depths) ** (last - i) * point for i, point in enumerate(points))
    return tuple(np.asarray(curve).round(4).tolist())


def factors_of(scheme: Any, rotary: Any) -> Factors:
    """theta_i over the frequencies of a static scheme, rounded to 6 digits, as a list that never falls."""
    from rope_patch.schemes.tools.rotary import inverse_frequencies

    slowed = inverse_frequencies(rotary.dim, rotary.base) / scheme.frequencies(rotary).inv_freq.flatten()
    return tuple(np.maximum.accumulate(slowed.double().numpy().round(6).clip(min=1)).tolist())


def check(options: Options, trained: int) -> None:
    """Refuse options that do not allow a search.

    Raises:
        EvaluationError: an option is wrong; the message names it, its value and what is allowed.
    """
    from rope_patch.evaluation.scheme_specs import check_beyond

    check_beyond(options.target, trained)
    if options.by == "layer" and options.candidates_per_forward > 1:
        raise EvaluationError(
            f"candidates_per_forward={options.candidates_per_forward} is not allowed with by=layer, where a forward "
            "has one curve; it must be 1"
        )
    for name in ("generations", "candidates_per_forward"):
        if (value := getattr(options, name)) < 1:
            raise EvaluationError(f"{name}={value} is not allowed; it must be at least 1")
    for name in ("budget_minutes", "attention_factor"):
        if (value := getattr(options, name)) is not None and not value > 0:
            raise EvaluationError(f"{name}={value:g} is not allowed; it must be above 0")


def is_over(budget: float | None, seconds: float) -> bool:
    """Whether a number of seconds exceeds a budget in minutes."""
    return budget is not None and seconds >= 60 * budget


def judge(rows: Sequence[Any], ordinary: Sequence[Any], command: str = NEXT["pair"]) -> Any:
    """The verdict on the best list, from rows at L and at the target, on text that was not used for the choice.

    Args:
        rows: rows of the protocol of the search: of `COMPARED`, of the best list, and of the protocol's references.
        ordinary: rows of the protocol `last`: of the same lines and of truncated text.
        command: the command to run next.
    """
    from rope_patch.evaluation.scheme_specs import display_name
    from rope_patch.evaluation.standard_errors import is_below, pairs_of
    from rope_patch.evaluation.verdict import Verdict, of_losses

    told = of_losses(rows)
    if told.kind in ("nothing", "too few"):
        return Verdict(told.kind, told.sentence, command)
    found, yarn = at(rows, FOUND)[-1], at(rows, "yarn")[-1]
    kind = "better" if is_below(found, yarn) else "worse" if is_below(yarn, found) else "noise"
    text = {"repeat": "on a passage more than L back", "far": "on tokens that repeat what is more than L back"}
    others = " and ".join(f"{apart(found, at(rows, name)[-1])} {display_name(name)}" for name in COMPARED)
    sentences = [
        f"On {found.length} tokens of text that did not choose them, the factors found ({found.loss:.3f}) are {others} "
        f"{text.get(found.protocol, 'on its last tokens')} ({pairs_of(found)}).",
        "The difference from YaRN is noise." if kind == "noise" else "",
    ]
    (plain, _), (yarn_at_l, yarn), (at_l, found) = (at(ordinary, line) for line in ("cut", "yarn", FOUND))
    kept, *_ = at(ordinary, KEPT) or [at_l]
    if rows is not ordinary:
        sentences.append(f"On ordinary text of that length they are {apart(found, yarn)} YaRN.")
    sentences.append(
        f"At L = {at_l.length} tokens of ordinary text they are {apart(at_l, plain)} the plain checkpoint, and YaRN is "
        f"{apart(yarn_at_l, plain)} it"
        + (f"; with the plain factors up to L they are {apart(kept, plain)} it." if kept is not at_l else ".")
    )
    if kept is not at_l and kept.loss - plain.loss > LOST:
        sentences.append(
            f"That is more than {LOST}, because the temperature stays: --attention-factor 1 leaves it out."
        )
    return Verdict(kind, " ".join(filter(None, sentences)), command)


def at(rows: Sequence[Any], name: str) -> list[Any]:
    """The rows of a line, or of a scheme at any of its values, by length."""
    return [row for row in rows if row.line.partition(":")[0] == name]


def apart(row: Any, other: Any) -> str:
    """The difference of two losses on the same text in words, with its error."""
    from rope_patch.evaluation.standard_errors import paired_difference

    difference, error = paired_difference(row, other)
    within = "" if error is None else f" ± {error:.3f}"
    return f"{abs(difference):.3f}{within} {'below' if difference < 0 else 'above'}"


def picture(
    losses: Mapping[Any, float], starts: Mapping[str, Any], best: Any, path: Path, title: str, by: str = "pair"
) -> None:
    """Draw the best loss so far against the number of lists, and the factors of the best list and of the starts by
    pair, or by depth.

    Args:
        losses: losses of all lists in the order of measurement, the starts first.
        starts: the factors of each start by name.
        by: the unit with its own factor, `pair` or `layer`.
    """
    from rope_patch.evaluation import charts
    from rope_patch.evaluation.scheme_specs import display_name

    order, axis = {
        "pair": ("the fastest to the slowest", "pair of dimensions"),
        "layer": ("the first to the last", "depth in percent"),
    }[by]
    caption = (
        "Above: NLL of the best list so far, on the half of the text that chooses; dashed: YaRN's. Below: by how much "
        f"each {by} is slowed, from {order}."
    )
    figure, above, below = charts.sheet(title, caption, 5.0, 2)
    first, curve = len(set(starts.values())), list(accumulate(losses.values(), min))
    above.plot(
        range(first, len(curve) + 1), curve[first - 1 :], color=charts.COLOURS[1], linewidth=1.8, drawstyle="steps-post"
    )
    above.axhline(losses[starts["yarn"]], color=charts.FAINT, linestyle="--", linewidth=1.2)
    above.set(xlabel="lists measured", ylabel="NLL, nats per token")
    below.set(xlabel=axis, ylabel="factor")
    lines = {}
    for (name, factors), colour in zip({FOUND: best, **starts}.items(), charts.COLOURS[1:], strict=False):
        style = {"color": colour, "linewidth": 2.2 if name == FOUND else 1.2}
        drawn = over_depth(factors, 101) if by == "layer" else factors
        (lines[display_name(name)],) = below.plot(range(len(drawn)), drawn, **style)
    charts.name_lines(below, lines)
    charts.write(figure, path)


if __name__ == "__main__":
    run(Options, main)
