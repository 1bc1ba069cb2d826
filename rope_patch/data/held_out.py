"""Hold out a share of a text for measurements."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset, concatenate_datasets

from rope_patch.errors import EvaluationError

DOCUMENTS = 64  # the maximum; more add little information, and each is read at every length


def hold_out(
    documents: Any, tokenizer: Any, longest: int, *, share: float = 0.1, seed: int = 0, name: str = "the text"
) -> tuple[Any, Any, str]:
    """The documents for training, the held-out documents, and the name of the latter.

    Whole documents that fill the longest context are drawn at random, as many as the share allows, at most 64 and never
    the longest of all. If the share is too small for one, the end of the longest document is held out. From a stream
    the first 64 documents are held out.

    Args:
        documents: a dataset or a stream with `name` and `text`.
        longest: the longest measured context, in tokens.
        share: of all characters; the end of a document has at least the tokens of the longest context.
        seed: of the random draw.
        name: of all documents.

    Raises:
        EvaluationError: no document is long enough for the longest context and some training text.
    """
    if isinstance(documents, IterableDataset):
        first = list(islice(documents, DOCUMENTS + 1))
        if len(first) > DOCUMENTS:
            return documents.skip(DOCUMENTS), first[:DOCUMENTS], f"the first {DOCUMENTS} documents of {name}, held out"
        documents = Dataset.from_list(first)  # the whole stream

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
