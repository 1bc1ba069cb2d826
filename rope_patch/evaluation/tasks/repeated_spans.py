"""Repeated spans: a span from another text is inserted at some depth, its beginning is repeated at the end, and the
model continues it.

A synthetic task for checkpoints that are too small for the passkey: it needs no English words and no instruction, only
induction, within texts that the checkpoint knows.

prompt      filler[:place] + span + filler[place:] + span[:cue], then the rest of the span, token by token
right       whether each token of span[cue:] is the likeliest, given all tokens before it
control     the same end of the same text, with filler instead of the first span: the score without retrieval
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rope_patch.data.windows import select_windows
from rope_patch.errors import EvaluationError
from rope_patch.evaluation.tasks.retrieval import Batch, Prompt, Retrieval
from rope_patch.models.head import find_language_model

CUE = 4  # the cue is the first quarter of a span


class RepeatedSpans(Retrieval):
    """The task of repeated spans: the same spans in the same fillers at every length and depth; only the first copy
    moves.

    Args:
        corpus: rows with `name` and `text`, at least two of them with `longest` tokens, the longest length.
        span: number of tokens in a span.
        settings: arguments of `Retrieval`.

    Raises:
        EvaluationError: the span is too short for a cue, or there are too few texts, or they are too short.
    """

    name = "spans"

    def __init__(
        self,
        tokenizer: Any,
        corpus: Iterable[Mapping[str, str]],
        longest: int,
        span: int,
        depths: Sequence[float],
        trials: int,
        **settings: int,
    ) -> None:
        super().__init__(depths, trials, **settings)
        if span < CUE:
            raise EvaluationError(f"span={span} is not allowed; a span and its cue need at least {CUE} tokens")
        self.span, self.what = span, f"tokens of repeated spans of {span}, a synthetic task"
        windows = select_windows(
            corpus,
            tokenizer,
            longest=max(longest, span),
            targets=span,
            documents=max(2, trials),
            windows_per_document=trials,
            seed=self.seed,
        ).windows
        if len({window.document for window in windows}) < 2:
            name = windows[0].document
            raise EvaluationError(
                f"only {name!r} is long enough, but a span needs two texts; use more texts or shorter lengths"
            )
        if len(windows) < trials:
            raise EvaluationError(f"trials={trials}: the texts have places for {len(windows)}; use more texts")
        generator = torch.Generator().manual_seed(self.seed)
        self._drawn = []
        for index in torch.randperm(len(windows), generator=generator)[:trials].tolist():
            filler = windows[index]
            others = [window for window in windows if window.document != filler.document]
            source = others[int(torch.randint(len(others), (), generator=generator))].tokens
            start = int(torch.randint(len(source) - span + 1, (), generator=generator))
            self._drawn.append((filler, source[start : start + span]))

    def prompts(self, length: int, depth: float | None) -> list[Prompt]:
        """One prompt per trial, the same for every scheme; the control's prompts if depth is None."""
        shortest = len(self._drawn[0][0].prefix) + 2 * self.span
        if length < shortest:
            raise EvaluationError(
                f"length {length}: a span of {self.span} tokens twice needs a length of at least {shortest}; use a "
                "longer length or a shorter span"
            )
        prompts = []
        for window, span in self._drawn:
            again = span[:-1]  # its last token is predicted, never read
            hidden = span if depth is not None else span[:0]
            filler = window.context(length - len(hidden) - len(again) - 1)
            start, cue = len(window.prefix), self.span // CUE
            place = start + round((depth or 0) * (len(filler) - start))
            tokens = torch.cat([filler[:place], hidden, filler[place:], again])
            prompts.append(Prompt(tokens, span[cue:], None if depth is None else len(filler) - place + cue))
        return prompts

    @torch.no_grad()
    def score(self, model: nn.Module, item: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Score one forward pass: whether each token is correct, and its -ln p, both `(prompts, tokens of the
        answer)`.
        """
        language_model = find_language_model(model)
        tokens = torch.stack([prompt.tokens for prompt in item]).to(language_model.device)
        answers = torch.stack([prompt.answer for prompt in item]).to(language_model.device)
        last = answers.shape[1]
        few = (
            {"logits_to_keep": last} if "logits_to_keep" in inspect.signature(language_model.forward).parameters else {}
        )
        logits = language_model(input_ids=tokens, use_cache=False, **few).logits[:, -last:].float()
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), answers, reduction="none")
        return (logits.argmax(-1) == answers).cpu(), losses.double().cpu()
