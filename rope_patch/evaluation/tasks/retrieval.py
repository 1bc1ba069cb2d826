"""The base of retrieval tasks: a passage is hidden at a depth of the context, and a question at the end asks for it."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.tasks.task import Cell, Task


@dataclass(frozen=True)
class Prompt:
    """The model's input, `(tokens,)`, and the correct digits or tokens, `(answer,)`.

    `distance` is the number of tokens from the end of the hidden text to the end of the question: at L or more,
    the sliding window does not see the hidden text. It is None if nothing is hidden.
    """

    tokens: torch.Tensor
    answer: torch.Tensor
    distance: int | None


Batch = list[Prompt]
"""Prompts of equal length, which are answered together."""


class Retrieval(Task):
    """A task with a cell for each depth, and a control that all depths share: the same questions with nothing hidden.

    Args:
        depths: ascending, from 0 (start of the context) to 1 (directly before the question).
        trials: prompts in each cell.
        batch_size: number of prompts of equal length that are answered together; nothing is padded.

    Raises:
        EvaluationError: the depths are not ascending shares.
    """

    span: Any = None  # tokens of the hidden passage, if the task has a choice

    def __init__(self, depths: Sequence[float], trials: int, seed: int = 0, batch_size: int = 1) -> None:
        check_depths(depths)
        self.depths, self.trials, self.seed, self.batch_size = depths, trials, seed, batch_size

    def prompts(self, length: int, depth: float | None) -> list[Prompt]:
        """One prompt per trial, the same for every scheme; the control's prompts if depth is None."""
        raise NotImplementedError

    def score(self, model: nn.Module, item: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Whether each key or token of the answers is correct, and its -ln p, both `(prompts, parts of the answer)`."""
        raise NotImplementedError

    def cells(self, length: int) -> list[Cell]:
        """One cell for each depth."""
        control = self.prompts(length, None)
        batches = self._batches(control)
        cells = []
        for depth in self.depths:
            questions = self.prompts(length, depth)
            fields = {
                "depth": depth,
                "span": self.span,
                "trials": self.trials,
                "seed": self.seed,
                "prompts": _fingerprint([*questions, *control]),
                "distance": min(prompt.distance or 0 for prompt in questions),
                "prompt_tokens": statistics.fmean(len(prompt.tokens) for prompt in questions),
            }
            cells.append(Cell([fields], [*batches, *self._batches(questions)], f", depth {depth:g}"))
        return cells

    def size(self, item: Batch) -> int:
        """The number of tokens in the batch."""
        return sum(len(prompt.tokens) for prompt in item)

    def row(self, fields: dict[str, Any], items: Sequence[Batch], scores: Sequence[Any]) -> dict[str, Any]:
        """The accuracies and NLL of the questions, and of the control."""
        questions, control = (
            [answered for batch, answered in zip(items, scores, strict=True) if (batch[0].distance is None) == nothing]
            for nothing in (False, True)
        )
        without = {f"control_{name}": value for name, value in _numbers(control).items()} if control else {}
        return {**_numbers(questions), **without}

    def _batches(self, prompts: Sequence[Prompt]) -> list[Batch]:
        batches: list[Batch] = []
        for prompt in sorted(prompts, key=lambda prompt: len(prompt.tokens)):
            if batches and len(batches[-1]) < self.batch_size and len(batches[-1][0].tokens) == len(prompt.tokens):
                batches[-1].append(prompt)
            else:
                batches.append([prompt])
        return batches


def check_depths(depths: Sequence[float]) -> None:
    """Check that depths are ascending shares of the context.

    Raises:
        EvaluationError: the depths are not ascending shares.
    """
    if not depths or not all(0 <= depth <= 1 for depth in depths) or list(depths) != sorted(set(depths)):
        shown = ", ".join(f"{depth:g}" for depth in depths)
        raise EvaluationError(f"depths {shown}: shares of the context from 0 to 1, in ascending order, are expected")


def _numbers(answers: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> dict[str, float | None]:
    right = torch.cat([right for right, _ in answers]).double()
    losses = [losses for _, losses in answers if losses is not None]
    nll = torch.cat(losses).mean().item() if losses else None
    return {"accuracy": right.mean().item(), "exact": right.all(1).double().mean().item(), "nll": nll}


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    """A hash of the questions and answers."""
    arrays = ((prompt.tokens.numpy(), prompt.answer.numpy()) for prompt in prompts)
    spelled = [f"{len(read)} {len(right)} ".encode() + read.tobytes() + right.tobytes() for read, right in arrays]
    return hashlib.sha256(b"".join(spelled)).hexdigest()[:16]
