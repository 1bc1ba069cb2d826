"""Repeated spans: a piece of text from elsewhere stands at some depth, its beginning comes again, the model goes on.

A synthetic task for checkpoints that are too small for the passkey: it asks for no word of English and no instruction,
only for induction, within the texts that the checkpoint knows.

context     filler[:place] + span + filler[place:] + span[:cue], then the rest of the span, token by token
accuracy    share of span[cue:] that is the likeliest token where all tokens before it are given
exact       share of trials where all of them are, which is when greedy decoding would say the whole rest
nll         mean of -ln p over span[cue:]
control     the same end of the same text, with filler in place of the first span: what can be known without retrieval
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rope_patch.errors import EvaluationError
from rope_patch.evaluation import sharing
from rope_patch.evaluation.nll import find_language_model
from rope_patch.evaluation.retrieval.task import Prompt, Score, batches
from rope_patch.evaluation.texts import Window, select_windows

CUE = 4
"""The cue is the first 1/CUE of a span."""


class Spans:
    """The same spans in the same fillers at every length and depth: only the place of the first copy moves.

    The filler of a trial ends at the same token at every length, and the second copy follows it. The span comes from
    another document than its filler.

    Args:
        tokenizer: of the checkpoint.
        corpus: rows with `name` and `text`, at least two of them as long as the longest length.
        longest: the longest length in tokens.
        span: its tokens.
        trials: prompts for each length and depth.
        seed: of the draw of places.
        batch_size: prompts that are answered together.

    Raises:
        EvaluationError: the span has no cue, or the texts are too few or too short.
    """

    name = "spans"
    has_control = True

    def __init__(
        self,
        tokenizer: Any,
        corpus: Iterable[Mapping[str, str]],
        *,
        longest: int,
        span: int,
        trials: int,
        seed: int = 0,
        batch_size: int = 1,
    ) -> None:
        if span < CUE:
            raise EvaluationError(f"span={span} is not allowed; a span and its cue need at least {CUE} tokens")
        self.trials = trials
        self.span: int | None = span
        self._size = span
        self._cue = span // CUE
        self._batch_size = batch_size
        windows = select_windows(
            corpus,
            tokenizer,
            longest=max(longest, span),
            targets=span,
            documents=max(2, trials),
            windows_per_document=trials,
            seed=seed,
        ).windows
        self._fillers, self._spans = _draw(windows, span, trials, seed)

    def prompts(self, length: int, depth: float | None) -> list[Prompt]:
        """See `Task.prompts`."""
        shortest = len(self._fillers[0].prefix) + 2 * self._size
        if length < shortest:
            raise EvaluationError(
                f"length {length}: a span of {self._size} tokens twice needs a length of at least {shortest}; give a "
                "longer length or a shorter span"
            )
        return [self._prompt(length, depth, trial) for trial in range(self.trials)]

    def _prompt(self, length: int, depth: float | None, trial: int) -> Prompt:
        window, span = self._fillers[trial], self._spans[trial]
        again = span[:-1]  # its last token is predicted, never read
        hidden = span if depth is not None else span[:0]
        filler = window.context(length - len(hidden) - len(again) - 1)
        start = len(window.prefix)
        place = start + round((depth or 0) * (len(filler) - start))
        return Prompt(
            torch.cat([filler[:place], hidden, filler[place:], again]),
            span[self._cue :],
            distance=None if depth is None else len(filler) - place + self._cue,
        )

    @torch.no_grad()
    def score(self, model: nn.Module, prompts: Sequence[Prompt]) -> Score:
        """One forward pass for each prompt: the rest of the span is given, token by token."""
        language_model = find_language_model(model)

        def answered(batch: Sequence[Prompt]) -> tuple[torch.Tensor, torch.Tensor]:
            tokens = torch.stack([prompt.tokens for prompt in batch]).to(language_model.device)
            answers = torch.stack([prompt.answer for prompt in batch]).to(language_model.device)
            logits = _last_logits(language_model, tokens, answers.shape[1])
            losses = nn.functional.cross_entropy(logits.transpose(1, 2), answers, reduction="none")
            return (logits.argmax(-1) == answers).cpu(), losses.double().cpu()

        right, nll = map(torch.cat, zip(*sharing.each(answered, batches(prompts, self._batch_size)), strict=True))
        return Score(right.double().mean().item(), right.all(1).double().mean().item(), nll.mean().item())


def _last_logits(language_model: Any, tokens: torch.Tensor, last: int) -> torch.Tensor:
    """Logits at the last positions in float32, `(batch, last, vocabulary)`, and no others where the model can."""
    can = "logits_to_keep" in inspect.signature(language_model.forward).parameters
    few = {"logits_to_keep": last} if can else {}
    return language_model(input_ids=tokens, use_cache=False, **few).logits[:, -last:].float()


def _draw(
    windows: Sequence[Window], size: int, trials: int, seed: int
) -> tuple[tuple[Window, ...], tuple[torch.Tensor, ...]]:
    """A filler for each trial and, from another document, its span."""
    generator = torch.Generator().manual_seed(seed)
    if len({window.document for window in windows}) < 2:
        raise EvaluationError(
            f"task 'spans' hides spans of one document in another, and only {windows[0].document!r} is long enough; "
            "give more texts or shorter lengths"
        )
    if len(windows) < trials:
        raise EvaluationError(
            f"trials={trials}: the texts have places for {len(windows)}; give more texts or fewer trials"
        )
    fillers, spans = [], []
    for index in torch.randperm(len(windows), generator=generator)[:trials].tolist():
        filler = windows[index]
        others = [window for window in windows if window.document != filler.document]
        source = others[int(torch.randint(len(others), (), generator=generator))].tokens
        start = int(torch.randint(len(source) - size + 1, (), generator=generator))
        fillers.append(filler)
        spans.append(source[start : start + size])
    return tuple(fillers), tuple(spans)
