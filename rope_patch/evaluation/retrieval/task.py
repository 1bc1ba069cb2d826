"""What a retrieval task hands out, and what comes back."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn


@dataclass(frozen=True)
class Prompt:
    """One question.

    Attributes:
        tokens: what the model reads, `(tokens,)`.
        answer: what it has to say, `(answer,)`: digits or tokens, as the task has it.
        distance: tokens between the end of what is hidden and the end of the question; attention that is cut at L
            sees nothing of it where the distance is L or more. None where nothing is hidden.
    """

    tokens: torch.Tensor
    answer: torch.Tensor
    distance: int | None


@dataclass(frozen=True)
class Score:
    """Of the answers to some prompts.

    Attributes:
        accuracy: share of the answered units that are right: whole keys, or tokens of a span.
        exact: share of the prompts that are answered without any fault.
        nll: of the right answer in nats per token; None where the task does not ask for it.
    """

    accuracy: float
    exact: float
    nll: float | None


class Task(Protocol):
    """Prompts that are a function of the length, the depth and the seed alone: the same for every scheme.

    Attributes:
        name: as the rows say it.
        trials: prompts for each length and depth.
        span: tokens of what is hidden, where the reader can choose; else None.
        has_control: whether the same question is asked with nothing hidden.
    """

    name: str
    trials: int
    span: int | None
    """Tokens of what is hidden, where the reader can choose."""
    has_control: bool
    """Whether the answer could be known without retrieval, so that the same question is asked with nothing hidden."""

    def prompts(self, length: int, depth: float | None) -> list[Prompt]:
        """One for each trial; with depth None those of the control.

        Raises:
            EvaluationError: the length is too short for a question.
        """
        ...

    def score(self, model: nn.Module, prompts: Sequence[Prompt]) -> Score:
        """Ask the model; several processes divide the prompts, and all get the score."""
        ...


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Equal fingerprints mean the same questions."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(f"{len(prompt.tokens)} {len(prompt.answer)} ".encode())
        digest.update(prompt.tokens.numpy().tobytes() + prompt.answer.numpy().tobytes())
    return digest.hexdigest()[:16]


def batches(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """Prompts of equal length together, at most `size` of them: no padding, so no mask that a scheme could mistake."""
    ordered = sorted(prompts, key=lambda prompt: len(prompt.tokens))
    groups = [list(equal) for _, equal in itertools.groupby(ordered, key=lambda prompt: len(prompt.tokens))]
    return [group[start : start + size] for group in groups for start in range(0, len(group), size)]
