"""The base of all protocols: contexts, the loss of their scored predictions, and the row of results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import nn

from rope_patch.data.windows import FEW, Selection, Window, prefix_of, select
from rope_patch.errors import EvaluationError
from rope_patch.evaluation.measured_model import MeasuredModel
from rope_patch.evaluation.nll import chunked_nll
from rope_patch.evaluation.scheme_specs import PLAIN, TRUNCATED, WINDOW
from rope_patch.evaluation.tasks.task import Cell, Task
from rope_patch.models.head import find_language_model

BLOCKS = 32  # maximum number of blocks of windows, for standard errors over few documents


@dataclass(frozen=True)
class Settings:
    """The text and the settings of a protocol.

    Args:
        tokenizer: the tokenizer; None if the corpus has tokens, which then get no start-of-text token.
        corpus: rows with `name` and `text`, such as `load_corpus()` returns, or with `input_ids` instead of `text`.
        protocol: one of `PROTOCOLS`; `"auto"` chooses `"last"` or `"span_corruption"` for the model.
        targets: T, scored tokens per window, or the tokens among which spans are hidden; default min(L, 4096).
        stride: S of `sliding` and `yarn_compat`, default 256, or the shortest length if that is less; d of `longppl`,
            default 1024.
        tokens_per_document: for protocols that score whole documents: the number of tokens to read; default all.
        documents: number of documents, drawn at random if there are more; default all.
        windows_per_document: for protocols that score windows: maximum number per document; default one, or with few
            documents enough to make 16 windows in total.
        evaluator: for `longppl`: the model that finds key tokens and its tokenizer, or the folder of both.
        short_context: K of `longppl`, the tokens in the evaluator's short contexts; default 4096.
        text: name of the corpus in the rows.
    """

    tokenizer: Any = None
    corpus: Iterable[Mapping[str, Any]] = ()
    protocol: str = "auto"
    targets: int | None = None
    stride: int | None = None
    tokens_per_document: int | None = None
    documents: int | None = None
    windows_per_document: int | None = None
    evaluator: Any = None
    short_context: int | None = None
    seed: int = 0
    text: str = ""


@dataclass(frozen=True)
class Context:
    """The input of one forward pass, `(tokens,)`, and its scored predictions, at positions start < p <= stop.

    The first p tokens predict position p. The last token is never read. `window` is the number of its window.
    """

    window: int
    document: str
    tokens: torch.Tensor
    start: int
    stop: int

    @property
    def length(self) -> int:
        """The number of input tokens."""
        return len(self.tokens) - 1


class Protocol(Task):
    """A way to score a text: it chooses the scored predictions, their contexts, and the average."""

    name = "perplexity"
    protocol: ClassVar[str]
    settings: ClassVar[frozenset[str]]  # fields of `Perplexity` that only some protocols accept, including this one
    scores: ClassVar[str]  # for an error message
    sentence: ClassVar[str]  # for the notes below a table
    two_parts: ClassVar[bool] = False  # for encoder-decoder models; otherwise for decoders
    references: ClassVar[Sequence[str]] = (PLAIN, TRUNCATED, WINDOW)  # lines that a table compares schemes with
    needed: ClassVar[Sequence[str]] = ()  # the references without which the others mean nothing
    baseline: ClassVar[str] = WINDOW  # the reference that losses are compared with
    shared_targets: ClassVar[str | None] = None  # the name of `Row.targets` if all rows of a table must share it
    targets: int  # scored predictions of a context; for overlapping windows, the stride

    def __init__(self, asked: Settings, lengths: Sequence[int], training_length: int) -> None:
        self.asked, self.lengths, self.training_length = asked, lengths, training_length
        self.prefix = self.prefix_of(asked.tokenizer)

    def resolve(self, model: MeasuredModel, lengths: Sequence[int]) -> Protocol:
        return self

    def prefix_of(self, tokenizer: Any) -> torch.Tensor:
        """The tokens in front of every context, `(tokens,)`."""
        return prefix_of(tokenizer)

    def places(self, counts: Sequence[int]) -> Sequence[Sequence[tuple[int, int]]]:
        """Start and end of the windows in documents with these token counts."""
        return [[(0, count)] for count in counts]

    @cached_property
    def selection(self) -> Selection:
        """The windows, chosen once for all lengths and schemes."""
        asked = self.asked
        drawn: dict[str, Any] = {"documents": asked.documents, "limit": asked.tokens_per_document, "seed": asked.seed}
        found = select(asked.corpus, asked.tokenizer, self.prefix, self.lengths[-1], self.places, **drawn)
        return replace(found, fingerprint="-".join(filter(None, [found.fingerprint, self.chosen_by])))

    @property
    def chosen_by(self) -> str:
        """Facts besides the windows that determine the scored tokens, for the fingerprint of the texts."""
        return ""

    def contexts(self, window: Window, length: int) -> Iterable[tuple[torch.Tensor, int, int]]:
        """The contexts of one window, or of one document, at one length: tokens, `(tokens,)`, start and stop."""
        raise NotImplementedError

    def width(self, length: int) -> int:
        """The number of tokens of a window that contexts of this length use, which bounds its targets."""
        return length

    def targets_at(self, length: int) -> int:
        """The value of `Row.targets` at one length."""
        return self.targets

    def mean(self, losses: Sequence[torch.Tensor]) -> float:
        """The NLL of a row as a mean over tokens, from losses `(scored,)` of each context."""
        return torch.cat(list(losses)).mean().item()

    def cells(self, length: int) -> list[Cell]:
        chosen = self.selection
        facts = {
            "protocol": self.protocol,
            "documents": chosen.documents,
            "short_documents": chosen.short_documents,
            "texts": chosen.fingerprint,
            "text": self.asked.text,
            "asked": self.asked.documents,
            "seed": self.asked.seed,
            "length": length,
            "targets": self.targets_at(length),
        }
        contexts = [
            Context(number, window.document, *context)
            for number, window in enumerate(chosen.windows)
            for context in self.contexts(window, length)
        ]
        return [Cell([facts], contexts)]

    def control(self, line: str) -> list[Cell]:
        """The cells that the plain checkpoint scores for one line of `references`.

        Raises:
            EvaluationError: the protocol has no such line.
        """
        if line not in self.references:
            lines = ", ".join(self.references)
            raise EvaluationError(f"protocol {self.protocol!r} has no line {line!r}, only {lines} and schemes")
        reaches = {length: min(length, self.training_length) for length in self.lengths}
        return [
            self._plain_at(reach, [length for length in reaches if reaches[length] == reach], line)
            for reach in dict.fromkeys(reaches.values())
            if self.targets <= self.width(reach)
        ]

    def _plain_at(self, reach: int, lengths: Sequence[int], line: str) -> Cell:
        """A cell with the contexts of one length under the plain checkpoint. Its scores fill the rows of a control at
        these lengths.
        """
        cell = self.cells(reach)[0]
        control = {"scheme": {"name": PLAIN, line: self.training_length}}
        rows = [{**cell.rows[0], **control, "length": length} for length in lengths]
        return Cell(rows, cell.items, same_as={"length": reach, "scheme": {"name": PLAIN}})

    def size(self, item: Context) -> int:
        return item.length

    def score(self, model: nn.Module, item: Context) -> torch.Tensor:
        """Compute -ln p of the scored positions, `(scored,)`."""
        tokens = item.tokens.to(find_language_model(model).device)
        losses = chunked_nll(model, tokens[None, :-1], tokens[None, item.start + 1 :])[0]
        return losses[: item.stop - item.start].double().cpu()

    def row(self, fields: dict[str, Any], items: Sequence[Context], scores: Sequence[torch.Tensor]) -> dict[str, Any]:
        """The NLL of a row, and the NLL of each of its documents, from the losses of each context, `(scored,)`."""
        nll = self.mean(scores)
        return {
            "windows": len(items),
            "scored_tokens": sum(losses.numel() for losses in scores),
            "nll": nll,
            "perplexity": math.inf if nll > 700 else math.exp(nll),
            "nll_by_document": [round(self.mean(block), 6) for block in blocks(items, scores)],
        }


def blocks(contexts: Sequence[Context], scored: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
    """Group the losses, `(scored,)` for each context, by document. With few documents, group them by window, or in
    blocks of windows.
    """
    by_document: dict[str, list[torch.Tensor]] = {}
    for context, losses in zip(contexts, scored, strict=True):
        by_document.setdefault(context.document, []).append(losses)
    if len(by_document) >= FEW:
        return list(by_document.values())
    count, total = min(BLOCKS, len(scored)), len(scored)
    return [scored[i * total // count : (i + 1) * total // count] for i in range(count)]
