"""What a protocol is: which predictions of which contexts are scored, and how they are averaged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.results import Row
from rope_patch.evaluation.span_corruption import HiddenSpans
from rope_patch.evaluation.texts import Selection
from rope_patch.evaluation.whole_texts import WholeTexts

Chosen = TypeVar("Chosen", Selection, WholeTexts)


@dataclass(frozen=True)
class Request:
    """What is asked of a protocol.

    Attributes:
        lengths: context lengths in tokens, ascending.
        protocol: its name.
        targets: T, scored tokens per window.
        stride: S, tokens from the beginning of one window to the beginning of the next.
        tokens_per_document: how many tokens of a document are read.
        documents: how many documents; None for all.
        windows_per_document: how many places in each document.
        seed: of the draw of documents.
    """

    lengths: Sequence[int]
    protocol: str = "auto"
    targets: int | None = None
    stride: int | None = None
    tokens_per_document: int | None = None
    documents: int | None = None
    windows_per_document: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Cell:
    """One cell of the table: what it is named by, and how many targets of a window make it.

    Attributes:
        length: l, tokens of context.
        targets: see `Row.targets`.
    """

    length: int
    targets: int


@dataclass(frozen=True)
class Context:
    """What one forward pass reads, and which of its predictions are scored: those at positions start < p <= stop.

    Position p is predicted by the first p tokens.

    Attributes:
        prefix: the tokens in front of every text, such as the start of text, `(tokens,)`.
        text: the inputs that follow them and the token behind the last input, `(tokens,)`.
        start, stop: the scored positions; `stop` is at most the number of inputs.
        spans: what is hidden of it from an encoder, for a model that has one, and then the context's `number`.
        number: of the context.
    """

    prefix: torch.Tensor
    text: torch.Tensor
    start: int
    stop: int
    spans: HiddenSpans | None = None
    number: int = 0

    @property
    def length(self) -> int:
        """How many inputs there are."""
        return len(self.prefix) + len(self.text) - 1

    @property
    def tokens(self) -> torch.Tensor:
        """`(length + 1,)`: the inputs and, shifted by one, what they predict."""
        return torch.cat([self.prefix, self.text])


class Protocol(ABC, Generic[Chosen]):
    """One way to score a text.

    Args:
        request: checked by `check_request`.
        tokenizer: of the checkpoint.
        training_length: L in tokens.

    Raises:
        EvaluationError: what was asked does not fit the tokenizer or the training length.

    Attributes:
        name: as a row says it.
        settings: which fields of a `Request` it takes, of those that not all take.
        scores: what it scores, for an error message.
        two_parts: whether it is for models of an encoder and a decoder, or for decoders alone.
        one_pass: whether one pass at the longest length gives the cells of all lengths, which supposes a scheme that
            does not depend on the length.
        shared_targets: what `Row.targets` is called where rows of one table must agree in it; None where they need not.
    """

    name: ClassVar[str]
    settings: ClassVar[frozenset[str]]
    scores: ClassVar[str]
    two_parts: ClassVar[bool] = False
    one_pass: ClassVar[bool] = False
    shared_targets: ClassVar[str | None] = None

    @abstractmethod
    def __init__(self, request: Request, tokenizer: Any, training_length: int) -> None: ...

    @abstractmethod
    def select(self, corpus: Iterable[Mapping[str, str]], tokenizer: Any) -> Chosen:
        """Choose what is scored, once, for all lengths and schemes.

        Args:
            corpus: rows with `name` and `text`.
            tokenizer: of the checkpoint.
        """

    @abstractmethod
    def cells(self) -> list[tuple[int, tuple[Cell, ...]]]:
        """The lengths at which passes run, and the cells that each pass fills."""

    @abstractmethod
    def contexts(self, chosen: Chosen, length: int) -> list[Context]:
        """What is read at one length, in the order of the texts.

        Args:
            chosen: what `select` chose.
            length: in tokens.
        """

    def mean(self, losses: Sequence[torch.Tensor], cell: Cell) -> tuple[float, int]:
        """NLL of a cell, weighted by token, and the number of tokens in it.

        Args:
            losses: -ln p of the scored positions of every context, float64, `(scored,)` each.
            cell: of the pass.
        """
        scored = torch.cat(list(losses))
        return scored.mean().item(), scored.numel()

    @staticmethod
    @abstractmethod
    def sentence(row: Row) -> str:
        """What was scored, for the notes below a table.

        Args:
            row: one of those below the table, which agree in all that it says.
        """


def check_targets(targets: int, lengths: Sequence[int]) -> None:
    """T must fit into every length.

    Raises:
        EvaluationError: it does not.
    """
    if targets > lengths[0]:
        raise EvaluationError(
            f"targets={targets} is more than the shortest length of {lengths[0]} tokens: every length has to score "
            f"the same targets, so give at most {lengths[0]} targets or a longer shortest length"
        )


def count(number: int, noun: str) -> str:
    """Such as `1 document` and `3 documents`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
