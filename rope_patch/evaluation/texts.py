"""Which tokens of which documents are scored."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from rope_patch.errors import EvaluationError


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
    rows = list(corpus)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    prefix = prefix_of(tokenizer)
    needed = longest + 1 - len(prefix)
    lengths: list[int] = []
    chosen: dict[int, list[Window]] = {}
    digests: dict[int, str] = {}
    for index in tqdm(order, desc="reading", unit="document", leave=False, disable=None):
        if documents is not None and len(chosen) == documents:
            break
        ids = tokenizer(rows[index]["text"], add_special_tokens=False, verbose=False)["input_ids"]
        lengths.append(len(ids))
        if len(ids) < needed:
            continue
        tokens = torch.tensor(ids)
        ends = _ends(len(ids), needed, targets, windows_per_document)
        chosen[index] = [Window(rows[index]["name"], tokens[end - needed : end].clone(), prefix) for end in ends]
        digests[index] = hashlib.sha256(tokens.numpy().tobytes() + repr((ends, prefix.tolist())).encode()).hexdigest()
    if not chosen:
        raise EvaluationError(
            f"a context of {longest} tokens needs documents of {needed} tokens; the longest of {len(rows)} "
            f"has {max(lengths, default=0)}"
        )
    kept = sorted(chosen)
    return Selection(
        windows=tuple(window for index in kept for window in chosen[index]),
        documents=len(kept),
        short_documents=sum(length < needed for length in lengths),
        fingerprint=hashlib.sha256("".join(digests[index] for index in kept).encode()).hexdigest()[:16],
    )


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
