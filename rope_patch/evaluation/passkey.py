"""The passkey: five digits somewhere in pages of "The grass is green", asked for at the end.

Source: Mohtashami & Jaggi 2023, "Landmark Attention", arXiv 2305.16300, and their `llama/run_test.py`, whose words
these are; five random digits as in Chen et al. 2023, "Position Interpolation", arXiv 2306.15595, figure 3.
"""

from __future__ import annotations

import random
import re
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.nll import find_language_model

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
FILLER = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
KEY = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key? The pass key is"

NEW_TOKENS = 7  # of an answer: a space of its own, five digits, and one more to see whether the number ends there


@dataclass(frozen=True)
class Prompt:
    """What the model reads, `(tokens,)`, and the digits or tokens that are right, `(answer,)`.

    `distance` is the number of tokens between the end of what is hidden and the end of the question: at L or more,
    attention that is cut at L sees nothing of it. It is None where nothing is hidden.
    """

    tokens: torch.Tensor
    answer: torch.Tensor
    distance: int | None


@dataclass(frozen=True)
class Passkey:
    """The task: keys that are drawn anew for each length, depth and trial.

    A prompt and its answer are as long as whole sentences of filler allow. Without a key nobody guesses five digits, so
    there is no control.
    """

    tokenizer: Any
    trials: int
    seed: int = 0
    name = "passkey"
    span = None

    def prompts(self, length: int, depth: float | None) -> list[Prompt]:
        """One prompt for each trial, the same for every scheme; with depth None, those of the control."""
        return [] if depth is None else [self._prompt(length, depth, trial) for trial in range(self.trials)]

    def answer(self, model: nn.Module, prompts: Sequence[Prompt]) -> tuple[torch.Tensor, None]:
        """Whether the first number that greedy decoding gives is the key, `(prompts, 1)`."""
        texts = greedy(model, self.tokenizer, torch.stack([prompt.tokens for prompt in prompts]), NEW_TOKENS)
        keys = ["".join(map(str, prompt.answer.tolist())) for prompt in prompts]
        right = [re.findall(r"\d+", text)[:1] == [key] for text, key in zip(texts, keys, strict=True)]
        return torch.tensor(right)[:, None], None

    def _prompt(self, length: int, depth: float, trial: int) -> Prompt:
        key = random.Random(f"{self.seed}/{length}/{depth:g}/{trial}").randrange(10_000, 100_000)
        room = length - NEW_TOKENS

        def tokens(sentences: int) -> int:
            return len(self._ids("".join(_around(sentences, depth, key))))

        if (needed := tokens(0)) > room:
            raise EvaluationError(
                f"length {length}: the question of task 'passkey' and its answer take {needed + NEW_TOKENS} tokens "
                "without any filler; give a longer length"
            )
        before, after = _around(bisect(range(1, room), room, key=tokens), depth, key)
        ids = self._ids(before + after)
        return Prompt(torch.tensor(ids), torch.tensor(list(map(int, str(key)))), len(ids) - len(self._ids(before)))

    def _ids(self, text: str) -> list[int]:
        """As the tokenizer spells a text, without the end that some of them put behind it: this one goes on."""
        ids = self.tokenizer(text, verbose=False)["input_ids"]
        ends = len(ids) > 1 and ids[-1] == self.tokenizer.eos_token_id
        return ids[:-1] if ends else ids


def greedy(model: nn.Module, tokenizer: Any, tokens: torch.Tensor, new_tokens: int, **settings: Any) -> list[str]:
    """What greedy decoding goes on with, as texts, after prompts of equal length, `(prompts, tokens)`.

    Args:
        settings: of `generate`, such as `stopping_criteria`.
    """
    language_model = find_language_model(model)
    tokens = tokens.to(language_model.device)
    config = GenerationConfig(
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        max_new_tokens=new_tokens,
        use_cache=True,
        eos_token_id=language_model.generation_config.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    mask = torch.ones_like(tokens)
    spoken = language_model.generate(tokens, attention_mask=mask, generation_config=config, **settings)
    return tokenizer.batch_decode(spoken[:, tokens.shape[1] :], skip_special_tokens=True)


def _around(sentences: int, depth: float, key: int) -> tuple[str, str]:
    """The prompt up to the end of the key, and from there on."""
    filler = [FILLER[i % len(FILLER)] for i in range(sentences)]
    place = round(depth * sentences)  # behind the key the filler begins anew
    head = [TASK, " ".join(filler[:place]), KEY.format(key=key)]
    tail = [" ".join(filler[: sentences - place]), QUESTION]
    return "\n".join(filter(None, head)), "\n" + "\n".join(filter(None, tail))
