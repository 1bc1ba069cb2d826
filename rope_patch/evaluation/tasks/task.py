"""A measurement task: the cells at a length, the score of an item, and the row that follows from the scores.

Your own task is one class in one file; `docs/how-to/own-task.md` shows how.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GenerationConfig

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.measured_model import MeasuredModel
from rope_patch.evaluation.standard_errors import standard_error
from rope_patch.models.head import find_language_model


@dataclass(frozen=True)
class Cell:
    """The items that are scored together under a scheme: for one row, or for several rows that one pass fills.

    Attributes:
        rows: the fields of `Row` that each row has before it is scored; the ones of `row.KEY` identify it, such as
            `prompts`, the fingerprint of the questions.
        items: the items; each is scored alone, and several processes divide them. An item that several cells of a
            length share is scored once under each scheme.
        title: text after the scheme and the length in the display of progress, such as `, depth 0.5`.
        same_as: fields; if an earlier row differs from these rows only in them, it has the same scores.
    """

    rows: Sequence[dict[str, Any]]
    items: Sequence[Any]
    title: str = ""
    same_as: dict[str, Any] | None = None


class Task:
    """A measurement of a model under schemes. Override `name`, `cells` and `score`; the others have defaults.

    Attributes:
        name: `Row.task`, unless a cell names another task.
        what: the noun in titles whose share `Row.score` gives.
        one_pass: whether the pass at the longest length fills the rows of all lengths, so that no scheme may depend on
            the length.
    """

    name: ClassVar[str]
    what: str = "the answers"
    one_pass: ClassVar[bool] = False

    def cells(self, length: int) -> list[Cell]:
        """The cells to score in contexts of one length, in tokens: the same for every scheme."""
        raise NotImplementedError

    def control(self, line: str) -> list[Cell]:
        """The cells that the plain checkpoint scores once for a line of `scheme_specs.CONTROLS`, with the rows of all
        lengths.

        Raises:
            EvaluationError: the task has no such line.
        """
        raise EvaluationError(f"{line!r} is a line of perplexity alone; task {self.name!r} has no such control")

    def score(self, model: nn.Module, item: Any) -> Any:
        """Score the model on one item of a cell: a number from 0 to 1, or a value on the CPU that `row` reads."""
        raise NotImplementedError

    def row(self, fields: dict[str, Any], items: Sequence[Any], scores: Sequence[Any]) -> dict[str, Any]:
        """The remaining fields of `Row`, from the scores of all items; `fields` are the known fields."""
        return {"scores": list(scores), "score": statistics.fmean(scores), "error": standard_error(scores)}

    def size(self, item: Any) -> int:
        """The number of tokens that the model reads for an item, for the estimate of the remaining time."""
        return len(item)

    def passes(self, lengths: Sequence[int]) -> Sequence[int]:
        """The lengths of the passes that the model runs."""
        return lengths

    def resolve(self, model: MeasuredModel, lengths: Sequence[int]) -> Task:
        """Fill in the settings that depend on this model and these lengths, before any slow step.

        Raises:
            EvaluationError: the task does not fit the model or the lengths.
        """
        if model.language_model.config.is_encoder_decoder:
            kind = type(model.language_model).__name__
            raise EvaluationError(
                f"{kind} is an encoder with a decoder; {self.name} needs one stack that continues its input"
            )
        return self


def fingerprint(prompts: Iterable[torch.Tensor]) -> str:
    """A hash of prompts, each `(tokens,)`, for `Row.prompts`."""
    return hashlib.sha256(b"".join(tokens.numpy().tobytes() for tokens in prompts)).hexdigest()[:16]


def greedy(model: nn.Module, tokenizer: Any, tokens: torch.Tensor, new_tokens: int, **settings: Any) -> list[str]:
    """Continue prompts of equal length, `(prompts, tokens)`, by greedy decoding, and return the continuations as texts.

    Args:
        new_tokens: the maximum length of a continuation.
        settings: arguments of `generate`, such as `stopping_criteria`.
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
    generated = language_model.generate(tokens, attention_mask=mask, generation_config=config, **settings)
    return tokenizer.batch_decode(generated[:, tokens.shape[1] :], skip_special_tokens=True)
