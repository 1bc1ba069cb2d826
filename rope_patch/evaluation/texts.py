"""Which tokens of which documents are scored."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.sharing import is_main

Kept = TypeVar("Kept")


@dataclass(frozen=True)
class Window:
    """A stretch of one document, as long as the longest context needs, ending at the last target.

    Attributes:
        document: name of the document.
        tokens: `(longest + 1,)` or, where a prefix takes its place in the context, fewer.
        prefix: the tokens that the tokenizer puts in front of every text.
    """

    document: str
    tokens: torch.Tensor
    prefix: torch.Tensor

    def context(self, length: int) -> torch.Tensor:
        """`(length + 1,)`: `length` input tokens and, shifted by one, what they predict. The end never moves."""
        return torch.cat([self.prefix, self.tokens[len(self.tokens) - (length + 1 - len(self.prefix)) :]])


@dataclass(frozen=True)
class Selection:
    """The windows that every length and every scheme is scored on.

    Attributes:
        windows: in the order of the corpus.
        documents: how many documents they come from.
        short_documents: documents that were looked at and are too short for the longest length.
        fingerprint: of the documents and of the places in them; equal fingerprints mean the same targets.
    """

    windows: tuple[Window, ...]
    documents: int
    short_documents: int
    fingerprint: str


def select_windows(
    corpus: Iterable[Mapping[str, str]],
    tokenizer: Any,
    *,
    longest: int,
    targets: int,
    documents: int | None = None,
    windows_per_document: int = 1,
    seed: int = 0,
) -> Selection:
    """Choose the documents and the places in them, once, so that every length scores the same tokens.

    Args:
        corpus: a sequence of rows with `name` and `text`, such as a `datasets.Dataset`.
        tokenizer: of the checkpoint.
        longest: the longest context length in tokens.
        targets: T, scored tokens per window.
        documents: how many documents to take; drawn at random where there are more. Default all.
        windows_per_document: how many windows at most, their targets spread over the document without overlap; the
            first one ends where the document ends.
        seed: of the draw.

    Raises:
        EvaluationError: when no document is long enough; it says how long the longest is.
    """
    prefix = prefix_of(tokenizer)
    needed = longest + 1 - len(prefix)

    def windows(name: str, tokens: torch.Tensor) -> tuple[list[Window], str]:
        ends = _ends(len(tokens), needed, targets, windows_per_document)
        digest = hashlib.sha256(tokens.numpy().tobytes() + repr((ends, prefix.tolist())).encode())
        return [Window(name, tokens[end - needed : end].clone(), prefix) for end in ends], digest.hexdigest()

    chosen, short = draw_documents(corpus, tokenizer, windows, prefix, longest, documents, seed)
    return Selection(
        windows=tuple(window for found, _ in chosen for window in found),
        documents=len(chosen),
        short_documents=short,
        fingerprint=hashlib.sha256("".join(digest for _, digest in chosen).encode()).hexdigest()[:16],
    )


def draw_documents(
    corpus: Iterable[Mapping[str, str]],
    tokenizer: Any,
    keep: Callable[[str, torch.Tensor], Kept],
    prefix: torch.Tensor,
    longest: int,
    documents: int | None,
    seed: int,
) -> tuple[list[Kept], int]:
    """Draw documents that fill a context of the longest length, so that every length scores the same ones.

    Args:
        corpus: a sequence of rows with `name` and `text`, such as a `datasets.Dataset`.
        tokenizer: of the checkpoint.
        keep: what is kept of a document, from its name and its tokens, `(n,)`.
        prefix: the tokens in front of every context.
        longest: the longest context length in tokens.
        documents: how many to draw; None for all.
        seed: of the draw.

    Returns:
        what is kept, in the order of the corpus, and how many documents that were looked at are too short.

    Raises:
        EvaluationError: when no document is long enough; it says how long the longest is.
    """
    needed = longest + 1 - len(prefix)
    rows = list(corpus)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    lengths: list[int] = []
    kept: dict[int, Kept] = {}
    hidden = None if is_main() else True  # None: shown where there is a terminal
    for index in tqdm(order, desc="reading", unit="document", leave=False, disable=hidden):
        if documents is not None and len(kept) == documents:
            break
        ids = tokenizer(rows[index]["text"], add_special_tokens=False, verbose=False)["input_ids"]
        lengths.append(len(ids))
        if len(ids) >= needed:
            kept[index] = keep(rows[index]["name"], torch.tensor(ids))
    if not kept:
        raise EvaluationError(
            f"a context of {longest} tokens needs documents of {needed} tokens; the longest of {len(rows)} "
            f"has {max(lengths, default=0)}"
        )
    return [kept[index] for index in sorted(kept)], sum(length < needed for length in lengths)


def prefix_of(tokenizer: Any) -> torch.Tensor:
    """The start-of-text token where the tokenizer sets one in front of every text, `(0,)` or `(1,)`.

    Models lean on it: a context without it is one that they never saw.
    """
    ids = tokenizer("")["input_ids"]
    starts = bool(ids) and tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id
    return torch.tensor(ids[:1] if starts else [], dtype=torch.long)


def _ends(length: int, needed: int, targets: int, wanted: int) -> list[int]:
    """Where the windows end: at the end of the document, and spread evenly back to its beginning."""
    room = length - needed
    count = min(wanted, 1 + room // targets)
    return [length - i * room // max(1, count - 1) for i in range(count)]
