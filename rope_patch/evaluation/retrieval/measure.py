"""Every scheme, length and depth on the same prompts."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import nn
from tqdm import tqdm

from rope_patch.errors import EvaluationError
from rope_patch.evaluation import sharing
from rope_patch.evaluation.description import check_ascending, check_lengths
from rope_patch.evaluation.passes import Column, plan_columns
from rope_patch.evaluation.results import LineFile
from rope_patch.evaluation.retrieval.rows import RetrievalRow
from rope_patch.evaluation.retrieval.task import Prompt, Score, Task, fingerprint
from rope_patch.evaluation.subject import Subject, evaluating, progress
from rope_patch.evaluation.trained import Trained
from rope_patch.patching import patch
from rope_patch.schemes import Scheme


def measure(
    model: nn.Module,
    task: Task,
    schemes: Sequence[str | Scheme],
    lengths: Sequence[int],
    depths: Sequence[float],
    *,
    seed: int = 0,
    name: str | None = None,
    results: LineFile[RetrievalRow] | None = None,
    trained: Trained | None = None,
) -> list[RetrievalRow]:
    """Ask every scheme the same questions. The model is without a scheme before, between and after.

    A model that carries a scheme is measured as it is, never taken apart, where that scheme is all that is asked for.

    Where `torch.distributed` is initialised, every process has to call this alike; the prompts are divided over them,
    and all get the rows that one process alone would have got.

    Args:
        model: a causal language model of Transformers, its weights not spread over processes.
        task: such as `Passkey` or `Spans`.
        schemes: scheme objects or strings; a string may be `plain`, and may say `factor=auto` (see `scheme_at`).
        lengths: context lengths in tokens, ascending.
        depths: ascending, from 0 (first in the context) to 1 (right before the question).
        seed: of the task, for the rows.
        name: of the model in the rows; default `model.config.name_or_path`.
        results: where rows are appended as they come, and where rows of an earlier run are taken from. Of several
            processes only the main one needs it.
        trained: what the model learned under a scheme that it carried; a line of that scheme is measured with it.

    Returns:
        one row per scheme, length and depth, in this order.

    Raises:
        EvaluationError: lengths, depths and task do not fit each other or the model; the message says how.
        AlreadyPatched: the model carries another scheme than the one that is asked for.
        UnknownScheme, InvalidField, SlotConflict, UnsupportedModel, NothingToPatch: a scheme is not right for it.
            All of them are raised before anything is computed.
    """
    check_lengths(lengths)
    check_depths(depths)
    subject = Subject.of(model, trained)
    if subject.language_model.config.is_encoder_decoder:
        raise EvaluationError(
            f"{type(subject.language_model).__name__} is an encoder with a decoder; retrieval is measured where one "
            "stack reads the context and goes on with it"
        )
    columns = plan_columns(schemes, lengths, subject)
    prompts = {length: {depth: task.prompts(length, depth) for depth in (None, *depths)} for length in lengths}
    shared = {**subject.fields(name), "task": task.name, "span": task.span, "trials": task.trials, "seed": seed}
    rows: list[RetrievalRow] = []
    with evaluating(model), progress(sum(column.length for column in columns) * len(depths)) as bar:
        for column in columns:
            rows += _measure_column(subject, task, column, prompts[column.length], shared, results, bar)
    return rows


def check_depths(depths: Sequence[float]) -> None:
    """What can be known to be wrong before a model is there.

    Raises:
        EvaluationError: depths are missing, not from 0 to 1, or do not ascend.
    """
    shown = [f"{depth:g}" for depth in depths]
    if not depths:
        raise EvaluationError("no depths were given; give how many, or a list of shares from 0 to 1")
    if not all(0 <= depth <= 1 for depth in depths):
        raise EvaluationError(f"depths {', '.join(shown)}: every depth is a share of the context, from 0 to 1")
    check_ascending("depths", shown, depths)


def _measure_column(
    subject: Subject,
    task: Task,
    column: Column,
    prompts: dict[float | None, list[Prompt]],
    shared: dict[str, Any],
    results: LineFile[RetrievalRow] | None,
    bar: tqdm,
) -> list[RetrievalRow]:
    """The rows of an earlier run, and the missing ones."""
    depths = [depth for depth in prompts if depth is not None]
    cells = {
        depth: {**shared, **column.fields, "depth": depth, "prompts": fingerprint([*prompts[depth], *prompts[None]])}
        for depth in depths
    }
    rows = sharing.on_main(lambda: _known(cells, results))
    bar.update(column.length * len(rows))
    if len(rows) == len(cells):
        return list(rows.values())
    bar.set_description(f"{column.line} at {column.length}")
    with patch(subject.model, column.scheme) if column.scheme and not subject.carried else nullcontext():
        subject.recall(column.scheme)
        control = task.score(subject.model, prompts[None]) if task.has_control else None
        for depth, cell in cells.items():
            if depth not in rows:
                began = time.perf_counter()
                score = task.score(subject.model, prompts[depth])
                seconds = time.perf_counter() - began
                rows[depth] = sharing.on_main(partial(_fill, cell, prompts[depth], score, control, seconds, results))
                bar.update(column.length)
    return [rows[depth] for depth in depths]


def _known(cells: dict[float, dict[str, Any]], results: LineFile[RetrievalRow] | None) -> dict[float, RetrievalRow]:
    """By depth, the rows that an earlier run has, under the name that the line has now."""
    if results is None:
        return {}
    found = {depth: results.find(RetrievalRow.identity(**cell)) for depth, cell in cells.items()}
    return {depth: dataclasses.replace(row, line=cells[depth]["line"]) for depth, row in found.items() if row}


def _fill(
    cell: dict[str, Any],
    prompts: Sequence[Prompt],
    score: Score,
    control: Score | None,
    seconds: float,
    results: LineFile[RetrievalRow] | None,
) -> RetrievalRow:
    """The row of a cell, written where there is a file."""
    row = RetrievalRow(
        **cell,
        prompt_tokens=sum(len(prompt.tokens) for prompt in prompts) / len(prompts),
        distance=min(prompt.distance for prompt in prompts if prompt.distance is not None),
        accuracy=score.accuracy,
        exact=score.exact,
        nll=score.nll,
        control_accuracy=control.accuracy if control else None,
        control_exact=control.exact if control else None,
        control_nll=control.nll if control else None,
        seconds=round(seconds, 3),
    )
    if results is not None:
        results.append(row)
    return row
