# ruff: noqa: D102  # the methods of a protocol are documented once, on Protocol
"""Perplexity against context length: does the model predict the same tokens better when it sees more?

nll = sum of -ln p(target) / number of targets, perplexity = exp(nll). The protocols define the targets, their contexts
and the mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import nn

from rope_patch.data.hidden_spans import Span, corrupt, draw_spans, sentinels_of
from rope_patch.data.windows import Selection, Window, prefix_of, select, spread
from rope_patch.errors import EvaluationError, did_you_mean
from rope_patch.evaluation.measured_model import MeasuredModel
from rope_patch.evaluation.nll import chunked_nll
from rope_patch.evaluation.scheme_specs import check_lengths
from rope_patch.evaluation.standard_errors import FEW
from rope_patch.evaluation.tasks.task import Cell, Task
from rope_patch.models.head import find_language_model

DEFAULT_TARGETS = 4096  # T, or the training length if that is lower
DEFAULT_STRIDE = 256  # S of PI and of YaRN, or the shortest length if that is lower
BLOCKS = 32  # maximum number of blocks of windows, for standard errors over few documents


@dataclass(frozen=True)
class Perplexity(Task):
    """The perplexity of texts.

    Args:
        tokenizer: None where the corpus has tokens, which no start-of-text token is then set in front of.
        corpus: rows with `name` and `text`, such as `load_corpus()` gives, or `input_ids` in place of `text`.
        protocol: one of `PROTOCOLS`; `"auto"` chooses `"last"` or `"span_corruption"` for the model.
        targets: T, scored tokens per window, or the tokens among which spans are hidden; default min(L, 4096).
        stride: S of `sliding` and `yarn_compat`; default 256, or the shortest length.
        tokens_per_document: for protocols that score whole documents: the number of tokens to read; default all.
        documents: number of documents, drawn at random if there are more; default all.
        windows_per_document: for protocols that score windows: maximum number per document; default one, or with few
            documents as many as make 16 windows in total.
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
    seed: int = 0
    text: str = ""

    def check(self, lengths: Sequence[int]) -> None:
        """Check the settings, without a model, tokenizer or corpus.

        Raises:
            EvaluationError: lengths, protocol or one of its settings are not allowed; the message names what is.
        """
        check_lengths(lengths)
        if self.protocol not in ("auto", *PROTOCOLS):
            raise EvaluationError(f"protocol {self.protocol!r}: {did_you_mean(self.protocol, ['auto', *PROTOCOLS])}")
        kind = PROTOCOLS.get(self.protocol, Last)  # all choices of `auto` accept the same settings
        for name in ("targets", "windows_per_document", "stride", "tokens_per_document", "documents"):
            value = getattr(self, name)
            if value is None:
                continue
            if name not in kind.settings | {"documents"}:
                raise EvaluationError(f"{name}={value}: protocol {self.protocol!r} scores {kind.scores}; omit {name}")
            if not isinstance(value, int) or value < 1:
                raise EvaluationError(f"{name}={value!r} is not allowed; it must be a whole number of at least 1")
        if self.targets is not None:
            _check_targets(self.targets, lengths)

    def resolve(self, model: MeasuredModel, lengths: Sequence[int]) -> Protocol:
        """The requested protocol, or the choice of `auto`, with the windows that all lengths and schemes share.

        Raises:
            EvaluationError: it does not fit this model, or its settings do not fit the lengths or the tokenizer.
        """
        self.check(lengths)
        two_parts = model.language_model.config.is_encoder_decoder
        kind = PROTOCOLS.get(self.protocol, SpanCorruption if two_parts else Last)
        if kind.two_parts != two_parts:
            parts = "an encoder with a decoder" if two_parts else "a decoder alone"
            name = type(model.language_model).__name__
            raise EvaluationError(f"protocol {kind.protocol!r} is not for {name}, which is {parts}")
        return kind(self, lengths, model.training_length)


