"""Whole documents to score, the same ones at every length."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.texts import draw_documents


@dataclass(frozen=True)
class WholeTexts:
    """The documents that every length and every scheme is scored on.

    Attributes:
        texts: their tokens, each `(n,)`, in the order of the corpus.
        short_documents: documents that were looked at and are too short for the longest length.
        fingerprint: of the tokens and of what stands in front of them.
    """

    texts: tuple[torch.Tensor, ...]
    short_documents: int
    fingerprint: str

    @property
    def documents(self) -> int:
        """How many there are."""
        return len(self.texts)


def select_documents(
    corpus: Iterable[Mapping[str, str]],
    tokenizer: Any,
    prefix: torch.Tensor,
    *,
    longest: int,
    documents: int | None = None,
    tokens_per_document: int | None = None,
    seed: int = 0,
) -> WholeTexts:
    """Choose documents that fill a window of the longest length, so that every length scores the same ones.

    Args:
        corpus: a sequence of rows with `name` and `text`.
        tokenizer: of the checkpoint.
        prefix: the tokens in front of every window, `(tokens,)`.
        longest: the longest context length in tokens.
        documents: how many to take; drawn at random where there are more. Default all.
        tokens_per_document: read no more than so many of each; default all.
        seed: of the draw.

    Raises:
        EvaluationError: no document is long enough, or `tokens_per_document` makes all too short.
    """
    needed = longest + 1 - len(prefix)
    if tokens_per_document is not None and tokens_per_document < needed:
        raise EvaluationError(
            f"tokens_per_document={tokens_per_document} is not allowed: a context of {longest} tokens needs documents "
            f"of {needed} tokens"
        )

    def beginning(_: str, tokens: torch.Tensor) -> torch.Tensor:
        return tokens[:tokens_per_document].clone()

    texts, short = draw_documents(corpus, tokenizer, beginning, prefix, longest, documents, seed)
    digest = hashlib.sha256(repr(prefix.tolist()).encode())
    for text in texts:
        digest.update(hashlib.sha256(text.numpy().tobytes()).digest())
    return WholeTexts(tuple(texts), short, digest.hexdigest()[:16])
