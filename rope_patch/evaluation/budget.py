"""Fit a measurement into a budget of minutes, estimated from the time of one window at each length."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from rope_patch.errors import EvaluationError, counted
from rope_patch.evaluation.processes import joined
from rope_patch.evaluation.row import Row
from rope_patch.evaluation.tasks.task import Task

Halves = TypeVar("Halves")

FEWEST = 4  # documents of a half; with fewer their differences say little


@dataclass(frozen=True)
class Part:
    """A part of the measurement that reads the same text for every line.

    Attributes:
        seconds: seconds for one line, see `seconds_of_a_line`.
        least: the number of lines that are measured in any case: references, a first candidate, the confirmation of the
            best.
        wanted: the number of lines that makes the search worthwhile.
    """

    seconds: float
    least: int
    wanted: int


def seconds_per_token(model: nn.Module, task: Task, lengths: Sequence[int]) -> dict[int, float]:
    """The seconds for each token at each length: the function times one window of each length, after one of the
    shortest to warm up.

    Args:
        model: the model without a scheme.
        task: the task, resolved for these lengths in tokens.
    """
    rates = {}
    for number, length in enumerate(task.passes(lengths)):
        window = next(item for cell in task.cells(length) for item in cell.items)
        if number == 0:
            task.score(model, window)
        began = time.perf_counter()
        task.score(model, window)
        rates[length] = (time.perf_counter() - began) / task.size(window)
    return rates


def seconds_of_a_line(rates: Mapping[int, float], task: Task, lengths: Sequence[int]) -> float:
    """Estimate the seconds that a task takes under one scheme, on all processes together."""
    windows = {
        id(item): rates[length] * task.size(item)
        for length in task.passes(lengths)
        for cell in task.cells(length)
        for item in cell.items
    }
    return sum(windows.values()) / joined().num_processes


def documents_before(rows: Sequence[Row], length: int, task_of: Callable[[int], Task]) -> int | None:
    """The number of documents of a half that an earlier run of the same measurement read; None if `rows` has no such
    run.

    Args:
        length: the length of that run in tokens.
        task_of: makes the resolved task for a number of documents.
    """
    texts = {row.texts for row in rows}
    numbers = sorted({row.documents for row in rows if row.documents}, reverse=True)
    return next((number for number in numbers if task_of(number).cells(length)[0].rows[0]["texts"] in texts), None)


def halves_within(
    minutes: float,
    documents: Sequence[int],
    halves_of: Callable[[int], Halves],
    parts_of: Callable[[Halves], Sequence[Part]],
    say: Callable[[str], None],
) -> Halves:
    """The two halves of a text with as many documents as a budget allows.

    Args:
        minutes: the remaining minutes.
        documents: numbers of documents of each half, as `fewer_documents` lists them; the first that fits is taken.
        halves_of: makes the tasks for a number of documents.
        parts_of: gives the parts that are measured on these tasks.

    Raises:
        EvaluationError: the budget does not cover the smallest measurement; the message names a budget that does.
    """
    least = wanted = math.inf
    for number in documents:
        found = halves_of(number)
        least, wanted = (sum(part.seconds * lines for part, lines in each) / 60 for each in _lines(parts_of(found)))
        if wanted <= minutes or (number == documents[-1] and least <= minutes):
            if number < documents[0]:
                say(f"the budget allows {number} of {documents[0]} documents of each half")
            say(f"about {least:.2g} of the {minutes:.2g} minutes that are left are for references and confirmation")
            return found
    raise EvaluationError(
        f"the budget is not enough: with {counted(documents[-1], 'document')} of each half the references, one "
        f"candidate and the confirmation take about {least:.2g} minutes, and {minutes:.2g} are left; write "
        f"--budget-minutes {math.ceil(1.2 * wanted)}, or --windows-per-document 1"
    )


def fewer_documents(documents: int, chosen: bool) -> list[int]:
    """Numbers of documents to try: all, then half of the previous number each time, unless you have chosen a number."""
    numbers = [documents]
    while not chosen and numbers[-1] > FEWEST:
        numbers.append(max(FEWEST, numbers[-1] // 2))
    return numbers


def _lines(parts: Sequence[Part]) -> tuple[list[tuple[Part, int]], list[tuple[Part, int]]]:
    return [(part, part.least) for part in parts], [(part, part.wanted) for part in parts]
