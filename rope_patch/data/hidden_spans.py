"""The task of T5: sentinels hide spans of a text, and the decoder predicts the hidden tokens.

Source: Raffel et al., 1910.10683, section 3.1.4 and figure 2, with the share and the length of spans of section 3.3.4.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from rope_patch.errors import EvaluationError

DENSITY = 0.15  # share of the tokens that are hidden
MEAN_SPAN = 3  # tokens of a span on average

Span = tuple[int, int]


def draw_spans(length: int, generator: torch.Generator) -> list[Span]:
    """Draw start and stop of the spans to hide among `length` tokens, in order; no span touches another one or the
    first token.

    Raises:
        EvaluationError: there are too few tokens for one span.
    """
    hidden = round(length * DENSITY)
    count = max(1, round(hidden / MEAN_SPAN))
    if hidden < count or length - hidden < count:
        needed = round(2 / DENSITY)
        raise EvaluationError(f"{length} tokens are too few to hide a span of; at least {needed} are needed")
    sizes = _parts(hidden, count, generator)
    gaps = _parts(length - hidden, count, generator)
    edges = itertools.accumulate(itertools.chain.from_iterable(zip(gaps, sizes, strict=True)))
    return list(zip(edges, edges, strict=True))  # pairs from one iterator


def _parts(total: int, count: int, generator: torch.Generator) -> list[int]:
    """Draw `count` positive numbers that sum to `total`, with all such sums equally likely."""
    cuts = torch.randperm(total - 1, generator=generator)[: count - 1].sort().values + 1
    return [stop - start for start, stop in itertools.pairwise([0, *cuts.tolist(), total])]


def corrupt(
    tokens: torch.Tensor, spans: Sequence[Span], sentinels: Sequence[int], end: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hide spans, and return the encoder's input, the decoder's target, and a mask of the target tokens that are hidden
    text, each `(length,)` like `tokens`.

    There must be one more sentinel than spans; `end` is the id that closes a text.
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
    target += [sentinels[len(spans)], end]
    return torch.tensor([*source, *ids[place:], end]), torch.tensor(target), torch.tensor([*text, False, False])


def sentinels_of(tokenizer: Any) -> list[int]:
    """The ids of `<extra_id_0>`, `<extra_id_1>`, ..., up to the last that the tokenizer has.

    Raises:
        EvaluationError: the tokenizer has none, so the checkpoint was not trained on this task.
    """
    vocabulary = tokenizer.get_vocab()
    names = list(itertools.takewhile(vocabulary.__contains__, map("<extra_id_{}>".format, itertools.count())))
    if not names:
        kind = type(tokenizer).__name__
        raise EvaluationError(f"{kind} has no <extra_id_0>: hiding spans needs the sentinels of T5's tokenizers")
    return [vocabulary[name] for name in names]
