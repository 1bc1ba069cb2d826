"""Choose the scored tokens of documents once, so that every length and every scheme scores the same tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from rope_patch.data.special_tokens import bare_ids, tokens_around
from rope_patch.errors import EvaluationError

FEW = 8  # with fewer documents errors are over windows; with fewer windows an error means little
WINDOWS = 16  # default number of windows of all documents together


@dataclass(frozen=True)
class Window:
    """A part of a document, `(tokens,)`, up to its last target, and the prefix of its contexts, `(tokens,)`.

    The window begins at token `start` of the document in row `source` of the corpus.
    """

    document: str
    tokens: torch.Tensor
    prefix: torch.Tensor
    start: int
    source: Mapping[str, Any]

    def context(self, length: int) -> torch.Tensor:
        """The prefix and the last tokens of the window, `(length + 1,)`: `length` inputs and, shifted by one, their
        targets. All lengths end at the same token.
        """
        return torch.cat([self.prefix, self.tokens[len(self.tokens) - (length + 1 - len(self.prefix)) :]])


@dataclass(frozen=True)
class Selection:
    """The windows on which every length and every scheme is scored."""

    windows: tuple[Window, ...]  # in the order of the corpus
    documents: int
    short_documents: int  # too short for the longest length
    fingerprint: str  # hash of the documents and of the places in them, so of the targets


def select_windows(
    corpus: Iterable[Mapping[str, Any]],
    tokenizer: Any,
    *,
    longest: int,
    targets: int,
    documents: int | None = None,
    windows_per_document: int | None = 1,
    seed: int = 0,
) -> Selection:
    """Windows as long as the longest context, spread over each document; the first window ends at the end of the
    document.

    Args:
        corpus: rows with `name` and `text` or `input_ids`, such as a `datasets.Dataset`.
        longest: the longest context length in tokens.
        targets: T, scored tokens per window; windows of one document share no scored token.
        documents: number of documents, drawn at random if there are more; default all.
        windows_per_document: the maximum number; None for enough to make 16 windows in total, if there is room.

    Raises:
        EvaluationError: no document is long enough; the message names the longest.
    """
    prefix = prefix_of(tokenizer)
    places = partial(spread, needed=longest + 1 - len(prefix), targets=targets, each=windows_per_document)
    return select(corpus, tokenizer, prefix, longest, places, documents=documents, seed=seed)


def spread(
    counts: Sequence[int], needed: int, targets: int, each: int | None, total: int = WINDOWS
) -> list[list[tuple[int, int]]]:
    """Spread windows of `needed` tokens over documents with these `counts` of tokens, as start and end; no two windows
    share any of their last T tokens.

    A document has at most `each` windows; None means one, or enough to make `total` windows in all documents. Contexts
    overlap if a document has no room for adjacent ones. Overlap makes losses more similar than losses of different
    texts, so standard errors over windows of one document are too small rather than too large.
    """
    room = [1 + (count - needed) // targets for count in counts]
    if each is None:
        each = next((n for n in range(1, total) if sum(min(n, most) for most in room) >= total), total)
    places = []
    for count, most in zip(counts, room, strict=True):
        number = min(each, most)
        ends = [count - i * (count - needed) // max(1, number - 1) for i in range(number)]
        places.append([(end - needed, end) for end in ends])
    return places


def select(
    corpus: Iterable[Mapping[str, Any]],
    tokenizer: Any,
    prefix: torch.Tensor,
    longest: int,
    places: Callable[[Sequence[int]], Sequence[Sequence[tuple[int, int]]]],
    *,
    documents: int | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> Selection:
    """Draw documents that fill a context of the longest length, and choose places in them.

    Args:
        prefix: tokens in front of every window, `(tokens,)`.
        places: a function from the token counts of documents to start and end of the windows.
        limit: maximum number of tokens to read from a document; default all.

    Raises:
        EvaluationError: no document is long enough; the message names the longest.
    """
    rows, needed = list(corpus), longest + 1 - len(prefix)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    lengths: list[int] = []
    kept: dict[int, torch.Tensor] = {}
    for index in tqdm(order, desc="reading", unit="document", leave=False, disable=None):
        if len(kept) == documents:
            break
        ids = ids_of(rows[index], tokenizer)
        lengths.append(len(ids))
        if len(ids) >= needed:
            kept[index] = torch.tensor(ids[:limit])
    if not kept:
        raise EvaluationError(
            f"a context of {longest} tokens needs documents of {needed} tokens; the longest of {len(rows)} "
            f"has {max(lengths, default=0)}"
        )
    chosen = sorted(kept)
    windows, digests = [], ""
    for index, spans in zip(chosen, places([len(kept[index]) for index in chosen]), strict=True):
        tokens, ends = kept[index], [end for _, end in spans]
        digests += hashlib.sha256(tokens.numpy().tobytes() + repr((ends, prefix.tolist())).encode()).hexdigest()
        row = rows[index]
        windows += [Window(row["name"], tokens[start:end].clone(), prefix, start, row) for start, end in spans]
    return Selection(
        windows=tuple(windows),
        documents=len(chosen),
        short_documents=sum(length < needed for length in lengths),
        fingerprint=hashlib.sha256(digests.encode()).hexdigest()[:16],
    )


def ids_of(row: Mapping[str, Any], tokenizer: Any) -> list[int]:
    """The tokens of a document, without special tokens."""
    if "input_ids" in row:
        return torch.as_tensor(row["input_ids"]).tolist()
    return bare_ids(tokenizer, row["text"])


def prefix_of(tokenizer: Any) -> torch.Tensor:
    """The tokens that the tokenizer puts in front of every text, `(tokens,)`, most often a start of text or none.

    Models depend on these tokens, because they were never trained without them.
    """
    ids = [] if tokenizer is None else tokens_around(tokenizer)[0]
    return torch.tensor(ids, dtype=torch.long)
