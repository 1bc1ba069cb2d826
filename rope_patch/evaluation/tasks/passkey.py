"""The passkey task: five digits are hidden in pages of "The grass is green", and the question at the end asks for the
digits.

Source: Mohtashami & Jaggi 2023, "Landmark Attention", arXiv 2305.16300, and their `llama/run_test.py`, which has these
texts; five random digits as in Chen et al. 2023, "Position Interpolation", arXiv 2306.15595, figure 3.
"""

from __future__ import annotations

import random
import re
from bisect import bisect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rope_patch.data.special_tokens import ids_to_continue
from rope_patch.errors import EvaluationError
from rope_patch.evaluation.tasks.retrieval import Batch, Prompt, Retrieval
from rope_patch.evaluation.tasks.task import greedy

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
FILLER = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
KEY = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key? The pass key is"

NEW_TOKENS = 7  # tokens of an answer: a space, five digits, and one more that shows whether the number ends


class Passkey(Retrieval):
    """The passkey task, with a new key for each length, depth and trial.

    A prompt and its answer are as long as whole sentences of filler allow. Five digits cannot be guessed without the
    key, so there is no control.

    Args:
        tokenizer: tokenizer of the model.
        settings: arguments of `Retrieval`.
    """

    name = "passkey"
    what = "five-digit keys"

    def __init__(self, tokenizer: Any, depths: Sequence[float], trials: int, **settings: int) -> None:
        super().__init__(depths, trials, **settings)
        self.tokenizer = tokenizer

    def prompts(self, length: int, depth: float | None) -> list[Prompt]:
        """One prompt per trial, the same for every scheme; the control's prompts if depth is None."""
        return [] if depth is None else [self._prompt(length, depth, trial) for trial in range(self.trials)]

    def score(self, model: nn.Module, item: Batch) -> tuple[torch.Tensor, None]:
        """Whether the first number from greedy decoding is the key, `(prompts, 1)`."""
        texts = greedy(model, self.tokenizer, torch.stack([prompt.tokens for prompt in item]), NEW_TOKENS)
        keys = ["".join(map(str, prompt.answer.tolist())) for prompt in item]
        right = [re.findall(r"\d+", text)[:1] == [key] for text, key in zip(texts, keys, strict=True)]
        return torch.tensor(right)[:, None], None

    def _prompt(self, length: int, depth: float, trial: int) -> Prompt:
        key = random.Random(f"{self.seed}/{length}/{depth:g}/{trial}").randrange(10_000, 100_000)
        room = length - NEW_TOKENS

        def tokens(sentences: int) -> int:
            return len(ids_to_continue(self.tokenizer, "".join(_around(sentences, depth, key))))

        if (needed := tokens(0)) > room:
            raise EvaluationError(
                f"length {length}: the question of task 'passkey' and its answer need {needed + NEW_TOKENS} tokens "
                "without any filler; use a longer length"
            )
        before, after = _around(bisect(range(1, room), room, key=tokens), depth, key)
        ids, hidden = (ids_to_continue(self.tokenizer, text) for text in (before + after, before))
        return Prompt(torch.tensor(ids), torch.tensor(list(map(int, str(key)))), len(ids) - len(hidden))


def _around(sentences: int, depth: float, key: int) -> tuple[str, str]:
    """The two halves of a prompt: up to the end of the key, and the rest."""
    filler = [FILLER[i % len(FILLER)] for i in range(sentences)]
    place = round(depth * sentences)  # after the key the filler starts again
    head = [TASK, " ".join(filler[:place]), KEY.format(key=key)]
    tail = [" ".join(filler[: sentences - place]), QUESTION]
    return "\n".join(filter(None, head)), "\n" + "\n".join(filter(None, tail))
