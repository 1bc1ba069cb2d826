"""The passkey: five digits somewhere in pages of "The grass is green", asked for at the end.

Source: Mohtashami & Jaggi 2023, "Landmark Attention", arXiv 2305.16300, and their `llama/run_test.py`, whose words
these are; five random digits as in Chen et al. 2023, "Position Interpolation", arXiv 2306.15595, figure 3.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from rope_patch.errors import EvaluationError
from rope_patch.evaluation import sharing
from rope_patch.evaluation.nll import find_language_model
from rope_patch.evaluation.retrieval.task import Prompt, Score, batches

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
FILLER = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
KEY = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key? The pass key is"

NEW_TOKENS = 7
"""Of an answer: a space of its own, five digits, and one more to see whether the number ends there."""


class Passkey:
    """Keys that are drawn anew for each length, depth and trial.

    A prompt is as long as whole sentences of filler allow: with the answer it is never longer than the length that it
    is named by, so that no position beyond that length is asked for.

    Args:
        tokenizer: of the checkpoint.
        trials: prompts for each length and depth.
        seed: of the keys.
        batch_size: prompts of equal length that are answered together.

    Attributes:
        span: None: the length of a key is not for the reader to choose.
    """

    name = "passkey"
    span: int | None = None
    has_control = False

    def __init__(self, tokenizer: Any, *, trials: int, seed: int = 0, batch_size: int = 1) -> None:
        self.trials = trials
        self._tokenizer = tokenizer
        self._seed = seed
        self._batch_size = batch_size

    def prompts(self, length: int, depth: float | None) -> list[Prompt]:
        """See `Task.prompts`; there is no control, since nobody guesses five digits."""
        if depth is None:
            return []
        return [self._prompt(length, depth, trial) for trial in range(self.trials)]

    def _prompt(self, length: int, depth: float, trial: int) -> Prompt:
        key = random.Random(f"{self._seed}/{length}/{depth:g}/{trial}").randrange(10_000, 100_000)
        sentences = self._sentences(length, depth, key)
        before, after = _around(sentences, depth, key)
        tokens = self._ids(before + after)
        return Prompt(
            torch.tensor(tokens),
            torch.tensor([int(digit) for digit in str(key)]),
            distance=len(tokens) - len(self._ids(before)),
        )

    def _sentences(self, length: int, depth: float, key: int) -> int:
        """How many sentences of filler fit."""
        room = length - NEW_TOKENS

        def tokens(sentences: int) -> int:
            return len(self._ids("".join(_around(sentences, depth, key))))

        if (needed := tokens(0)) > room:
            raise EvaluationError(
                f"length {length}: the question of task 'passkey' and its answer take {needed + NEW_TOKENS} tokens "
                "without any filler; give a longer length"
            )
        cycle = len(FILLER)
        guess = (room - needed) * cycle // (tokens(2 * cycle) - tokens(cycle))
        while tokens(guess) > room:
            guess -= 1
        while tokens(guess + 1) <= room:
            guess += 1
        return guess

    def _ids(self, text: str) -> list[int]:
        """As the tokenizer spells a text, without the end that some of them put behind it: this one goes on."""
        ids = self._tokenizer(text, verbose=False)["input_ids"]
        ends = len(ids) > 1 and ids[-1] == self._tokenizer.eos_token_id
        return ids[:-1] if ends else ids

    @torch.no_grad()
    def score(self, model: nn.Module, prompts: Sequence[Prompt]) -> Score:
        """The share of the keys that greedy decoding says, all five digits and no sixth."""

        def right_of(batch: Sequence[Prompt]) -> int:
            said = self._answers(model, batch)
            return sum(digits == prompt.answer.tolist() for prompt, digits in zip(batch, said, strict=True))

        right = sum(sharing.each(right_of, batches(prompts, self._batch_size)))
        return Score(right / len(prompts), right / len(prompts), None)

    def _answers(self, model: nn.Module, batch: Sequence[Prompt]) -> list[list[int]]:
        """The digits of the first number that the model says to each."""
        language_model = find_language_model(model)
        tokens = torch.stack([prompt.tokens for prompt in batch]).to(language_model.device)
        said = language_model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            generation_config=self._greedy(language_model),
        )
        texts = self._tokenizer.batch_decode(said[:, tokens.shape[1] :], skip_special_tokens=True)
        found = [re.search(r"\d+", text) for text in texts]
        return [[int(digit) for digit in match[0]] if match else [] for match in found]

    def _greedy(self, language_model: Any) -> GenerationConfig:
        """Greedy decoding and nothing beside it, whatever the checkpoint's own `generation_config.json` says."""
        end = language_model.generation_config.eos_token_id
        pads = (self._tokenizer.pad_token_id, *(end if isinstance(end, list) else [end]), 0)
        return GenerationConfig(
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            max_new_tokens=NEW_TOKENS,
            use_cache=True,
            eos_token_id=end,
            pad_token_id=next(pad for pad in pads if pad is not None),
        )


def _around(sentences: int, depth: float, key: int) -> tuple[str, str]:
    """The prompt up to the end of the key, and from there on."""
    before = round(depth * sentences)
    head = [TASK, _filler(before), KEY.format(key=key)]
    tail = [_filler(sentences - before), QUESTION]
    return "\n".join(filter(None, head)), "\n" + "\n".join(filter(None, tail))


def _filler(sentences: int) -> str:
    return " ".join(FILLER[i % len(FILLER)] for i in range(sentences))
