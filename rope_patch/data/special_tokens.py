"""Special tokens that a tokenizer puts around a text; texts that a model continues keep only the tokens in front."""

from __future__ import annotations

from typing import Any

_TEXTS = ("a", "1", ".", "一")  # a vocabulary may lack some of them


def tokens_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens in front of each text, such as a start of text, and the tokens behind it, such as an end of
    text.

    One id may serve as start and end (GPT-2, Pythia, SmolLM), so the tokens are found by their place, and not by their
    id.
    """
    for text in _TEXTS:
        if bare := bare_ids(tokenizer, text):
            whole = tokenizer(text, verbose=False)["input_ids"]
            for start in range(len(whole) - len(bare) + 1):
                stop = start + len(bare)
                if whole[start:stop] == bare:
                    return whole[:start], whole[stop:]
    return [], []


def bare_ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text, without special tokens."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def ids_to_continue(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text, with the special tokens in front of it and without the special tokens behind it."""
    return tokens_around(tokenizer)[0] + bare_ids(tokenizer, text)
