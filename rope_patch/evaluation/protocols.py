# ruff: noqa: D102  # the methods of a protocol are documented once, on Protocol
"""The protocols: which predictions in which contexts are scored, and how they are averaged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from rope_patch.data.windows import Selection, Window, prefix_of, select, spread
from rope_patch.errors import EvaluationError, did_you_mean
from rope_patch.evaluation.hidden_spans import HiddenSpans
from rope_patch.evaluation.lines import check_lengths

DEFAULT_TARGETS = 4096  # T, or the training length if that is lower
DEFAULT_STRIDE = 256  # S of PI and of YaRN, or the shortest length if that is lower

Corpus = Iterable[Mapping[str, Any]]


@dataclass(frozen=True)
class Request:
    """The request to a protocol: the arguments of `rope_patch.evaluation.perplexity.measure`."""

    lengths: Sequence[int]
    protocol: str = "auto"
    targets: int | None = None
    stride: int | None = None
    tokens_per_document: int | None = None
    documents: int | None = None
    windows_per_document: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Context:
    """The input of one forward pass, and its scored predictions: those at positions start < p <= stop.

    The first p tokens of prefix and text, each `(tokens,)`, predict position p. The last token is never read.
    """

    document: str
    prefix: torch.Tensor
    text: torch.Tensor
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of inputs."""
        return len(self.prefix) + len(self.text) - 1


class Protocol:
    """One way to score a text."""

    name: ClassVar[str]
    settings: ClassVar[frozenset[str]]  # fields of a `Request` that only some protocols accept, including this one
    scores: ClassVar[str]  # for an error message
    sentence: ClassVar[str]  # for the notes below a table
    two_parts: ClassVar[bool] = False  # for encoder-decoder models; otherwise for decoders
    one_pass: ClassVar[bool] = False  # one pass at the longest length fills all rows: no length-dependent schemes
    shared_targets: ClassVar[str | None] = None  # the name of `Row.targets` if all rows of a table must share it
    hidden: HiddenSpans | None = None  # spans hidden from an encoder

    def __init__(self, request: Request, tokenizer: Any, training_length: int) -> None:
        self.request, self.prefix = request, self.prefix_of(tokenizer)

    def prefix_of(self, tokenizer: Any) -> torch.Tensor:
        """The tokens in front of every context, `(tokens,)`."""
        return prefix_of(tokenizer)

    def places(self, counts: Sequence[int]) -> Sequence[Sequence[tuple[int, int]]]:
        """Start and end of the windows in documents with these token counts."""
        return [[(0, count)] for count in counts]

    def select(self, corpus: Corpus, tokenizer: Any) -> Selection:
        """Choose the scored windows once, for all lengths and schemes."""
        asked = self.request
        drawn: dict[str, Any] = {"documents": asked.documents, "limit": asked.tokens_per_document, "seed": asked.seed}
        return select(corpus, tokenizer, self.prefix, asked.lengths[-1], self.places, **drawn)

    def contexts(self, window: Window, length: int) -> Iterable[Context]:
        """The contexts of one window, or of one document, at one length."""
        raise NotImplementedError

    def targets_at(self, length: int) -> int:
        """`Row.targets` at one length."""
        raise NotImplementedError

    def cells(self) -> dict[int, list[tuple[int, int]]]:
        """The lengths at which passes run, with the length and the targets of each row that a pass fills."""
        return {length: [(length, self.targets_at(length))] for length in self.request.lengths}

    def scored(self, losses: Sequence[torch.Tensor], length: int, targets: int) -> list[torch.Tensor]:
        """The losses of one row from those of a pass, `(scored,)` for each context."""
        return list(losses)

    def mean(self, losses: Sequence[torch.Tensor]) -> float:
        """NLL of a row, weighted by token; losses `(scored,)` of each context."""
        return torch.cat(list(losses)).mean().item()


class Last(Protocol):
    """The last T tokens of every window, in contexts of each length that end at the same token.

    scored at length l: l - T < p <= l; all contexts of a window have the same end.

    Source: kexue.fm/archives/9708 (last 4096 tokens).
    """

    name = "last"
    settings = frozenset({"targets", "windows_per_document"})
    scores = "the last tokens of windows"
    sentence = "NLL of the same last {targets} tokens of {windows}"
    shared_targets: ClassVar[str | None] = "targets"

    def __init__(self, request: Request, tokenizer: Any, training_length: int) -> None:
        super().__init__(request, tokenizer, training_length)
        self.targets = min(training_length, DEFAULT_TARGETS) if request.targets is None else request.targets
        _check_targets(self.targets, request.lengths)

    def places(self, counts: Sequence[int]) -> Sequence[Sequence[tuple[int, int]]]:
        needed = self.request.lengths[-1] + 1 - len(self.prefix)
        return spread(counts, needed, self.targets, self.request.windows_per_document)

    def contexts(self, window: Window, length: int) -> Iterable[Context]:
        text = window.tokens[len(window.tokens) - (length + 1 - len(window.prefix)) :]
        return [Context(window.document, window.prefix, text, length - self.targets, length)]

    def targets_at(self, length: int) -> int:
        return self.targets


