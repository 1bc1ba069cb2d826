# ruff: noqa: D102  # the methods of a protocol are documented once, on Protocol
"""Protocols that score the end of windows: the same targets, seen from more and more context."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch

from rope_patch.evaluation.protocols.base import Cell, Context, Protocol, Request, check_targets, count
from rope_patch.evaluation.results import Row
from rope_patch.evaluation.span_corruption import HiddenSpans
from rope_patch.evaluation.texts import Selection, Window, select_windows

DEFAULT_TARGETS = 4096
"""T where the training length does not set it lower."""


class Last(Protocol[Selection]):
    """The last T tokens of every window, seen from contexts of each length that end at the same token.

    scored at length l: l - T < p <= l, of a context that ends where all others of the window end.

    Source: kexue.fm/archives/9708 (last 4096 tokens).
    """

    name = "last"
    settings = frozenset({"targets", "windows_per_document"})
    scores = "the last tokens of windows"
    shared_targets: ClassVar[str | None] = "targets"

    def __init__(self, request: Request, tokenizer: Any, training_length: int) -> None:
        self.request = request
        self.targets = min(training_length, DEFAULT_TARGETS) if request.targets is None else request.targets
        check_targets(self.targets, request.lengths)

    def select(self, corpus: Iterable[Mapping[str, str]], tokenizer: Any) -> Selection:
        return select_windows(
            corpus,
            tokenizer,
            longest=self.request.lengths[-1],
            targets=self.targets,
            documents=self.request.documents,
            windows_per_document=self.request.windows_per_document,
            seed=self.request.seed,
        )

    def cells(self) -> list[tuple[int, tuple[Cell, ...]]]:
        return [(length, (Cell(length, self.targets),)) for length in self.request.lengths]

    def contexts(self, chosen: Selection, length: int) -> list[Context]:
        return [self._ending(window, length) for window in chosen.windows]

    def _ending(self, window: Window, length: int) -> Context:
        text = window.tokens[len(window.tokens) - (length + 1 - len(window.prefix)) :]
        return Context(window.prefix, text, length - self.targets, length)

    @staticmethod
    def sentence(row: Row) -> str:
        return f"NLL of the same last {row.targets} tokens of {count(row.windows, 'window')}"


class SpanCorruption(Last):
    """For encoders with decoders: spans among the last T tokens are hidden.

    The encoder reads contexts of each length, and the decoder says the same spans.
    """

    name = "span_corruption"
    scores = "hidden spans of windows"
    two_parts = True

    def __init__(self, request: Request, tokenizer: Any, training_length: int) -> None:
        super().__init__(request, tokenizer, training_length)
        self.spans = HiddenSpans(tokenizer, self.targets, request.seed)

    def contexts(self, chosen: Selection, length: int) -> list[Context]:
        found = super().contexts(chosen, length)
        return [
            Context(context.prefix, context.text, context.start, context.stop, self.spans, number)
            for number, context in enumerate(found)
        ]

    @staticmethod
    def sentence(row: Row) -> str:
        return f"NLL of the same hidden spans of the last {row.targets} tokens of {count(row.windows, 'window')}"


class ByPosition(Last):
    """One pass at the longest length; a length stands for the positions since the length before it."""

    name = "by_position"
    settings = frozenset({"windows_per_document"})
    scores = "every token"
    one_pass = True
    shared_targets = None

    def __init__(self, request: Request, tokenizer: Any, training_length: int) -> None:
        self.request = request
        self.targets = request.lengths[-1]

    def cells(self) -> list[tuple[int, tuple[Cell, ...]]]:
        edges = pairwise([0, *self.request.lengths])
        return [(self.targets, tuple(Cell(stop, stop - start) for start, stop in edges))]

    def mean(self, losses: Sequence[torch.Tensor], cell: Cell) -> tuple[float, int]:
        return super().mean([nll[cell.length - cell.targets : cell.length] for nll in losses], cell)

    @staticmethod
    def sentence(row: Row) -> str:
        return f"NLL by position in one pass over {count(row.windows, 'window')}"
