"""Protocols that score the same last tokens of windows, in contexts of each length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import nn

from rope_patch.data.hidden_spans import Span, corrupt, draw_spans, sentinels_of
from rope_patch.data.windows import Window, spread
from rope_patch.errors import EvaluationError
from rope_patch.evaluation.protocols.protocol import Context, Protocol, Settings
from rope_patch.evaluation.scheme_specs import PLAIN, WINDOW
from rope_patch.evaluation.tasks.task import Cell
from rope_patch.models.head import find_language_model
from rope_patch.schemes.target import is_multiple

DEFAULT_TARGETS = 4096  # T, or the training length if that is lower


class Last(Protocol):
    """Score the last T tokens of every window, in contexts of each length that end at the same token.

    scored at length l: l - T < p <= l; all contexts of a window have the same end.

    Source: kexue.fm/archives/9708 (last 4096 tokens).
    """

    protocol = "last"
    settings = frozenset({"targets", "windows_per_document"})
    scores = "the last tokens of windows"
    sentence = "NLL of the same last {targets} tokens of {windows}"
    shared_targets: ClassVar[str | None] = "targets"

    def __init__(self, asked: Settings, lengths: Sequence[int], training_length: int) -> None:
        super().__init__(asked, lengths, training_length)
        self.targets = self.default_targets() if asked.targets is None else asked.targets
        check_targets(self.targets, lengths)

    def default_targets(self) -> int:
        """The number T of targets if you give none."""
        return min(self.training_length, DEFAULT_TARGETS)

    def places(self, counts: Sequence[int]) -> Sequence[Sequence[tuple[int, int]]]:
        needed = self.lengths[-1] + 1 - len(self.prefix)
        return spread(counts, needed, self.targets, self.asked.windows_per_document)

    def contexts(self, window: Window, length: int) -> Iterable[tuple[torch.Tensor, int, int]]:
        return [(window.context(length), length - self.targets, length)]


def check_targets(targets: int, lengths: Sequence[int]) -> None:
    """Refuse more targets than the shortest length has room for.

    Raises:
        EvaluationError: there are more targets.
    """
    if targets > (shortest := lengths[0]):
        multiple = f"; for {shortest} times L, write {shortest}x" if is_multiple(shortest) else ""
        raise EvaluationError(
            f"targets={targets} is more than the shortest length of {shortest} tokens: every length must score the "
            f"same targets, so use at most {shortest} targets or a longer shortest length{multiple}"
        )


class ByPosition(Last):
    """Score one pass at the longest length; a length is the bin of positions from the previous length."""

    protocol = "by_position"
    settings = frozenset({"windows_per_document"})
    scores = "every token"
    sentence = "NLL by position in one pass over {windows}"
    one_pass = True
    references: ClassVar[Sequence[str]] = (PLAIN, WINDOW)
    shared_targets = None

    def __init__(self, asked: Settings, lengths: Sequence[int], training_length: int) -> None:
        Protocol.__init__(self, asked, lengths, training_length)
        self.targets = lengths[-1]

    def passes(self, lengths: Sequence[int]) -> Sequence[int]:
        return lengths[-1:]

    def cells(self, length: int) -> list[Cell]:
        (cell,) = super().cells(length)
        bins = pairwise([0, *self.lengths])
        return [replace(cell, rows=[{**cell.rows[0], "length": stop, "targets": stop - start} for start, stop in bins])]

    def row(self, fields: dict[str, Any], items: Sequence[Context], scores: Sequence[torch.Tensor]) -> dict[str, Any]:
        stop, start = fields["length"], fields["length"] - fields["targets"]
        return super().row(fields, items, [losses[start:stop] for losses in scores])


class SpanCorruption(Last):
    """Hide spans among the last T tokens; encoders read contexts of each length, decoders predict the spans.

    The same spans of a window are hidden at every length.

    Raises:
        EvaluationError: T is too small for a span, or needs more sentinels than the tokenizer has.
    """

    protocol = "span_corruption"
    scores = "hidden spans of windows"
    sentence = "NLL of the same hidden spans of the last {targets} tokens of {windows}"
    two_parts = True

    def __init__(self, asked: Settings, lengths: Sequence[int], training_length: int) -> None:
        super().__init__(asked, lengths, training_length)
        self.sentinels, spans = sentinels_of(asked.tokenizer), len(self.spans(0))
        if spans + 1 > len(self.sentinels):
            raise EvaluationError(
                f"targets={self.targets} hides {spans} spans, which needs {spans + 1} sentinels; "
                f"{type(asked.tokenizer).__name__} has {len(self.sentinels)}"
            )

    @property
    def chosen_by(self) -> str:
        return str(self.asked.seed)  # the seed also draws the spans

    def spans(self, window: int) -> list[Span]:
        """The spans of the window with this number, counted from the first target."""
        return draw_spans(self.targets, torch.Generator().manual_seed(self.asked.seed * 1_000_003 + window))

    @torch.no_grad()
    def score(self, model: nn.Module, item: Context) -> torch.Tensor:
        """Compute -ln p of every hidden token, given the rest of the context and the hidden tokens before it,
        `(hidden,)`.
        """
        tokens, device = item.tokens[1:], find_language_model(model).device
        offset = len(tokens) - self.targets
        spans = [(offset + start, offset + stop) for start, stop in self.spans(item.window)]
        parts = corrupt(tokens, spans, self.sentinels, self.asked.tokenizer.eos_token_id)
        source, target, hidden = (part.to(device) for part in parts)
        logits = model(input_ids=source[None], labels=target[None]).logits[0]
        losses = nn.functional.cross_entropy(logits[hidden].float(), target[hidden], reduction="none")
        return losses.double().cpu()