class ByPosition(Last):
    """One pass at the longest length; a length is the bin of positions from the previous length."""

    name = "by_position"
    settings = frozenset({"windows_per_document"})
    scores = "every token"
    sentence = "NLL by position in one pass over {windows}"
    one_pass = True
    shared_targets = None

    def __init__(self, request: Request, tokenizer: Any, training_length: int) -> None:
        Protocol.__init__(self, request, tokenizer, training_length)
        self.targets = request.lengths[-1]

    def cells(self) -> dict[int, list[tuple[int, int]]]:
        return {self.targets: [(stop, stop - start) for start, stop in pairwise([0, *self.request.lengths])]}

    def scored(self, losses: Sequence[torch.Tensor], length: int, targets: int) -> list[torch.Tensor]:
        return [nll[length - targets : length] for nll in losses]


class SpanCorruption(Last):
    """Spans among the last T tokens are hidden; encoders read contexts of each length, decoders predict the spans."""

    name = "span_corruption"
    scores = "hidden spans of windows"
    sentence = "NLL of the same hidden spans of the last {targets} tokens of {windows}"
    two_parts = True

    def __init__(self, request: Request, tokenizer: Any, training_length: int) -> None:
        super().__init__(request, tokenizer, training_length)
        self.hidden = HiddenSpans(tokenizer, self.targets, request.seed)

    def select(self, corpus: Corpus, tokenizer: Any) -> Selection:
        chosen = super().select(corpus, tokenizer)
        return replace(chosen, fingerprint=f"{chosen.fingerprint}-{self.request.seed}")  # the seed also draws the spans


class Sliding(Protocol):
    """Windows of l tokens with stride S: the first scores all its tokens, later ones only the new ones.

    window k reads x[kS], ..., x[e - 1], e = min(kS + l, n - 1), of a document x[0], ..., x[n - 1], and scores x[p] for
    p <= e that no window before it scored; nll = sum over all tokens / number of tokens.

    Every target except those of the first window sees at least l - S tokens. The tokenizer's prefix precedes the
    document, and replaces x[kS] at the start of every later window.

    Source: Chen et al., 2306.15595 (PI), who follow Press et al.; their stride of 256 is also the default of YaRN's
    script. PI's treatment of document ends is unknown to us.
    """

    name = "sliding"
    settings = frozenset({"stride", "tokens_per_document"})
    scores = "whole documents"
    sentence = "NLL of all tokens of the documents in windows that slide by {targets} tokens"
    shared_targets: ClassVar[str | None] = "stride"

    def __init__(self, request: Request, tokenizer: Any, training_length: int) -> None:
        super().__init__(request, tokenizer, training_length)
        shortest, longest = self.width(request.lengths[0]), request.lengths[-1]
        self.stride = min(DEFAULT_STRIDE, shortest) if request.stride is None else request.stride
        if not 1 <= self.stride <= shortest:
            raise EvaluationError(
                f"stride={self.stride} is not allowed with a shortest length of {request.lengths[0]} tokens: it must "
                f"be from 1 to {shortest}, or tokens between two windows would never be scored"
            )
        needed, limit = longest + 1 - len(self.prefix), request.tokens_per_document
        if limit is not None and limit < needed:
            raise EvaluationError(
                f"tokens_per_document={limit} is not allowed: a context of {longest} tokens needs documents of {needed}"
            )

    def width(self, length: int) -> int:
        """Tokens in a window of this length, which is also the largest possible stride."""
        return length

    def stride_at(self, length: int) -> int:
        """S for windows of one length."""
        return self.stride

    def targets_at(self, length: int) -> int:
        return self.stride_at(length)

    def contexts(self, window: Window, length: int) -> Iterable[Context]:
        front, text = len(self.prefix), window.tokens
        for begin, end, new in slide(front + len(text) - 1, self.width(length), self.stride_at(length)):
            inputs = end - begin
            yield Context(window.document, self.prefix, text[begin : end + 1 - front], inputs - new, inputs)


