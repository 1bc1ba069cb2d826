# ruff: noqa: D102  # the methods of a protocol are documented once, on Protocol
"""Protocols that score whole documents: windows of length l walk over them, and every token is a target once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.protocols.base import Cell, Context, Protocol, Request, count
from rope_patch.evaluation.results import Row
from rope_patch.evaluation.texts import prefix_of
from rope_patch.evaluation.whole_texts import WholeTexts, select_documents

DEFAULT_STRIDE = 256
"""S of PI and of YaRN; the shortest length, where that is below."""

YARN_SCRIPT = "https://github.com/jquesnelle/yarn/blob/b1d7076cb31004a5ea1fced75c2af050a26f643b/eval/perplexity.py"


def windows(count: int, width: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Windows of at most `width` over `count` tokens, a stride apart, until one reaches the end.

    Args:
        count: tokens of the text.
        width: tokens of a window at most.
        stride: tokens from one window to the next.

    Yields:
        where a window begins, where it ends, and how many tokens no window before it had.
    """
    seen = 0
    for begin in range(0, count, stride):
        end = min(begin + width, count)
        yield begin, end, end - seen
        if end == count:
            return
        seen = end


class Sliding(Protocol[WholeTexts]):
    """Windows of l tokens, a stride of S apart: the first scores all its tokens, later ones only the new ones.

    window k reads x[kS], ..., x[e - 1], e = min(kS + l, n - 1), of a document x[0], ..., x[n - 1], and scores x[p] for
    p <= e that no window before it scored; nll = sum over all tokens / number of tokens.

    Every target but those of the first window sees at least l - S tokens. The prefix of the tokenizer stands in front
    of the document and, in place of x[kS], in front of every later window.

    Source: Chen et al., 2306.15595 (PI), who follow Press et al.; their stride of 256 is also the default of YaRN's
    script, which says to be validated against theirs. What PI does at the ends of documents is not known to us.
    """

    name = "sliding"
    settings = frozenset({"stride", "tokens_per_document"})
    scores = "whole documents"
    shared_targets: ClassVar[str | None] = "stride"

    def __init__(self, request: Request, tokenizer: Any, training_length: int) -> None:
        self.request = request
        self.prefix = self.prefix_of(tokenizer)
        shortest = self.width(request.lengths[0])
        self.stride = min(DEFAULT_STRIDE, shortest) if request.stride is None else request.stride
        if not 1 <= self.stride <= shortest:
            raise EvaluationError(
                f"stride={self.stride} is not allowed with a shortest length of {request.lengths[0]} tokens: it must "
                f"be from 1 to {shortest}, or tokens between two windows would never be scored"
            )

    def prefix_of(self, tokenizer: Any) -> torch.Tensor:
        """The tokens in front of every window, `(tokens,)`.

        Args:
            tokenizer: of the checkpoint.
        """
        return prefix_of(tokenizer)

    def width(self, length: int) -> int:
        """How far a window of this length reaches, which is as far as the next may begin behind it."""
        return length

    def select(self, corpus: Iterable[Mapping[str, str]], tokenizer: Any) -> WholeTexts:
        return select_documents(
            corpus,
            tokenizer,
            self.prefix,
            longest=self.request.lengths[-1],
            documents=self.request.documents,
            tokens_per_document=self.request.tokens_per_document,
            seed=self.request.seed,
        )

    def cells(self) -> list[tuple[int, tuple[Cell, ...]]]:
        return [(length, (Cell(length, self.stride_at(length)),)) for length in self.request.lengths]

    def stride_at(self, length: int) -> int:
        """S for windows of one length."""
        return self.stride

    def contexts(self, chosen: WholeTexts, length: int) -> list[Context]:
        return [context for text in chosen.texts for context in self.over(text, length)]

    def over(self, text: torch.Tensor, length: int) -> Iterator[Context]:
        """The windows over one document, `(n,)`."""
        front = len(self.prefix)
        targets = front + len(text) - 1
        for begin, end, new in windows(targets, self.width(length), self.stride_at(length)):
            inputs = end - begin
            yield Context(self.prefix, text[begin : end + 1 - front], inputs - new, inputs)

    @staticmethod
    def sentence(row: Row) -> str:
        return f"NLL of all tokens of the documents in windows that slide by {row.targets} tokens"


