"""A protocol that scores the tokens that another model predicts only from far back: LongPPL."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from rope_patch.data.special_tokens import bare_ids, tokens_around
from rope_patch.errors import EvaluationError
from rope_patch.evaluation.measured_model import MeasuredModel, weights_fingerprint
from rope_patch.evaluation.nll import chunked_nll
from rope_patch.evaluation.protocols.chosen import Chosen
from rope_patch.evaluation.protocols.protocol import Settings
from rope_patch.models.head import find_language_model
from rope_patch.saving.loading import load_model, load_tokenizer

SHORT, STEP = 4096, 1024  # K and d
GAIN, LIKELY = 2.0, 2.0  # alpha and -beta


class LongPPL(Chosen):
    """Score the tokens that an evaluator, a long-context model within its own L, predicts only from far back.

        LongPPL = exp(mean of -ln p over the tokens whose characters lie in a key span)

    of the last T tokens of every window, T being the shortest length. The evaluator reads the text of the window of the
    longest length, and `key_spans` are its key spans. The only start tokens are those that the evaluator's tokenizer
    adds; the measured model's contexts get none. So a single length that covers the whole text gives the number of the
    package.

    Source: Fang et al., 2410.23771; PyPI `longppl` 0.3.0, `longppl/longppl.py`.

    Raises:
        EvaluationError: the evaluator's L is shorter than a text, the corpus has only tokens, or a tokenizer cannot
            tell which characters a token has.
    """

    protocol = "longppl"
    settings = frozenset({"targets", "windows_per_document", "stride", "evaluator", "short_context"})
    scores = "the last tokens of windows"
    sentence = "NLL of the key tokens of an evaluator among the last {targets} tokens of {windows}"

    def __init__(self, asked: Settings, lengths: Sequence[int], training_length: int) -> None:
        super().__init__(asked, lengths, training_length)
        self.short, self.step = asked.short_context or SHORT, asked.stride or STEP
        model = asked.evaluator
        loaded: Any = (load_model(model), load_tokenizer(model)) if isinstance(model, str) else model
        self.evaluator, self.reader = loaded
        longest = MeasuredModel(self.evaluator).training_length
        for text, _ in self.texts:
            if (count := len(self.reader(text, verbose=False)["input_ids"])) > longest:
                raise EvaluationError(
                    f"the evaluator reads a text of {count} tokens at once, but its training length is {longest}; "
                    "use a longer evaluator or shorter lengths"
                )

    @property
    def chosen_by(self) -> str:
        return f"{super().chosen_by}-{weights_fingerprint(self.evaluator)}-{self.short}-{self.step}"

    def default_targets(self) -> int:
        return self.lengths[0]

    def prefix_of(self, tokenizer: Any) -> torch.Tensor:
        return torch.tensor([], dtype=torch.long)

    @cached_property
    def texts(self) -> list[tuple[str, list[tuple[int, int]]]]:
        """The text of each window, with the first and last character of each of its tokens."""
        texts = []
        for window in self.selection.windows:
            if (text := window.source.get("text")) is None:
                raise EvaluationError(f"protocol 'longppl' needs texts, and {window.document} has tokens alone")
            offsets = offsets_of(self.asked.tokenizer, text, add_special_tokens=False)
            offsets = offsets[window.start : window.start + len(window.tokens)]
            begin = offsets[0][0]
            texts.append((text[begin : offsets[-1][1]], [(start - begin, end - begin) for start, end in offsets]))
        return texts

    def chosen(self, window: int) -> torch.Tensor:
        return self.key_tokens[window]

    @cached_property
    def key_tokens(self) -> list[torch.Tensor]:
        """A boolean `(targets,)` for each window, true for its key tokens."""
        found = []
        for text, offsets in self.texts:
            spans = sorted(key_spans(text, self.evaluator, self.reader, self.short, self.step))
            found.append(torch.tensor([_lies_within(token, spans) for token in offsets[-self.targets :]]))
        return found


@torch.no_grad()
def key_spans(
    text: str, evaluator: nn.Module, tokenizer: Any, short: int = SHORT, step: int = STEP
) -> list[tuple[int, int]]:
    """Find the runs of characters that the evaluator predicts only from far back, as start and end.

    A token at p >= K is key if loss_short - loss_full > 2 and loss_full < 2. loss_full is the loss given the whole text
    before the token. loss_short is the loss given only the part that begins at the last multiple of d up to p - K.

    Args:
        text: the text, which the evaluator reads at once.
        short: K, the minimum number of tokens in a short context.
        step: d, the number of tokens whose short contexts begin at the same place.

    Raises:
        EvaluationError: the tokenizer cannot tell which characters a token has.
    """
    front, device = tokens_around(tokenizer)[0], find_language_model(evaluator).device
    offsets = [(0, 0)] * len(front) + offsets_of(tokenizer, text, add_special_tokens=False)
    tokens = torch.tensor([front + bare_ids(tokenizer, text)], device=device)
    count = tokens.shape[1]
    if count <= short:
        return []
    full = chunked_nll(evaluator, tokens[:, :-1], tokens[:, short:])[0]
    parts = [tokens[:, start : start + short + step] for start in range(0, count - short, step)]
    losses = torch.cat([chunked_nll(evaluator, part[:, :-1], part[:, short:])[0] for part in parts])
    key = ((losses - full > GAIN) & (full < LIKELY)).nonzero()[:, 0] + short
    spans: list[tuple[int, int]] = []
    for start, end in (offsets[place] for place in key.tolist()):
        if spans and spans[-1][1] == start:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
    return spans


def _lies_within(token: tuple[int, int], spans: Sequence[tuple[int, int]]) -> bool:
    """Whether all characters of a token lie in one of the spans, which must ascend."""
    before = bisect(spans, token[0], key=lambda span: span[0]) - 1
    return before >= 0 and token[1] <= spans[before][1]


def offsets_of(tokenizer: Any, text: str, **settings: Any) -> list[tuple[int, int]]:
    """The start and end of each token of a text, in characters.

    Raises:
        EvaluationError: the tokenizer does not know the characters of a token; the fast tokenizers of Transformers do.
    """
    try:
        encoded = tokenizer(text, return_offsets_mapping=True, verbose=False, **settings)
    except NotImplementedError as error:
        name = type(tokenizer).__name__
        raise EvaluationError(
            f"{name} does not know the characters of tokens, which protocol 'longppl' needs"
        ) from error
    return [(start, end) for start, end in encoded["offset_mapping"]]