class Disjoint(Sliding):
    """Adjacent windows of l tokens: the stride is l. A shorter last window is scored, too.

    Source: Press et al., 2108.12409 (ALiBi), nonoverlapping inference. In the rolling windows of lm-evaluation-harness
    (0.4.13) only the first has a prefix, and the last one is filled with earlier tokens.
    """

    name = "disjoint"
    settings = frozenset({"tokens_per_document"})
    sentence = "NLL of all tokens of the documents in windows that do not overlap"
    shared_targets = None

    def stride_at(self, length: int) -> int:
        return self.width(length)


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

    name = "yarn_compat"
    sentence = "mean NLL of {targets} new tokens per window, windows unweighted, as YaRN's script without --truncate"

    def __init__(self, request: Request, tokenizer: Any, training_length: int) -> None:
        if request.lengths[0] < 2:
            raise EvaluationError(f"lengths {request.lengths[0]}: protocol {self.name!r} needs at least 2 tokens")
        super().__init__(request, tokenizer, training_length)

    def prefix_of(self, tokenizer: Any) -> torch.Tensor:
        start = tokenizer.bos_token_id
        return torch.tensor([] if start is None else [start], dtype=torch.long)

    def width(self, length: int) -> int:
        return length - len(self.prefix)

    def contexts(self, window: Window, length: int) -> Iterable[Context]:
        text = window.tokens
        padded = torch.cat([text, text[-1:]])  # a token after the last input, which the shifted loss never reads
        for begin, end, new in slide(len(text), self.width(length), self.stride_at(length)):
            labelled = len(self.prefix) + end - begin - 1
            start = max(0, labelled - new)
            if labelled > start:
                yield Context(window.document, self.prefix, padded[begin : end + 1], start, labelled)

    def mean(self, losses: Sequence[torch.Tensor]) -> float:
        return torch.stack([nll.mean() for nll in losses]).mean().item()


class YarnTruncate(YarnCompat):
    """The number of YaRN's script with `--truncate`: the first l tokens of every document, in one window.

    The stride is ignored. Every length scores other tokens, so a falling curve alone means little. The published
    figures use this protocol (`eval.sh` of the same repository: Proof-pile, ten documents of at least 131072 tokens).
    """

    name = "yarn_truncate"
    settings = frozenset()
    sentence = "mean NLL of the first tokens of the documents, other tokens at every length, as YaRN's --truncate"
    shared_targets = None

    def stride_at(self, length: int) -> int:
        return self.width(length)

    def targets_at(self, length: int) -> int:
        return length - 1

    def contexts(self, window: Window, length: int) -> Iterable[Context]:
        return super().contexts(replace(window, tokens=window.tokens[: self.width(length)]), length)


PROTOCOLS: dict[str, type[Protocol]] = {
    kind.name: kind for kind in (Last, ByPosition, SpanCorruption, Sliding, Disjoint, YarnCompat, YarnTruncate)
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


def check_request(protocol: str, lengths: Sequence[int], targets: int | None = None, **settings: Any) -> Request:
    """Check a request before a model is loaded; arguments as for `measure`.

    Raises:
        EvaluationError: lengths, protocol or one of its settings are not allowed; the message names what is.
    """
    request = Request(lengths, protocol, targets, **settings)
    check_lengths(lengths)
    if protocol not in ("auto", *PROTOCOLS):
        raise EvaluationError(f"protocol {protocol!r}: {did_you_mean(str(protocol), ['auto', *PROTOCOLS])}")
    kind = PROTOCOLS.get(protocol, Last)  # all choices of `auto` accept the same settings
    for name in ("targets", "windows_per_document", "stride", "tokens_per_document", "documents"):
        value = getattr(request, name)
        if value is None:
            continue
        if name not in kind.settings | {"documents"}:
            raise EvaluationError(f"{name}={value}: protocol {protocol!r} scores {kind.scores}; omit {name}")
        if not isinstance(value, int) or value < 1:
            raise EvaluationError(f"{name}={value!r} is not allowed; it must be a whole number of at least 1")
    if targets is not None:
        _check_targets(targets, lengths)
    return request


def _check_targets(targets: int, lengths: Sequence[int]) -> None:
    if targets > lengths[0]:
        raise EvaluationError(
            f"targets={targets} is more than the shortest length of {lengths[0]} tokens: every length must score the "
            f"same targets, so use at most {lengths[0]} targets or a longer shortest length"
        )


def protocol_for(language_model: PreTrainedModel, request: Request, tokenizer: Any, training_length: int) -> Protocol:
    """The requested protocol, or the choice of `auto` for a model.

    Raises:
        EvaluationError: it does not fit this model, or its settings do not fit the tokenizer or training length.
    """
    two_parts = language_model.config.is_encoder_decoder
    kind = PROTOCOLS.get(request.protocol, SpanCorruption if two_parts else Last)
    if kind.two_parts != two_parts:
        parts = "an encoder with a decoder" if two_parts else "a decoder alone"
        raise EvaluationError(f"protocol {kind.name!r} is not for {type(language_model).__name__}, which is {parts}")
    return kind(request, tokenizer, training_length)
