"""Perplexity against context length: does the model predict the same tokens better when it sees more?

nll = sum of -ln p(target) / number of targets, perplexity = exp(nll). The protocols define the targets, their contexts
and the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rope_patch.errors import EvaluationError, did_you_mean
from rope_patch.evaluation.measured_model import MeasuredModel
from rope_patch.evaluation.protocols.chosen import Far
from rope_patch.evaluation.protocols.last import ByPosition, Last, SpanCorruption, check_targets
from rope_patch.evaluation.protocols.long_ppl import LongPPL
from rope_patch.evaluation.protocols.protocol import Protocol, Settings
from rope_patch.evaluation.protocols.repeat import Repeat
from rope_patch.evaluation.protocols.whole_documents import Disjoint, Sliding, YarnCompat, YarnTruncate
from rope_patch.evaluation.scheme_specs import check_lengths
from rope_patch.evaluation.tasks.task import Task

PROTOCOLS: dict[str, type[Protocol]] = {
    kind.protocol: kind
    for kind in (Last, Far, LongPPL, Repeat, ByPosition, SpanCorruption, Sliding, Disjoint, YarnCompat, YarnTruncate)
}


@dataclass(frozen=True)
class Perplexity(Settings, Task):
    """The perplexity of texts, as a task whose protocol is chosen by its settings."""

    def check(self, lengths: Sequence[int]) -> None:
        """Check the settings, without a model, tokenizer or corpus.

        Raises:
            EvaluationError: the lengths, the protocol or one of its settings are not allowed; the message names the
                allowed values.
        """
        check_lengths(lengths)
        if self.protocol not in ("auto", *PROTOCOLS):
            raise EvaluationError(f"protocol {self.protocol!r}: {did_you_mean(self.protocol, ['auto', *PROTOCOLS])}")
        kind = PROTOCOLS.get(self.protocol, Last)  # all choices of `auto` accept the same settings
        for name in ("targets", "windows_per_document", "stride", "tokens_per_document", "short_context", "documents"):
            value = getattr(self, name)
            if value is None:
                continue
            if name not in kind.settings | {"documents"}:
                raise EvaluationError(f"{name}={value}: protocol {self.protocol!r} scores {kind.scores}; omit {name}")
            if not isinstance(value, int) or value < 1:
                raise EvaluationError(f"{name}={value!r} is not allowed; it must be a whole number of at least 1")
        if (self.evaluator is None) == (kind is LongPPL):
            raise EvaluationError(
                f"evaluator={self.evaluator}: protocol 'longppl' needs the folder of a checkpoint that reads the text "
                "within its training length, and no other protocol has one"
            )
        if self.targets is not None and kind is not Repeat:
            check_targets(self.targets, lengths)

    def references(self, wanted: bool = True) -> Sequence[str]:
        """The reference lines in a table of this protocol; if not `wanted`, only the lines that the table requires."""
        kind = PROTOCOLS.get(self.protocol, Last)
        return kind.references if wanted else kind.needed

    def resolve(self, model: MeasuredModel, lengths: Sequence[int]) -> Protocol:
        """Build the requested protocol, or the choice of `auto`, with the windows that all lengths and schemes share.

        Raises:
            EvaluationError: the protocol does not fit this model, or its settings do not fit the lengths or the
                tokenizer.
        """
        self.check(lengths)
        two_parts = model.language_model.config.is_encoder_decoder
        kind = PROTOCOLS.get(self.protocol, SpanCorruption if two_parts else Last)
        if kind.two_parts != two_parts:
            parts = "an encoder with a decoder" if two_parts else "a decoder alone"
            name = type(model.language_model).__name__
            raise EvaluationError(f"protocol {kind.protocol!r} is not for {name}, which is {parts}")
        return kind(self, lengths, model.training_length)
