"""The order in which executors are asked, and the reason why each of them was not taken.

An executor is one file that computes a `Problem`. Its `supports` returns an empty string, or why it cannot. A row says
where it stands in the order, and what else has to hold before it is preferred.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast, get_args

from rope_patch.attention.problem import AttentionMode, Output, Problem
from rope_patch.errors import InvalidField, UnsupportedModel, did_you_mean


@dataclass(frozen=True)
class Executor:
    """A way to compute a call.

    Attributes:
        name: as `patch(model, attention=...)` and `ROPE_PATCH_ATTENTION` force it.
        what: what it does, in a few words, for readers of the code.
        supports: why it cannot compute a problem; empty if it can. It reads no value on a device.
        attend: computes it.
        pieces: the number of pieces that it scores a problem in, after `attend`.
        kernel: what scores a piece, which may be another executor, and why faster ones do not; empty if there is no
            choice.
    """

    name: str
    what: str
    supports: Callable[[Problem], str]
    attend: Callable[[Problem], Output]
    pieces: Callable[[Problem], int] = lambda problem: len(problem.rotated.branches)
    kernel: Callable[[Problem], str] = lambda problem: ""


def _never(problem: Problem) -> str:
    return ""


@dataclass(frozen=True)
class Row:
    """A place in the order of executors.

    Attributes:
        unless: why another executor is preferred, though this one could compute the problem; only asked under `auto`.
        modes: the words for which the row is asked; `auto` and the executor's own name anyway.
        pairs: fewest and most pairs of a query and a key in a row and head for which it is preferred.
        by_name: whether it is taken only under its name.
    """

    executor: Executor
    unless: Callable[[Problem], str] = _never
    modes: tuple[str, ...] = ()
    pairs: tuple[float, float] = (0, math.inf)
    by_name: bool = False

    def serves(self, mode: str) -> bool:
        """Whether the executor of the row is asked when the user passed this word as `attention`."""
        return mode in ("auto", self.executor.name, *self.modes)

    def reason(self, problem: Problem) -> str:
        """The reason why the executor of the row is not taken, or an empty string."""
        if not self.serves(problem.mode):
            return f"attention={problem.mode!r} is asked for"
        if problem.mode != "auto":
            return self.executor.supports(problem)
        if self.by_name:
            return f"it is only taken by its name: attention={self.executor.name!r}"
        (fewest, most), pairs = self.pairs, problem.pairs
        if pairs < fewest:
            return f"the call is small: {pairs} pairs of tokens, and it is faster from {fewest} on"
        if pairs > most:
            return f"the call is large: {pairs} pairs of tokens, all of which it would hold; {most} at most"
        return self.unless(problem) or self.executor.supports(problem)


PREFERENCES = ("fused",)
"""Words that ask for an executor if it applies, and else for the choice of `auto`."""


def choose(rows: Sequence[Row], problem: Problem) -> Executor:
    """The executor of the first row that can be taken.

    Raises:
        UnsupportedModel: none can; the message has the reasons of those that were asked for by name.
    """
    for row in rows:
        if not row.reason(problem):
            return row.executor
    if problem.mode in PREFERENCES:
        return choose(rows, dataclasses.replace(problem, mode="auto"))
    rows = [row for row in rows if row.serves(problem.mode)]
    rows = [row for row in rows if row.executor.name == problem.mode] or rows
    asked = [f"{row.executor.name}: {row.reason(problem)}" for row in rows]
    raise UnsupportedModel(f"attention={problem.mode!r} cannot compute this call: {'; '.join(dict.fromkeys(asked))}")


def explained(rows: Sequence[Row], problem: Problem) -> list[tuple[Executor, str]]:
    """Pair every executor with the reason why it was not taken; the reason is empty for the one that was."""
    taken = choose(rows, problem)
    reasons: dict[str, tuple[Executor, str]] = {}
    for row in rows:
        executor = row.executor
        if executor is taken:
            reasons[executor.name] = executor, ""
        elif executor.name not in reasons:
            reason = executor.supports(problem) or row.reason(problem) or f"{taken.name} comes before it"
            reasons[executor.name] = executor, reason
    return list(reasons.values())


FORCED = "ROPE_PATCH_ATTENTION"
"""The environment variable that names an executor for every patch without one of its own."""


def asked_attention(attention: str) -> AttentionMode:
    """The word for `attention`: the one passed to `patch`, or the environment's if `patch` was given none.

    Raises:
        InvalidField: it is none of the allowed words.
    """
    name, words = "attention", get_args(AttentionMode)
    if attention == "auto" and (forced := os.environ.get(FORCED)):
        name, attention = FORCED, forced
    if str(attention).startswith(("sdpa", "eager", "flash_attention", "flex_attention")):
        raise InvalidField(
            f"{name}={attention!r} is the attention of the model; leave `attention` out, and the model keeps its own "
            f"for static frequencies. Other schemes have executors of their own; allowed: {', '.join(words)}"
        )
    if attention not in words:
        raise InvalidField(f"{name}={attention!r}: {did_you_mean(str(attention), words)}")
    return cast(AttentionMode, attention)
