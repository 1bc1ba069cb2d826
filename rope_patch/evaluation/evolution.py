"""Lists of factors, one per pair of dimensions, that evolve; and the losses of several such lists from one forward."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.measured_model import MeasuredModel
from rope_patch.evaluation.nll import chunked_nll
from rope_patch.evaluation.processes import on_main, over_processes
from rope_patch.evaluation.protocols.protocol import Context, Protocol
from rope_patch.evaluation.row import Row, Rows
from rope_patch.evaluation.scheme_specs import schemes_at_lengths
from rope_patch.schemes import Scheme
from rope_patch.schemes.tools.rotary import inverse_frequencies
from rope_patch.typing import NO_WEIGHTS, Frequencies, Lengths, RotarySpec, Weights

Factors = tuple[float, ...]
"""lambda_i of theta_i / lambda_i, from the fastest pair to the slowest."""

ATTEMPTS = 20  # at a child that was not measured yet


@dataclass(frozen=True)
class Evolution:
    """Monotone evolution: no list slows a pair less than a faster pair.

    Generation 0 is the starts. Each later one has mutations and crossovers of the best half population of all that was
    measured, so the best never gets worse. A mutation moves pairs to places between their neighbours; a crossover takes
    the fast pairs of one parent and the slow pairs of the other. A parent is the better of two that are drawn.
    A generation follows from its number, the seed and the losses alone.

    Source: LongRoPE2, 2502.20082 (population 64, 16 mutations with p = 0.3, 16 crossovers, 32 parents, step 0.01, no
    code); the mutation is that of LongRoPE, microsoft/LongRoPE c9e56aa `evolution/algorithms/dim_mono.py`. Both fill
    the first population with mutations of the start; here only lists that the losses favour are mutated.

    Args:
        starts: lists of one length, all factors from 1 to 1 + k.
        factor: k.
        population: half of it are parents, a quarter each mutations and crossovers of a generation; at least 4.
        chance: p, that a mutation moves a pair.
        step: of the grid on which pairs move.

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
            if any(low > high for low, high in pairwise((1.0, *start, 1 + self.factor))):
                raise EvaluationError(f"start {start}: factors must ascend from 1 to 1 + k = {1 + self.factor:g}")

    def generation(self, number: int, losses: Mapping[Factors, float]) -> list[Factors]:
        """The lists of a generation.

        Args:
            losses: of all lists of the generations before it, in nats.
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
        """Each pair moves with the chance p to a random place between its neighbours."""
        found = [1.0, *factors, 1 + self.factor]
        for pair in range(1, len(found) - 1):
            if random.random() < self.chance:
                low, high = found[pair - 1], found[pair + 1]
                place = round(random.uniform(low, high) / self.step) * self.step
                found[pair] = min(max(round(place, 9), low), high)
        return tuple(found[1:-1])

    def crossed(self, fast: Factors, slow: Factors, random: np.random.Generator) -> Factors:
        """The fast pairs of one list and the slow pairs of another, which are slowed at least as much as the fast."""
        cut = int(random.integers(1, max(2, len(fast))))
        return tuple(np.maximum.accumulate([*fast[:cut], *slow[cut:]]).tolist())


def factors_of(scheme: Scheme, rotary: RotarySpec) -> Factors:
    """theta_i over the frequencies of a static scheme, rounded to 6 digits, as a list that never falls."""
    slowed = inverse_frequencies(rotary.dim, rotary.base) / scheme.frequencies(rotary).inv_freq.flatten()
    return tuple(np.maximum.accumulate(slowed.double().numpy().round(6).clip(min=1)).tolist())


@dataclass(frozen=True)
class SideBySide(Scheme):
    """Every row of a batch has the static frequencies of a scheme of its own."""

    name = "side_by_side"
    length_dependent = True  # so that frequencies may differ by row

    schemes: tuple[Scheme, ...]

    def frequencies(self, rotary: RotarySpec, length: Lengths = None, weights: Weights = NO_WEIGHTS) -> Frequencies:
        """As of `Scheme`, `(len(schemes), d/2)`."""
        each = [scheme.frequencies(rotary) for scheme in self.schemes]
        device = None if length is None else length.device
        temperatures = torch.tensor([[float(one.attention_scaling)] for one in each], device=device)
        return Frequencies(torch.stack([one.inv_freq for one in each]).to(device), temperatures)


def measure_together(
    model: MeasuredModel, task: Protocol, length: int, schemes: Sequence[Scheme], rows: Rows, name: str
) -> list[Row]:
    """The rows that `run` gives for schemes of static frequencies, from one forward for each context.

    Args:
        schemes: as many contexts have to fit into memory.
        rows: file for new rows; rows of an earlier run in it are not measured again.
        name: of the model in the rows.
    """
    (cell,) = task.cells(length)
    jobs = schemes_at_lengths(schemes, [length], model)
    facts = {**model.facts(name), "task": task.name}
    wanted: list[dict[str, Any]] = [{**facts, **job.facts, **cell.rows[0]} for job in jobs]
    known: list[Any] = on_main(lambda: [rows.recall(fields) for fields in wanted])
    new = [index for index, row in enumerate(known) if row is None]
    if not new:
        return known
    together = schemes[new[0]] if len(new) == 1 else SideBySide(tuple(schemes[index] for index in new))

    def score(item: Context) -> torch.Tensor:
        tokens = item.tokens.to(model.language_model.device).expand(len(new), -1)
        losses = chunked_nll(model.model, tokens[:, :-1], tokens[:, item.start + 1 :])
        return losses[:, : item.stop - item.start].double().cpu()

    began = time.perf_counter()
    with model.patched_with(together):
        scores = over_processes(score, cell.items, model.model)
    seconds = (time.perf_counter() - began) / len(new)

    def write() -> list[Row]:
        for place, index in enumerate(new):
            fields = {**wanted[index], "seconds": round(seconds, 3)}
            fields["tokens_per_second"] = round(sum(map(task.size, cell.items)) / seconds, 1)
            known[index] = Row(**fields, **task.row(fields, cell.items, [losses[place] for losses in scores]))
            rows.append(known[index])
        return known

    return on_main(write)
