"""What a sweep tries: schemes, their main field, and where its values come from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from rope_patch.errors import EvaluationError, did_you_mean
from rope_patch.schemes.registry import scheme_class

Unit = Literal["k", "L", "needed", "one"]

CONTENDERS = 3
"""How many of the best go on to the next round."""


@dataclass(frozen=True)
class Family:
    """A scheme, and the values of its main field that are worth trying.

    Attributes:
        scheme: its registered name.
        field: the main field; empty for a scheme without one.
        unit: what the values count in. `k` is the target over L, `L` the training length, `one` is 1, and `needed` is
            (target - w) / (L - w), the least factor at which no distance beyond the window w exceeds L.
        values: of the field, in that unit, best guess first.
        window: w beside the field, in L; 0 for a scheme without one.
    """

    scheme: str
    field: str
    unit: Unit
    values: tuple[float, ...]
    window: float = 0.0


FAMILIES = (
    Family("rerope", "window", "L", (1 / 2, 3 / 8, 5 / 8, 1 / 4)),
    Family("self_extend", "group_size", "needed", (1, 1.5, 2), window=1 / 2),
    Family("self_extend", "group_size", "needed", (1, 1.5, 2), window=1 / 4),
    Family("leaky_rerope", "factor", "needed", (2, 1, 4), window=1 / 2),
    Family("dca", "chunk_size", "L", (3 / 4, 1 / 2, 7 / 8)),
    Family("lm_infinite", "local_window", "L", (1, 3 / 4, 1 / 2)),
    Family("yarn", "factor", "k", (1, 1.5, 2)),
    Family("dynamic_yarn", "", "one", (1,)),
    Family("ntk", "factor", "k", (2, 1, 1.5, 3)),
    Family("ntk_mixed", "factor", "k", (1, 2, 1.5)),
    Family("ntk_by_parts", "factor", "k", (1, 1.5, 2)),
    Family("dynamic_ntk", "factor", "one", (1, 2, 4)),
    # made to be fine-tuned: tried only where that is asked for
    Family("pi", "factor", "k", (1,)),
    Family("llama3", "factor", "k", (1, 2)),
    Family("giraffe", "cutoff_length", "L", (1, 1 / 2)),
)
"""In the order in which they are tried."""

ROUNDS = (
    "the best guess of every scheme",
    f"log-n on top of the {CONTENDERS} best schemes",
    f"the other values of the {CONTENDERS} best schemes, with log-n where it helped",
    "values halfway between those tried, around the best of all",
)
"""What each round tries, for people. The first is a fixed list, the others follow from what was measured."""


@dataclass(frozen=True)
class Candidate:
    """One line of the table: a family at one value, with or without log-n.

    Attributes:
        family: the scheme, and what its value means.
        value: in the unit of the family.
        logn: whether log-n joins it.
    """

    family: Family
    value: float
    logn: bool = False

    def line(self, training_length: int, target: int) -> str:
        """As `get_scheme` spells it.

        Example:
            >>> Candidate(Family("rerope", "window", "L", (0.5,)), 0.5, logn=True).line(256, 1024)
            'rerope:window=128+logn'
        """
        family = self.family
        window = round(family.window * training_length)
        unit = {
            "k": target / training_length,
            "L": training_length,
            "needed": (target - window) / (training_length - window),
            "one": 1.0,
        }[family.unit]
        fields = []
        if family.field == "group_size":
            fields.append(f"group_size={math.ceil(self.value * unit)}")
        elif family.unit == "L":
            fields.append(f"{family.field}={max(1, round(self.value * unit))}")
        elif family.field:
            fields.append(f"{family.field}={self.value * unit:.4g}")
        if window:
            fields.append(f"window={window}")
        spelled = f"{family.scheme}:{','.join(fields)}" if fields else family.scheme
        return spelled + ("+logn" if self.logn else "")


def chosen_families(regime: str, only: Sequence[str] = ()) -> tuple[Family, ...]:
    """The families of a sweep.

    Args:
        regime: `training-free`, or `fine-tune` for those that are made to be fine-tuned, too.
        only: names of schemes; default all.

    Raises:
        EvaluationError: a regime or a name that is not known here, or no family is left.
    """
    regimes = {"training-free": ("training-free",), "fine-tune": ("training-free", "fine-tune")}
    if regime not in regimes:
        raise EvaluationError(f"regime {regime!r}: {did_you_mean(regime, regimes)}")
    for name in only:
        if name not in (known := {family.scheme for family in FAMILIES}):
            raise EvaluationError(f"a sweep does not try {name!r}; {did_you_mean(name, known)}")
    found = tuple(
        family
        for family in FAMILIES
        if scheme_class(family.scheme).regime in regimes[regime] and (not only or family.scheme in only)
    )
    if not found:
        raise EvaluationError(f"{', '.join(only)}: made to be fine-tuned; ask for it with regime 'fine-tune'")
    return found


def candidates_of_round(
    number: int, families: Sequence[Family], measured: Mapping[Candidate, float]
) -> tuple[Candidate, ...]:
    """What a round tries; a pure function, so that an interrupted sweep goes on as it would have.

    Args:
        number: of the round, from 0; see `ROUNDS`.
        families: of this sweep.
        measured: the NLL at the target of what the rounds before tried and the model did not refuse.
    """
    if number == 0:
        return tuple(Candidate(family, family.values[0]) for family in families)
    order = sorted(measured, key=lambda candidate: measured[candidate])
    best_of = {candidate.family.scheme: candidate for candidate in reversed(order)}
    contenders = sorted(best_of.values(), key=order.index)[:CONTENDERS]
    if number == 1:
        wanted = [Candidate(best.family, best.value, logn=True) for best in contenders]
    elif number == 2:
        wanted = [Candidate(best.family, value, best.logn) for best in contenders for value in best.family.values]
    else:
        wanted = [Candidate(best.family, value, best.logn) for best in contenders[:1] for value in _around(best, order)]
    return tuple(candidate for candidate in wanted if candidate not in measured)


def _around(best: Candidate, tried: Sequence[Candidate]) -> list[float]:
    """Halfway to the next smaller and the next larger value that were tried, as far as there are any."""
    values = sorted({candidate.value for candidate in tried if candidate.family == best.family})
    return [(low + high) / 2 for low, high in pairwise(values) if best.value in (low, high)]
