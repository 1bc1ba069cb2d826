"""The task of T5: spans of a text are hidden behind sentinels, and the decoder says what stood there.

Source: Raffel et al., 1910.10683, section 3.1.4 and figure 2, with the share and the length of spans of section 3.3.4.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rope_patch.errors import EvaluationError

DENSITY = 0.15
"""Share of the tokens that are hidden."""

MEAN_SPAN = 3
"""Tokens of a span on average."""

Span = tuple[int, int]


def draw_spans(length: int, generator: torch.Generator) -> list[Span]:
    """Start and stop of the spans to hide among `length` tokens, in order; none touches another or the first token.

    Raises:
        EvaluationError: when there are too few tokens for one span.
    """
    hidden = round(length * DENSITY)
    count = max(1, round(hidden / MEAN_SPAN))
    if hidden < count or length - hidden < count:
        raise EvaluationError(
            f"{length} tokens are too few to hide a span of; at least {round(2 / DENSITY)} are needed"
        )
    sizes = _parts(hidden, count, generator)
    gaps = _parts(length - hidden, count, generator)
    spans, place = [], 0
    for gap, size in zip(gaps, sizes, strict=True):
        spans.append((place + gap, place + gap + size))
        place += gap + size
    return spans


def _parts(total: int, count: int, generator: torch.Generator) -> list[int]:
    """`total` as a sum of `count` positive numbers, every such sum as likely as any other."""
    cuts = torch.randperm(total - 1, generator=generator)[: count - 1].sort().values + 1
    edges = [0, *cuts.tolist(), total]
    return [stop - start for start, stop in itertools.pairwise(edges)]


def corrupt(
    tokens: torch.Tensor, spans: Sequence[Span], sentinels: Sequence[int], end: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the encoder reads, what the decoder says, and which of it is text.

    Args:
        tokens: `(length,)`.
        spans: in order, not touching.
        sentinels: ids, one more than there are spans.
        end: the id that closes a text.

    Returns:
        source and target ids, and a boolean of the target that is true on hidden tokens.
    """
    source: list[int] = []
    target: list[int] = []
    text: list[bool] = []
    ids, place = tokens.tolist(), 0
    for sentinel, (start, stop) in zip(sentinels, spans, strict=False):
        source += [*ids[place:start], sentinel]
        target += [sentinel, *ids[start:stop]]
        text += [False, *[True] * (stop - start)]
        place = stop
    source += [*ids[place:], end]
    target += [sentinels[len(spans)], end]
    text += [False, False]
    return torch.tensor(source), torch.tensor(target), torch.tensor(text)


class HiddenSpans:
    """The same spans of the same last tokens, hidden from an encoder whatever the length of its context.

    Args:
        tokenizer: of the checkpoint, with sentinels.
        targets: T, the last tokens of a context, among which spans are hidden.
        seed: of the spans.

    Raises:
        EvaluationError: when T is too small for a span, or needs more sentinels than there are.
    """

    def __init__(self, tokenizer: Any, targets: int, seed: int) -> None:
        self.targets = targets
        self._sentinels = sentinels_of(tokenizer)
        self._end = tokenizer.eos_token_id
        self._seed = seed
        needed = len(self._spans(0)) + 1
        if needed > len(self._sentinels):
            raise EvaluationError(
                f"targets={targets} hides {needed - 1} spans, which takes {needed} sentinels; "
                f"{type(tokenizer).__name__} has {len(self._sentinels)}"
            )

    def _spans(self, window: int) -> list[Span]:
        return draw_spans(self.targets, torch.Generator().manual_seed(self._seed * 1_000_003 + window))

    @torch.no_grad()
    def nll(self, model: nn.Module, tokens: torch.Tensor, window: int) -> torch.Tensor:
        """-ln p of every hidden token, given the rest of the context and the hidden tokens before it, `(hidden,)`.

        Args:
            model: of T5's style.
            tokens: the context, `(length,)`, ending with the last target.
            window: its number; spans are a function of it and of the seed.
        """
        offset = len(tokens) - self.targets
        spans = [(offset + start, offset + stop) for start, stop in self._spans(window)]
        source, target, hidden = (x.to(tokens.device) for x in corrupt(tokens, spans, self._sentinels, self._end))
        logits = model(input_ids=source[None], labels=target[None]).logits[0]
        return nn.functional.cross_entropy(logits[hidden].float(), target[hidden], reduction="none")


def sentinels_of(tokenizer: Any) -> list[int]:
    """Ids of `<extra_id_0>`, `<extra_id_1>`, ... as far as the tokenizer has them.

    Raises:
        EvaluationError: when it has none: the checkpoint was not trained on this task.
    """
    vocabulary = tokenizer.get_vocab()
    found: list[int] = []
    while (name := f"<extra_id_{len(found)}>") in vocabulary:
        found.append(vocabulary[name])
    if not found:
        raise EvaluationError(
            f"{type(tokenizer).__name__} has no <extra_id_0>: hiding spans needs the sentinels of T5's tokenizers"
        )
    return found
