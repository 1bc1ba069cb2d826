"""A share of a text to measure on, which is never trained on."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset, concatenate_datasets

from rope_patch.errors import EvaluationError

DOCUMENTS = 64  # at most; more would tell little more, and each is read at every length


def hold_out(
    documents: Any, tokenizer: Any, longest: int, *, share: float = 0.1, seed: int = 0, name: str = "the text"
) -> tuple[Any, Any, str]:
    """The documents to train on, those to measure on, and what the latter are called.

    Whole documents that fill the longest context are drawn at random, as many as the share has room for, at most 64 and
    never the longest of all. Where the share has no room for one, the end of the longest document is cut off. Of a
    stream the first 64 documents are held out.

    Args:
        documents: a dataset or a stream with `name` and `text`.
        longest: the longest context that is measured, in tokens.
        share: of all characters; the end of a document is as long as the longest context at least.
        seed: which documents.
        name: of all documents.

    Raises:
        EvaluationError: no document has so many tokens, and some to train on besides.
    """
    if isinstance(documents, IterableDataset):
        first = list(islice(documents, DOCUMENTS + 1))
        if len(first) > DOCUMENTS:
            return documents.skip(DOCUMENTS), first[:DOCUMENTS], f"the first {DOCUMENTS} documents of {name}, held out"
        documents = Dataset.from_list(first)  # the whole of it

    def tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

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
            f"{name} is too short: measuring at {longest} tokens takes {needed} that are held out, and the longest of "
            f"{len(sizes)} documents has {tokens(text)}; give a longer text, shorter lengths, or an eval_text"
        )
    whole = documents.select([biggest])
    head, tail = (
        Dataset.from_dict({**whole[:], "text": [part]}, whole.features) for part in (text[:-cut], text[-cut:])
    )
    others = documents.select([index for index in range(len(sizes)) if index != biggest])
    name = f"the last {cut / len(text):.0%} of {whole[0]['name']}, held out"
    return concatenate_datasets([others, head]), tail, name
