"""The order in which executors are asked, and the reason why each of them was not taken.

An executor is one file that computes a `Problem`. Its `supports` returns an empty string, or why it cannot: `Needs`
lists the properties that a problem must have, each with one reason, whichever executor asks. A row says where an
executor stands in the order, and what else has to hold before it is preferred.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast, get_args

from rope_patch.attention.problem import AttentionMode, Output, Problem
from rope_patch.errors import InvalidField, UnsupportedModel, did_you_mean

REASONS: dict[str, tuple[str, str]] = {
    "compiling": ("the model is not compiled", "a compiler traces the call, so that no value in it is known"),
    "on_gpu": ("the states are not on a GPU", "the states are on a GPU"),
    "one_query": ("there are several queries", "there is one query"),
    "behind_cache": ("the queries do not follow keys of a cache", "the queries follow keys of a cache"),
    "is_rotated": ("its states are not rotated yet", "its states are rotated already"),
    "half": ("the states are not in half precision", "the states are in half precision"),
    "fits_kernels": (
        "scores are more than products and a bias by distance: a softcap, sinks, dropout, or a term by content",
        "scores are products, and at most a bias by distance",
    ),
    "biased": ("scores have no bias", "scores have a bias"),
    "decays": ("scores do not decay", "scores decay"),
    "scattered": (
        "keys of the cache have no gaps between their positions",
        "keys of the cache have gaps between their positions",
    ),
    "mask_is_added": ("no mask is added to the scores", "the mask is added to the scores"),
    "by_head": ("heads keep the same keys", "heads keep different keys"),
    "differentiable": ("no gradient is wanted", "gradients are wanted"),
}
"""Why a call is refused that lacks a property of `Problem`, and why one that has it; in the order in which they are
read.
"""


@dataclass(frozen=True)
class Needs:
    """The calls that an executor takes: True for a property that a `Problem` must have, False for one that it must not
    have, None for one that does not matter. An instance is the `supports` of an executor: called with a problem, it
    returns the reason why the executor cannot compute it, or an empty string.

    Example:
        >>> supports = Needs(compiling=False, fits_kernels=True)
        >>> supports(problem)
        'a compiler traces the call, so that no value in it is known'

    Attributes:
        compiling, on_gpu, one_query, behind_cache, is_rotated, half, fits_kernels, biased, decays, scattered,
            mask_is_added, by_head, differentiable: the properties of `Problem` with these names.
        further: the reason why a call is refused that has all this, or an empty string; asked last.
    """

    compiling: bool | None = None
    on_gpu: bool | None = None
    one_query: bool | None = None
    behind_cache: bool | None = None
    is_rotated: bool | None = None
    half: bool | None = None
    fits_kernels: bool | None = None
    biased: bool | None = None
    decays: bool | None = None
    scattered: bool | None = None
    mask_is_added: bool | None = None
    by_head: bool | None = None
    differentiable: bool | None = None
    further: Callable[[Problem], str] = lambda problem: ""
    _asked: tuple[tuple[str, bool], ...] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        asked = tuple((name, getattr(self, name)) for name in REASONS if getattr(self, name) is not None)
        object.__setattr__(self, "_asked", asked)

    def __call__(self, problem: Problem) -> str:
        """The reason why the executor cannot compute a call, or an empty string."""
        for name, wanted in self._asked:
            holds = getattr(problem, name)  # a symbol in a graph, which only a condition reads
            if wanted and not holds:
                return REASONS[name][0]
            if holds and not wanted:
                return REASONS[name][1]
        return self.further(problem)


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


@dataclass(frozen=True)
class Row:
    """A place in the order of executors.

    Attributes:
        unless: why another executor is preferred, though this one could compute the problem; only asked under `auto`.
            None if no other is.
        modes: the words for which the row is asked; `auto` and the executor's own name anyway.
        pairs: fewest and most pairs of a query and a key in a row and head for which it is preferred; None
            for any number.
        by_name: whether it is taken only under its name.
    """

    executor: Executor
    unless: Callable[[Problem], str] | None = None
    modes: tuple[str, ...] = ()
    pairs: tuple[float, float] | None = None
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
        if self.pairs is not None:
            (fewest, most), pairs = self.pairs, problem.pairs
            if pairs < fewest:
                return f"the call is small: {pairs} pairs of tokens, and it is faster from {fewest} on"
            if pairs > most:
                return f"the call is large: {pairs} pairs of tokens, all of which it would hold; {most} at most"
        if self.unless is not None and (reason := self.unless(problem)):
            return reason
        return self.executor.supports(problem)


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