class Disjoint(Sliding):
    """Windows of l tokens side by side: the stride is l. A last window that is shorter is scored too.

    Source: Press et al., 2108.12409 (ALiBi), nonoverlapping inference; the rolling windows of lm-evaluation-harness
    (read in 0.4.13), which differ in that only the first has a prefix: later ones begin with the last token of the
    window before, and the last one is filled up with earlier tokens.
    """

    name = "disjoint"
    settings = frozenset({"tokens_per_document"})
    shared_targets = None

    def __init__(self, request: Request, tokenizer: Any, training_length: int) -> None:
        self.request = request
        self.prefix = self.prefix_of(tokenizer)

    def stride_at(self, length: int) -> int:
        return self.width(length)

    @staticmethod
    def sentence(row: Row) -> str:
        return "NLL of all tokens of the documents in windows that do not overlap"


class YarnCompat(Sliding):
    """The number of YaRN's script without `--truncate`: the mean over windows of each window's mean, unweighted.

    nll = sum over windows of (mean over the new tokens of the window) / number of windows. The last window of a
    document, which may have a single new token, weighs as much as any other, so that this is not a mean over tokens.

    Read in the script at commit b1d7076 (`YARN_SCRIPT`), nothing here is from memory: documents are tokenized without
    special tokens; where the tokenizer has a start-of-text token, and whether or not it sets one itself, that token
    leads every window and is counted in l; windows begin every S tokens (256) until one reaches the end; labels are
    -100 except on the last `end - previous end` tokens; the model's own shifted loss makes the mean of a window, so a
    window of l inputs scores at most l - 1 tokens, and without a start token its first token never; the means of all
    windows of all documents are averaged and exponentiated. Documents shorter than `--dataset-min-tokens` are left out.

    Two things are ours: sums are float64 where the script adds in the type of the loss, and a window whose only new
    token is its first, without a start token (possible where S = l), is skipped, where the script's mean becomes NaN.
    """

    name = "yarn_compat"

    def __init__(self, request: Request, tokenizer: Any, training_length: int) -> None:
        if request.lengths[0] < 2:
            raise EvaluationError(f"lengths {request.lengths[0]}: protocol {self.name!r} needs at least 2 tokens")
        super().__init__(request, tokenizer, training_length)

    def prefix_of(self, tokenizer: Any) -> torch.Tensor:
        start = tokenizer.bos_token_id
        return torch.tensor([] if start is None else [start], dtype=torch.long)

    def width(self, length: int) -> int:
        return length - len(self.prefix)

    def over(self, text: torch.Tensor, length: int) -> Iterator[Context]:
        padded = torch.cat([text, text[-1:]])  # behind the last input: the shifted loss never asks for it
        for begin, end, new in windows(len(text), self.width(length), self.stride_at(length)):
            labelled = len(self.prefix) + end - begin - 1
            context = Context(self.prefix, padded[begin : end + 1], max(0, labelled - new), labelled)
            if context.stop > context.start:
                yield context

    def mean(self, losses: Sequence[torch.Tensor], cell: Cell) -> tuple[float, int]:
        means = torch.stack([nll.mean() for nll in losses])
        return means.mean().item(), sum(nll.numel() for nll in losses)

    @staticmethod
    def sentence(row: Row) -> str:
        return (
            f"mean NLL of {count(row.targets, 'new token')} per window, windows unweighted, as YaRN's script without "
            "--truncate"
        )


class YarnTruncate(YarnCompat):
    """The number of YaRN's script with `--truncate`: the first l tokens of every document, in one window.

    The stride plays no part. Every length scores other tokens, so a falling curve says little by itself; the published
    figures (`eval.sh` of the same repository: Proof-pile, ten documents of at least 131072 tokens) were made so.
    """

    name = "yarn_truncate"
    settings = frozenset()
    shared_targets = None

    def __init__(self, request: Request, tokenizer: Any, training_length: int) -> None:
        super().__init__(
            Request(request.lengths, stride=1, documents=request.documents, seed=request.seed), tokenizer, 0
        )

    def cells(self) -> list[tuple[int, tuple[Cell, ...]]]:
        return [(length, (Cell(length, length - 1),)) for length in self.request.lengths]

    def stride_at(self, length: int) -> int:
        return self.width(length)

    def over(self, text: torch.Tensor, length: int) -> Iterator[Context]:
        return super().over(text[: self.width(length)], length)

    @staticmethod
    def sentence(row: Row) -> str:
        return "mean NLL of the first tokens of the documents, other tokens at every length, as YaRN's --truncate"
