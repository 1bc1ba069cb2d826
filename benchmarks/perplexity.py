"""Perplexity: this library's protocols against YaRN's, which slides a window and makes the logits of all of it.

`shape.length` is the length of the text and the longest context.
"""

from __future__ import annotations

import torch

from benchmarks.comparison import Shape, Side
from benchmarks.models import llama
from rope_patch.evaluation.nll import chunked_nll

_LAYERS = 2
_VOCABULARY = 32_000


def one_pass(shape: Shape) -> Side:
    """`by_position`: the numbers of every length from one forward at the longest."""
    model, text = _model_and_text(shape)
    return Side(lambda: chunked_nll(model, text[:, :-1], text[:, 1:]))


def sliding(shape: Shape) -> Side:
    """YaRN's `eval/perplexity.py`: for each length a window that moves on by a stride, its new tokens scored.

    Lengths are a quarter, a half and the whole of the text, and the stride is an eighth of the shortest: 256 tokens
    where that is 2048, as in the paper.
    """
    model, text = _model_and_text(shape)
    longest = shape.length

    def run() -> None:
        for length in (longest // 4, longest // 2, longest):
            scored = length
            for stop in range(length, longest + 1, longest // 32):
                _full_logits_loss(model, text[:, stop - length : stop], scored)
                scored = longest // 32

    return Side(run)


def last_rows(shape: Shape) -> Side:
    """`last`: the head on the scored quarter of the context alone."""
    model, text = _model_and_text(shape)
    return Side(lambda: chunked_nll(model, text[:, :-1], text[:, -(shape.length // 4) :]))


def last_full(shape: Shape) -> Side:
    """The same numbers from the logits of the whole context."""
    model, text = _model_and_text(shape)
    return Side(lambda: _full_logits_loss(model, text, shape.length // 4))


@torch.no_grad()
def _full_logits_loss(model: torch.nn.Module, window: torch.Tensor, scored: int) -> torch.Tensor:
    targets = window.clone()
    targets[:, :-scored] = -100
    return model(window, labels=targets, use_cache=False).loss


def _model_and_text(shape: Shape) -> tuple[torch.nn.Module, torch.Tensor]:
    model = llama(shape, _LAYERS, _VOCABULARY)
    return model, torch.randint(1, _VOCABULARY, (1, shape.length), device=shape.device)
