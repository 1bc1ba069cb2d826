"""Texts as the tokens that a model is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.texts import prefix_of


class Encoder:
    """Documents as tokens: the tokenizer's start token, the text, its end-of-text token.

    Attributes:
        tokenizer: of the checkpoint.
        vocab_size: of the model, whose embedding has that many rows; None to leave that unchecked.

    Args:
        end_of_text: whether the tokenizer's end-of-text token closes each document.
    """

    def __init__(self, tokenizer: Any, vocab_size: int | None, end_of_text: bool) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        eos = getattr(tokenizer, "eos_token_id", None) if end_of_text else None
        self._start = prefix_of(tokenizer).int()
        self._end = torch.tensor([] if eos is None else [eos], dtype=torch.int32)

    def __call__(self, names: Sequence[str], texts: Sequence[str]) -> list[torch.Tensor]:
        """The tokens of each text, `(tokens,)` int32; none at all of an empty text.

        Raises:
            EvaluationError: a token is beyond the model's vocabulary.
        """
        found = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        documents = [self._framed(ids) for ids in found]
        for name, tokens in zip(names, documents, strict=True):
            self._check(name, tokens)
        return documents

    def _framed(self, ids: list[int]) -> torch.Tensor:
        if not ids:
            return torch.tensor([], dtype=torch.int32)
        return torch.cat([self._start, torch.tensor(ids, dtype=torch.int32), self._end])

    def _check(self, name: str, tokens: torch.Tensor) -> None:
        if self.vocab_size is None or not len(tokens) or (highest := int(tokens.max())) < self.vocab_size:
            return
        size = f" with {len(self.tokenizer)} tokens" if hasattr(self.tokenizer, "__len__") else ""
        raise EvaluationError(
            f"document {name!r} holds token {highest}, but the model's vocabulary has {self.vocab_size} tokens, 0 to "
            f"{self.vocab_size - 1}: the tokenizer{size} belongs to another model"
        )