@dataclass(frozen=True)
class Context:
    """The input of one forward pass, `(tokens,)`, and its scored predictions: those at positions start < p <= stop.

    The first p tokens predict position p. The last token is never read. `window` is the number of its window.
    """

    window: int
    document: str
    tokens: torch.Tensor
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of inputs."""
        return len(self.tokens) - 1


class Protocol(Task):
    """One way to score a text: which predictions in which contexts, and their mean."""

    name = "perplexity"
    protocol: ClassVar[str]
    settings: ClassVar[frozenset[str]]  # fields of `Perplexity` that only some protocols accept, including this one
    scores: ClassVar[str]  # for an error message
    sentence: ClassVar[str]  # for the notes below a table
    two_parts: ClassVar[bool] = False  # for encoder-decoder models; otherwise for decoders
    shared_targets: ClassVar[str | None] = None  # the name of `Row.targets` if all rows of a table must share it

    def __init__(self, asked: Perplexity, lengths: Sequence[int], training_length: int) -> None:
        self.asked, self.lengths = asked, lengths
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
        return select(asked.corpus, asked.tokenizer, self.prefix, self.lengths[-1], self.places, **drawn)

    def contexts(self, window: Window, length: int) -> Iterable[tuple[torch.Tensor, int, int]]:
        """Tokens, `(tokens,)`, start and stop of the contexts of one window, or of one document, at one length."""
        raise NotImplementedError

    def targets_at(self, length: int) -> int:
        """`Row.targets` at one length."""
        raise NotImplementedError

    def bins(self, length: int) -> Sequence[tuple[int, int]]:
        """Length and targets of each row that a pass at one length fills."""
        return [(length, self.targets_at(length))]

    def scored(self, losses: Sequence[torch.Tensor], length: int, targets: int) -> Sequence[torch.Tensor]:
        """The losses of one row from those of a pass, `(scored,)` for each context."""
        return losses

    def mean(self, losses: Sequence[torch.Tensor]) -> float:
        """NLL of a row, weighted by token; losses `(scored,)` of each context."""
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
        }
        contexts = [
            Context(number, window.document, *context)
            for number, window in enumerate(chosen.windows)
            for context in self.contexts(window, length)
        ]
        return [Cell([{**facts, "length": at, "targets": targets} for at, targets in self.bins(length)], contexts)]

    def size(self, item: Context) -> int:
        return item.length

    def score(self, model: nn.Module, item: Context) -> torch.Tensor:
        """-ln p of the scored positions, `(scored,)`."""
        tokens = item.tokens.to(find_language_model(model).device)
        losses = chunked_nll(model, tokens[None, :-1], tokens[None, item.start + 1 :])[0]
        return losses[: item.stop - item.start].double().cpu()

    def row(self, fields: dict[str, Any], items: Sequence[Context], scores: Sequence[torch.Tensor]) -> dict[str, Any]:
        """NLL of a row, and those of its documents, from the losses of each context, `(scored,)`."""
        scored = self.scored(scores, fields["length"], fields["targets"])
        nll = self.mean(scored)
        return {
            "windows": len(items),
            "scored_tokens": sum(losses.numel() for losses in scored),
            "nll": nll,
            "perplexity": math.inf if nll > 700 else math.exp(nll),
            "nll_by_document": [round(self.mean(block), 6) for block in _blocks(items, scored)],
        }


def _blocks(contexts: Sequence[Context], scored: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
    """The losses of each document; with few documents those of their windows, or of blocks of many windows."""
    by_document: dict[str, list[torch.Tensor]] = {}
    for context, losses in zip(contexts, scored, strict=True):
        by_document.setdefault(context.document, []).append(losses)
    if len(by_document) >= FEW:
        return list(by_document.values())
    count, total = min(BLOCKS, len(scored)), len(scored)
    return [scored[i * total // count : (i + 1) * total // count] for i in range(count)]


class Last(Protocol):
    """The last T tokens of every window, in contexts of each length that end at the same token.

    scored at length l: l - T < p <= l; all contexts of a window have the same end.

    Source: kexue.fm/archives/9708 (last 4096 tokens).
    """

    protocol = "last"
    settings = frozenset({"targets", "windows_per_document"})
    scores = "the last tokens of windows"
    sentence = "NLL of the same last {targets} tokens of {windows}"
    shared_targets: ClassVar[str | None] = "targets"

    def __init__(self, asked: Perplexity, lengths: Sequence[int], training_length: int) -> None:
        super().__init__(asked, lengths, training_length)
        self.targets = min(training_length, DEFAULT_TARGETS) if asked.targets is None else asked.targets
        _check_targets(self.targets, lengths)

    def places(self, counts: Sequence[int]) -> Sequence[Sequence[tuple[int, int]]]:
        needed = self.lengths[-1] + 1 - len(self.prefix)
        return spread(counts, needed, self.targets, self.asked.windows_per_document)

    def contexts(self, window: Window, length: int) -> Iterable[tuple[torch.Tensor, int, int]]:
        return [(window.context(length), length - self.targets, length)]

    def targets_at(self, length: int) -> int:
        return self.targets


def _check_targets(targets: int, lengths: Sequence[int]) -> None:
    if targets > lengths[0]:
        raise EvaluationError(
            f"targets={targets} is more than the shortest length of {lengths[0]} tokens: every length must score the "
            f"same targets, so use at most {lengths[0]} targets or a longer shortest length"
        )


class ByPosition(Last):
    """One pass at the longest length; a length is the bin of positions from the previous length."""

    protocol = "by_position"
    settings = frozenset({"windows_per_document"})
    scores = "every token"
    sentence = "NLL by position in one pass over {windows}"
    one_pass = True
    shared_targets = None

    def __init__(self, asked: Perplexity, lengths: Sequence[int], training_length: int) -> None:
        Protocol.__init__(self, asked, lengths, training_length)
        self.targets = lengths[-1]

    def passes(self, lengths: Sequence[int]) -> Sequence[int]:
        return lengths[-1:]

    def bins(self, length: int) -> Sequence[tuple[int, int]]:
        return [(stop, stop - start) for start, stop in pairwise([0, *self.lengths])]

    def scored(self, losses: Sequence[torch.Tensor], length: int, targets: int) -> Sequence[torch.Tensor]:
        return [nll[length - targets : length] for nll in losses]


class SpanCorruption(Last):
    """Spans among the last T tokens are hidden; encoders read contexts of each length, decoders predict the spans.

    The same spans of a window are hidden at every length.

    Raises:
        EvaluationError: T is too small for a span, or needs more sentinels than the tokenizer has.
    """

    protocol = "span_corruption"
    scores = "hidden spans of windows"
    sentence = "NLL of the same hidden spans of the last {targets} tokens of {windows}"
    two_parts = True

    def __init__(self, asked: Perplexity, lengths: Sequence[int], training_length: int) -> None:
        super().__init__(asked, lengths, training_length)
        self.sentinels, spans = sentinels_of(asked.tokenizer), len(self.spans(0))
        if spans + 1 > len(self.sentinels):
            raise EvaluationError(
                f"targets={self.targets} hides {spans} spans, which needs {spans + 1} sentinels; "
                f"{type(asked.tokenizer).__name__} has {len(self.sentinels)}"
            )

    @cached_property
    def selection(self) -> Selection:
        chosen = super().selection
        return replace(chosen, fingerprint=f"{chosen.fingerprint}-{self.asked.seed}")  # the seed also draws the spans

    def spans(self, window: int) -> list[Span]:
        """The spans of the window with this number, counted from the first target."""
        return draw_spans(self.targets, torch.Generator().manual_seed(self.asked.seed * 1_000_003 + window))

    @torch.no_grad()
    def score(self, model: nn.Module, item: Context) -> torch.Tensor:
        """-ln p of every hidden token, given the rest of the context and the hidden tokens before it, `(hidden,)`."""
        tokens, device = item.tokens[1:], find_language_model(model).device
        offset = len(tokens) - self.targets
        spans = [(offset + start, offset + stop) for start, stop in self.spans(item.window)]
        parts = corrupt(tokens, spans, self.sentinels, self.asked.tokenizer.eos_token_id)
        source, target, hidden = (part.to(device) for part in parts)
        logits = model(input_ids=source[None], labels=target[None]).logits[0]
        losses = nn.functional.cross_entropy(logits[hidden].float(), target[hidden], reduction="none")
        return losses.double().cpu()


class Sliding(Protocol):
    """Windows of l tokens with stride S: the first scores all its tokens, later ones only the new ones.

    window k reads x[kS], ..., x[e - 1], e = min(kS + l, n - 1), of a document x[0], ..., x[n - 1], and scores x[p] for
    p <= e that no window before it scored; nll = sum over all tokens / number of tokens.

    Every target except those of the first window sees at least l - S tokens. The tokenizer's prefix precedes the
    document, and replaces x[kS] at the start of every later window.

    Source: Chen et al., 2306.15595 (PI), who follow Press et al.; their stride of 256 is also the default of YaRN's
    script. PI's treatment of document ends is unknown to us.
    """

    protocol = "sliding"
    settings = frozenset({"stride", "tokens_per_document"})
    scores = "whole documents"
    sentence = "NLL of all tokens of the documents in windows that slide by {targets} tokens"
    shared_targets: ClassVar[str | None] = "stride"

    def __init__(self, asked: Perplexity, lengths: Sequence[int], training_length: int) -> None:
        super().__init__(asked, lengths, training_length)
        shortest, longest = self.width(lengths[0]), lengths[-1]
        self.stride = min(DEFAULT_STRIDE, shortest) if asked.stride is None else asked.stride
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

    def width(self, length: int) -> int:
        """Tokens in a window of this length, which is also the largest possible stride."""
        return length

    def targets_at(self, length: int) -> int:
        return self.stride

    def contexts(self, window: Window, length: int) -> Iterable[tuple[torch.Tensor, int, int]]:
        front, text = len(self.prefix), window.tokens
        for begin, end, new in slide(front + len(text) - 1, self.width(length), self.targets_at(length)):
            inputs = end - begin
            yield torch.cat([self.prefix, text[begin : end + 1 - front]]), inputs - new, inputs


class Disjoint(Sliding):
    """Adjacent windows of l tokens: the stride is l. A shorter last window is scored, too.

    Source: Press et al., 2108.12409 (ALiBi), nonoverlapping inference. In the rolling windows of lm-evaluation-harness
    (0.4.13) only the first has a prefix, and the last one is filled with earlier tokens.
    """

    protocol = "disjoint"
    settings = frozenset({"tokens_per_document"})
    sentence = "NLL of all tokens of the documents in windows that do not overlap"
    shared_targets = None

    def targets_at(self, length: int) -> int:
        return length


class YarnCompat(Sliding):
    """The number of YaRN's script without `--truncate`: the mean over windows of each window's mean, unweighted.

    nll = sum over windows of (mean over the new tokens of the window) / number of windows. The last window of a
    document may have a single new token, but weighs as much as any other, so this is not a mean over tokens.

    From `eval/perplexity.py` of github.com/jquesnelle/yarn at commit b1d7076: a start-of-text token, if the tokenizer
    has one, leads every window and counts in l. Windows begin every S tokens until one reaches the end. Labels are -100
    except on the last `end - previous end` tokens, and the shifted loss is the mean of a window. So a window of l
    inputs scores at most l - 1 tokens, and without a start token never its first one.

    Two details are ours: sums are float64 instead of the dtype of the loss, and without a start token a window with
    only its first token new (possible if S = l) is skipped; the script's mean becomes NaN there.
    """

    protocol = "yarn_compat"
    sentence = "mean NLL of {targets} new tokens per window, windows unweighted, as YaRN's script without --truncate"

    def __init__(self, asked: Perplexity, lengths: Sequence[int], training_length: int) -> None:
        if lengths[0] < 2:
            raise EvaluationError(f"lengths {lengths[0]}: protocol {self.protocol!r} needs at least 2 tokens")
        super().__init__(asked, lengths, training_length)

    def prefix_of(self, tokenizer: Any) -> torch.Tensor:
        start = tokenizer.bos_token_id
        return torch.tensor([] if start is None else [start], dtype=torch.long)

    def width(self, length: int) -> int:
        return length - len(self.prefix)

    def stride_at(self, length: int) -> int:
        """S for windows of one length."""
        return self.stride

    def contexts(self, window: Window, length: int) -> Iterable[tuple[torch.Tensor, int, int]]:
        text = window.tokens
        padded = torch.cat([text, text[-1:]])  # a token after the last input, which the shifted loss never reads
        for begin, end, new in slide(len(text), self.width(length), self.stride_at(length)):
            labelled = len(self.prefix) + end - begin - 1
            start = max(0, labelled - new)
            if labelled > start:
                yield torch.cat([self.prefix, padded[begin : end + 1]]), start, labelled

    def mean(self, losses: Sequence[torch.Tensor]) -> float:
        return torch.stack([nll.mean() for nll in losses]).mean().item()


class YarnTruncate(YarnCompat):
    """The number of YaRN's script with `--truncate`: the first l tokens of every document, in one window.

    The stride is ignored. Every length scores other tokens, so a falling curve alone means little. The published
    figures use this protocol (`eval.sh` of the same repository: Proof-pile, ten documents of at least 131072 tokens).
    """

    protocol = "yarn_truncate"
    settings = frozenset()
    sentence = "mean NLL of the first tokens of the documents, other tokens at every length, as YaRN's --truncate"
    shared_targets = None

    def stride_at(self, length: int) -> int:
        return self.width(length)

    def targets_at(self, length: int) -> int:
        return length - 1

    def contexts(self, window: Window, length: int) -> Iterable[tuple[torch.Tensor, int, int]]:
        return super().contexts(replace(window, tokens=window.tokens[: self.width(length)]), length)


PROTOCOLS: dict[str, type[Protocol]] = {
    kind.protocol: kind for kind in (Last, ByPosition, SpanCorruption, Sliding, Disjoint, YarnCompat, YarnTruncate)
}


def slide(count: int, width: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Start and end of windows of `width` tokens with a stride, and the number of new tokens in each."""
    seen = 0
    for begin in range(0, count, stride):
        end = min(begin + width, count)
        yield begin, end, end - seen
        if end == count:
            return
        seen = end
