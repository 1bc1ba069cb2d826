"""Protocols that score whole documents, in sliding or adjacent windows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from rope_patch.data.windows import Window
from rope_patch.errors import EvaluationError
from rope_patch.evaluation.protocols.protocol import Protocol, Settings
from rope_patch.evaluation.scheme_specs import PLAIN, WINDOW

DEFAULT_STRIDE = 256  # S of PI and of YaRN, or the shortest length if that is lower


class Sliding(Protocol):
    """Score windows of l tokens with stride S: the first scores all its tokens, later ones only the new ones.

    window k reads x[kS], ..., x[e - 1], e = min(kS + l, n - 1), of a document x[0], ..., x[n - 1], and scores x[p] for
    p <= e that no window before it scored; nll = sum over all tokens / number of tokens.

    Every target except those of the first window sees at least l - S tokens. The tokenizer's prefix precedes the
    document, and replaces x[kS] at the start of every later window.

    Source: Chen et al., 2306.15595 (PI), who follow Press et al.; their stride of 256 is also the default of YaRN's
    script. How PI treats document ends is unknown.
    """

    protocol = "sliding"
    settings = frozenset({"stride", "tokens_per_document"})
    scores = "whole documents"
    sentence = "NLL of all tokens of the documents in windows that slide by {targets} tokens"
    shared_targets: ClassVar[str | None] = "stride"

    def __init__(self, asked: Settings, lengths: Sequence[int], training_length: int) -> None:
        super().__init__(asked, lengths, training_length)
        shortest, longest = self.width(lengths[0]), lengths[-1]
        self.targets = self.stride = min(DEFAULT_STRIDE, shortest) if asked.stride is None else asked.stride
        if not 1 <= self.stride <= shortest:
            raise EvaluationError(
                f"stride={self.stride} is not allowed with a shortest length of {lengths[0]} tokens: it must "
                f"be from 1 to {shortest}, or tokens between two windows would never be scored"
            )
        needed, limit = longest + 1 - len(self.prefix), asked.tokens_per_document
        if limit is not None and limit < needed:
            raise EvaluationError(
                f"tokens_per_document={limit} is not allowed: a context of {longest} tokens needs documents of {needed}"
            )

    def contexts(self, window: Window, length: int) -> Iterable[tuple[torch.Tensor, int, int]]:
        front, text = len(self.prefix), window.tokens
        for begin, end, new in slide(front + len(text) - 1, self.width(length), self.targets_at(length)):
            inputs = end - begin
            yield torch.cat([self.prefix, text[begin : end + 1 - front]]), inputs - new, inputs


class Disjoint(Sliding):
    """Score adjacent windows of l tokens: the stride is l. A shorter last window is scored, too.

    Source: Press et al., 2108.12409 (ALiBi), nonoverlapping inference. In the rolling windows of lm-evaluation-harness
    (0.4.13) only the first window has a prefix, and the last window is filled with earlier tokens.
    """

    protocol = "disjoint"
    settings = frozenset({"tokens_per_document"})
    sentence = "NLL of all tokens of the documents in windows that do not overlap"
    shared_targets = None

    def targets_at(self, length: int) -> int:
        return length


class YarnCompat(Sliding):
    """Score as YaRN's script does without `--truncate`: the mean over windows of each window's mean, unweighted.

    nll = sum over windows of (mean over the new tokens of the window) / number of windows. The last window of a
    document may have a single new token, but weighs as much as any other, so this is not a mean over tokens.

    From `eval/perplexity.py` of github.com/jquesnelle/yarn at commit b1d7076: a start-of-text token, if the tokenizer
    has one, leads every window and counts in l. Windows begin every S tokens until one reaches the end. Labels are -100
    except on the last `end - previous end` tokens, and the shifted loss is the mean of a window. So a window of l
    inputs scores at most l - 1 tokens, and without a start token never its first one.

    Two details differ: sums are float64 instead of the dtype of the loss, and without a start token a window with only
    its first token new (possible if S = l) is skipped; the script's mean becomes NaN there.
    """

    protocol = "yarn_compat"
    sentence = "mean NLL of {targets} new tokens per window, windows unweighted, as YaRN's script without --truncate"

    def __init__(self, asked: Settings, lengths: Sequence[int], training_length: int) -> None:
        if lengths[0] < 2:
            raise EvaluationError(f"lengths {lengths[0]}: protocol {self.protocol!r} needs at least 2 tokens")
        super().__init__(asked, lengths, training_length)

    def prefix_of(self, tokenizer: Any) -> torch.Tensor:
        start = tokenizer.bos_token_id
        return torch.tensor([] if start is None else [start], dtype=torch.long)

    def width(self, length: int) -> int:
        return length - len(self.prefix)

    def contexts(self, window: Window, length: int) -> Iterable[tuple[torch.Tensor, int, int]]:
        text = window.tokens
        padded = torch.cat([text, text[-1:]])  # a token after the last input, which the shifted loss never reads
        for begin, end, new in slide(len(text), self.width(length), self.stride):
            labelled = len(self.prefix) + end - begin - 1
            start = max(0, labelled - new)
            if labelled > start:
                yield torch.cat([self.prefix, padded[begin : end + 1]]), start, labelled

    def mean(self, losses: Sequence[torch.Tensor]) -> float:
        return torch.stack([nll.mean() for nll in losses]).mean().item()


class YarnTruncate(YarnCompat):
    """Score as YaRN's script does with `--truncate`: the first l tokens of every document, in one window.

    The stride is ignored. Every length scores different tokens, so a falling curve alone means little. The published
    figures use this protocol (`eval.sh` of the same repository: Proof-pile, ten documents of at least 131072 tokens).
    """

    protocol = "yarn_truncate"
    settings = frozenset()
    references: ClassVar[Sequence[str]] = (PLAIN, WINDOW)
    sentence = "mean NLL of the first tokens of the documents, other tokens at every length, as YaRN's --truncate"
    shared_targets = None

    def targets_at(self, length: int) -> int:
        return length - 1

    def contexts(self, window: Window, length: int) -> Iterable[tuple[torch.Tensor, int, int]]:
        return super().contexts(replace(window, tokens=window.tokens[: self.width(length)]), length)


def slide(count: int, width: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Slide a window of `width` tokens by a stride: its start and end, and the number of new tokens in it."""
    seen = 0
    for begin in range(0, count, stride):
        end = min(begin + width, count)
        yield begin, end, end - seen
        if end == count:
            return
        seen = end
