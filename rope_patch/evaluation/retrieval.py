"""Retrieval at every depth and context length. Every scheme answers the same prompts."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.lines import check_lengths, display_name, schemes_at_lengths
from rope_patch.evaluation.measured_model import Learned, MeasuredModel
from rope_patch.evaluation.passkey import Passkey, Prompt
from rope_patch.evaluation.processes import Progress, on_main, over_processes
from rope_patch.evaluation.rows import Measurement, Rows, recall
from rope_patch.evaluation.spans import Spans
from rope_patch.schemes import Scheme


@dataclass(frozen=True, kw_only=True)
class RetrievalRow(Measurement):
    """One cell of a heat map; as in `Row`, and with the numbers of the control: the same questions with nothing hidden.

    Attributes:
        depth: share of the filler before the hidden text.
        prompt_tokens, distance: mean length of the prompts, and minimum of `Prompt.distance`.
        accuracy: share of correct keys, or of correct tokens of the spans.
    """

    KEY = ("task", "model", "weights", "scheme", "length", "depth", "trials", "prompts", "dtype", "attention")

    task: str
    depth: float
    prompt_tokens: float
    distance: int
    span: int | None
    trials: int
    prompts: str
    accuracy: float
    exact: float
    nll: float | None
    control_accuracy: float | None = None
    control_exact: float | None = None
    control_nll: float | None = None


def measure_retrieval(
    model: nn.Module,
    task: Passkey | Spans,
    schemes: Sequence[str | Scheme],
    lengths: Sequence[int],
    depths: Sequence[float],
    *,
    batch_size: int = 1,
    name: str | None = None,
    results: Rows[RetrievalRow] | None = None,
    trained: Learned | None = None,
) -> list[RetrievalRow]:
    """Ask every scheme the same questions: one row per scheme, length and depth, in this order.

    Args:
        lengths: context lengths in tokens, ascending; the model never reads more.
        depths: ascending, from 0 (start of the context) to 1 (directly before the question).
        batch_size: number of prompts of equal length that are answered together.
        trained: as all others, see `rope_patch.evaluation.perplexity.measure`.

    Raises:
        EvaluationError: lengths or depths are invalid, or the model is an encoder with a decoder.
    """
    check_lengths(lengths)
    check_depths(depths)
    measured = MeasuredModel(model, trained)
    measured.check_one_stack("retrieval")
    jobs = schemes_at_lengths(schemes, lengths, measured)
    prompts = {length: [task.prompts(length, depth) for depth in (None, *depths)] for length in lengths}
    shared = {**measured.facts(name), "task": task.name, "span": task.span, "trials": task.trials, "seed": task.seed}
    rows: list[RetrievalRow] = []
    with Progress(model, [cell for job in jobs for cell in _read(*prompts[job.length])]) as bar:
        ask = partial(_ask, task, model, batch_size, bar)
        for job in jobs:
            control, *asked = prompts[job.length]
            without: dict[str, Any] = {}
            with measured.under(job.scheme):
                for depth, questions in zip(depths, asked, strict=True):
                    bar.begin(f"{display_name(job.line)} at {job.length}, depth {depth:g}")
                    cell = {**shared, **job.facts, "depth": depth, "prompts": _fingerprint([*questions, *control])}
                    row = on_main(partial(recall, results, cell))
                    if row is None:
                        if control and not without:
                            without = {f"control_{name}": value for name, value in ask(control).items()}
                        began = time.perf_counter()
                        cell |= {**ask(questions), **without, "seconds": round(time.perf_counter() - began, 3)}
                        cell["distance"] = min(prompt.distance or 0 for prompt in questions)
                        cell["prompt_tokens"] = sum(len(prompt.tokens) for prompt in questions) / len(questions)
                        row = RetrievalRow(**cell)
                        if results:
                            results.append(row)
                    rows.append(row)
    return rows


def check_depths(depths: Sequence[float]) -> None:
    """Check that depths are ascending shares of the context.

    Raises:
        EvaluationError: they are not.
    """
    if not depths or not all(0 <= depth <= 1 for depth in depths) or list(depths) != sorted(set(depths)):
        shown = ", ".join(f"{depth:g}" for depth in depths)
        raise EvaluationError(f"depths {shown}: shares of the context from 0 to 1, in ascending order, are expected")


def grids(rows: Sequence[RetrievalRow]) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """By line: accuracy and whether the cut at L hides the key, `(depths, lengths)`; the control, `(lengths,)`."""
    cells: dict[str, list[Any]] = {}
    for row in rows:
        cells.setdefault(row.line, []).append((row.accuracy, row.distance >= row.training_length, row.control_accuracy))
    shape = len({row.length for row in rows}), -1, 3
    arrays = {line: np.array(each, dtype=float).reshape(shape).T for line, each in cells.items()}
    return {line: (accuracy, far == 1, control[0]) for line, (accuracy, far, control) in arrays.items()}


def _read(control: Sequence[Prompt], first: Sequence[Prompt], *others: Sequence[Prompt]) -> list[list[int]]:
    """The prompt lengths for each depth; the control comes before the first depth."""
    return [[len(prompt.tokens) for prompt in prompts] for prompts in ([*control, *first], *others)]


def _ask(
    task: Passkey | Spans, model: nn.Module, batch_size: int, bar: Progress, prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """The fields of a row from the answers; a batch has one length, so nothing is padded."""
    batches: list[list[Prompt]] = []
    for prompt in sorted(prompts, key=lambda prompt: len(prompt.tokens)):
        if batches and len(batches[-1]) < batch_size and len(batches[-1][0].tokens) == len(prompt.tokens):
            batches[-1].append(prompt)
        else:
            batches.append([prompt])

    def answer(batch: list[Prompt]) -> tuple[torch.Tensor, torch.Tensor | None]:
        answered = task.answer(model, batch)
        bar.update([len(prompt.tokens) for prompt in batch])
        return answered

    answers = over_processes(answer, batches, model)
    right = torch.cat([right for right, _ in answers]).double()
    losses = [losses for _, losses in answers if losses is not None]
    nll = torch.cat(losses).mean().item() if losses else None
    return {"accuracy": right.mean().item(), "exact": right.all(1).double().mean().item(), "nll": nll}


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    """A hash of the questions."""
    asked = ((prompt.tokens.numpy(), prompt.answer.numpy()) for prompt in prompts)
    spelled = [f"{len(read)} {len(right)} ".encode() + read.tobytes() + right.tobytes() for read, right in asked]
    return hashlib.sha256(b"".join(spelled)).hexdigest()[:16]
