"""Hold out a share of a text for measurements, or half of it for a confirmation."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset, concatenate_datasets

from rope_patch.data.special_tokens import bare_ids
from rope_patch.data.windows import FEW, ids_of
from rope_patch.errors import EvaluationError

DOCUMENTS = 64  # the maximum; more add little information, and each is read at every length


def hold_out(
    documents: Any, tokenizer: Any, longest: int, *, share: float = 0.1, seed: int = 0, name: str = "the text"
) -> tuple[Any, Any, str]:
    """Split documents into documents for training and held-out ones; the third result is the name of the held-out ones.

    Whole documents that fill the longest context are drawn at random, as many as the share allows, at most 64 and never
    the longest of all. If the share is too small for one document, the end of the longest document is held out. From a
    stream the first 64 documents are held out.

    Args:
        documents: a dataset or a stream with `name` and `text`.
        longest: the longest measured context, in tokens.
        share: held-out share of all characters; if only the end of a document is held out, it has at least the tokens
            of the longest context.
        seed: seed of the random draw.
        name: name of all documents.

    Raises:
        EvaluationError: no document is long enough for the longest context and some training text.
    """
    if isinstance(documents, IterableDataset):
        first = list(islice(documents, DOCUMENTS + 1))
        if len(first) > DOCUMENTS:
            return documents.skip(DOCUMENTS), first[:DOCUMENTS], f"the first {DOCUMENTS} documents of {name}, held out"
        documents = Dataset.from_list(first)  # the stream ended: these are all documents

    def tokens(text: str) -> int:
        return len(bare_ids(tokenizer, text))

    texts, needed, held = documents["text"], longest + 1, set[int]()
    sizes = [len(text) for text in texts]
    room, biggest = share * sum(sizes), int(np.argmax(sizes))
    for index in np.random.default_rng(seed).permutation(len(sizes)).tolist():
        fits = index != biggest and needed <= sizes[index] <= room and len(held) < DOCUMENTS
        if fits and tokens(texts[index]) >= needed:
            held.add(index)
            room -= sizes[index]
    others = documents.select([index for index in range(len(sizes)) if index not in held])
    if held:
        return others, documents.select(sorted(held)), f"{len(held)} of {len(sizes)} documents of {name}, held out"

    text = texts[biggest]
    cut = math.ceil(min(room, len(text) / 2))
    while cut < len(text) and tokens(text[-cut:]) < needed:
        cut = math.ceil(1.05 * cut)
    if cut >= len(text):
        raise EvaluationError(
            f"{name} is too short: measuring at {longest} tokens needs {needed} held-out tokens, but the longest of "
            f"{len(sizes)} documents has {tokens(text)}; use a longer text, shorter lengths, or an eval_text"
        )
    whole = documents.select([biggest])
    head, tail = (
        Dataset.from_dict({**whole[:], "text": [part]}, whole.features) for part in (text[:-cut], text[-cut:])
    )
    others = documents.select([index for index in range(len(sizes)) if index != biggest])
    name = f"the last {cut / len(text):.0%} of {whole[0]['name']}, held out"
    return concatenate_datasets([others, head]), tail, name


def halves(
    corpus: Any, tokenizer: Any, needed: int, documents: int | None = None, seed: int = 0
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split a text into two halves that share no token: a choice made on one can be confirmed on the other.

    Documents are dealt in random order. Fewer than 8 would leave too few to each half, so documents with enough room
    are then cut in the middle, and an error over their windows describes these documents alone.

    Args:
        corpus: rows with `name` and `text`, or `input_ids` in place of `text`.
        needed: tokens of the longest context and its targets; shorter documents stay in the first half.
        documents: the number of documents read from each half; default all.

    Raises:
        EvaluationError: the text has room for only one half.
    """
    read: dict[int, dict[str, Any]] = {}
    whole: list[int] = []
    for index in np.random.default_rng(seed).permutation(len(corpus)).tolist():
        if documents is not None and len(whole) == 2 * documents:
            break
        read[index] = {"name": corpus[index]["name"], "input_ids": ids_of(corpus[index], tokenizer)}
        if len(read[index]["input_ids"]) >= needed:
            whole.append(index)
    middle = {n: len(row["input_ids"]) // 2 for n, row in read.items()}
    cut = {index for index in whole if len(whole) < FEW and middle[index] >= needed}
    dealt = [index for index in whole if index not in cut]
    second = cut | set(dealt[1::2])
    if whole and not second:
        raise EvaluationError(
            f"the text is too short: one half of it chooses, the other confirms, and each needs {needed} tokens; the "
            f"only document long enough has {len(read[whole[0]]['input_ids'])}; use a longer text, more documents or a "
            "shorter target"
        )

    def part(index: int, place: slice) -> dict[str, Any]:
        return {**read[index], "input_ids": read[index]["input_ids"][place if index in cut else slice(None)]}

    first = [part(index, slice(middle[index])) for index in sorted(read) if index in cut or index not in second]
    return first, [part(index, slice(middle[index], None)) for index in sorted(second)]
