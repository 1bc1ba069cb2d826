"""Random cases by hypothesis, the same ones every time, each within bounds of time and memory."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from rope_patch import RopePatchError

SECONDS = 60
"""After which a case hangs; the usual ones take milliseconds."""

MEMORY = 4 << 30
"""Bytes of address space that a test may ask for beside what the process has."""


class Hangs(BaseException):
    """No code under test takes it for an error of its own."""


@dataclass
class Tally:
    """How many cases there were, and how many of them the library refused by one of its errors."""

    cases: int = 0
    refused: int = 0


def explore(strategy: SearchStrategy[Any], holds: Callable[[Any], object], number: int, part: int = 0) -> Tally:
    """Try a property on random cases. An error of the library counts as an answer, any other one as a failure.

    Args:
        strategy: of the cases.
        holds: is called with each; asserts what has to hold.
        number: of cases.
        part: other cases for other numbers.
    """
    tally = Tally()

    def answers(case: Any) -> None:
        tally.cases += 1
        try:
            with in_time():
                holds(case)
        except RopePatchError:
            tally.refused += 1

    exploring = settings(
        max_examples=number,
        derandomize=True,
        database=None,
        deadline=None,  # of a busy machine nothing follows
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    with in_memory():
        exploring(seed(part)(given(strategy)(answers)))()
    return tally


@contextmanager
def in_time() -> Iterator[None]:
    def hangs(*_: object) -> None:
        raise Hangs(f"not done after {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def in_memory() -> Iterator[None]:
    """Whoever asks for far more memory than a case needs gets a `MemoryError`, or torch's own error."""
    statm = Path("/proc/self/statm")
    if not statm.exists():  # as on macOS, which does not count address space
        yield
        return
    used = int(statm.read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
