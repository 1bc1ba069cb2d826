"""Rows of tokens to train on, made from documents: packed one after another, or with every piece in its own row."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from rope_patch.data.special_tokens import tokens_around
from rope_patch.errors import EvaluationError


def training_rows(
    documents: Any,
    tokenizer: Any,
    vocabulary: int,
    length: int,
    *,
    pack: bool = True,
    short: int | None = None,
    batch_size: int = 1,
    seed: int = 0,
    shuffle_buffer: int | None = None,
    allow_short: bool = False,
) -> Any:
    """A dataset of rows of up to `length` tokens, in whole batches, or an endless stream of them.

    Args:
        documents: a dataset or a stream with `name` and `text`; the tokenizer's special tokens stand in front of each
            document, and the end-of-text token closes it.
        vocabulary: number of tokens that the model knows.
        pack: fill every row, see `packed`; if False, see `cut`.
        short: length of the short pieces in packed rows, see `packed`.
        seed: seed of the order of the documents.
        shuffle_buffer: number of documents in the shuffle buffer of a stream; None for a dataset.
        allow_short: accept documents even if none of them fills a row.

    Raises:
        EvaluationError: a token is beyond the vocabulary, or no document fills a row.
    """
    front, end = tokens_around(tokenizer)
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in end:
        end = [*end, tokenizer.eos_token_id]

    def tokenise(batch: dict[str, list[str]]) -> dict[str, Any]:
        texts = tokenizer(batch["text"], add_special_tokens=False, verbose=False)["input_ids"]
        rows = [front + ids + end for ids in texts if ids]
        if (highest := max((max(ids) for ids in rows), default=0)) >= vocabulary:
            raise EvaluationError(
                f"token {highest} is beyond the model's {vocabulary} tokens: use the tokenizer of this model"
            )
        return {"input_ids": rows}

    if shuffle_buffer is not None and not hasattr(documents, "n_shards"):
        documents = documents.to_iterable_dataset()
    documents = documents.shuffle(seed=seed, **({} if shuffle_buffer is None else {"buffer_size": shuffle_buffer}))
    tokens = documents.map(tokenise, batched=True, remove_columns=["name", "text"])
    lay_out = partial(packed, length=length, short=short) if pack else partial(cut, length=length)
    rows = tokens.map(lay_out, batched=True, input_columns="input_ids", remove_columns="input_ids")
    if shuffle_buffer is not None:
        return rows.repeat(None)
    longest = max(map(len, tokens["input_ids"]), default=0)
    if not len(rows) or (longest < length and not allow_short):
        raise EvaluationError(
            f"no document fills a row of {length} tokens: without held-out text the longest of {len(tokens)} has "
            f"{longest}; short documents teach no long distances; use longer ones, a smaller length or "
            "allow_short=true"
        )
    rows = rows.repeat(-(-batch_size // len(rows)))
    return rows.take(len(rows) // batch_size * batch_size)  # so that every step of an epoch is full


def packed(documents: list[list[int]], length: int, short: int | None = None) -> dict[str, Any]:
    """Pack documents one after another into full rows. A document that is cut continues in the next row; `position_ids`
    start again with each piece, by which attention keeps the pieces apart.

    With `short`, every second row is cut into pieces of at most so many tokens, so that the model keeps its abilities
    at its training length: the mixed windows of LongRoPE2 (2502.20082, section 3.3).
    """
    tokens = np.array([token for document in documents for token in document], dtype=int)
    places, begins = np.arange(len(tokens)), np.zeros(len(tokens), dtype=bool)
    begins[np.cumsum([0, *map(len, documents)])[:-1]] = True
    begins[::length] = True
    if short is not None:
        begins |= (places // length % 2 == 1) & (places % length % short == 0)
    columns = {
        "input_ids": tokens,
        "labels": np.where(begins, -100, tokens),
        "position_ids": places - np.maximum.accumulate(np.where(begins, places, 0)),
    }
    full = len(tokens) // length * length
    return {name: list(values[:full].reshape(-1, length)) for name, values in columns.items()}


def cut(documents: list[list[int]], length: int) -> dict[str, Any]:
    """Cut documents into pieces, and make every piece a separate row."""
    return {"input_ids": [ids[at : at + length] for ids in documents for at in range(0, len(ids), length)]}
