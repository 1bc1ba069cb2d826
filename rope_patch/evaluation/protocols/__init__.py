"""The protocols by name, and what may be asked of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from transformers import PreTrainedModel

from rope_patch.errors import EvaluationError, did_you_mean
from rope_patch.evaluation.description import check_lengths, is_count
from rope_patch.evaluation.protocols.base import Cell, Context, Protocol, Request, check_targets
from rope_patch.evaluation.protocols.last import ByPosition, Last, SpanCorruption
from rope_patch.evaluation.protocols.whole import Disjoint, Sliding, YarnCompat, YarnTruncate

__all__ = ["PROTOCOLS", "Cell", "Context", "Protocol", "ProtocolName", "Request", "check_request", "protocol_for"]

ProtocolName = Literal[
    "auto", "last", "by_position", "span_corruption", "sliding", "disjoint", "yarn_compat", "yarn_truncate"
]
"""`auto` is what a model calls for: `span_corruption` where it has an encoder and a decoder, else `last`."""

PROTOCOLS: dict[str, type[Protocol[Any]]] = {
    kind.name: kind for kind in (Last, ByPosition, SpanCorruption, Sliding, Disjoint, YarnCompat, YarnTruncate)
}


def check_request(protocol: str, lengths: Sequence[int], targets: int | None = None, **settings: int | None) -> Request:
    """What can be known to be wrong before a model is there.

    Args:
        protocol, lengths, targets: see `Request`.
        **settings: its other fields.

    Returns:
        the request, for `protocol_for`.

    Raises:
        EvaluationError: lengths, protocol or one of its settings are not allowed; the message says what is.
    """
    request = Request(lengths, protocol, targets, **settings)  # type: ignore[arg-type]  # its types are checked here
    check_lengths(lengths)
    if protocol not in get_args(ProtocolName):
        raise EvaluationError(f"protocol {protocol!r}: {did_you_mean(str(protocol), get_args(ProtocolName))}")
    kind = PROTOCOLS.get(protocol, Last)  # what `auto` may become takes the same settings
    for name in ("targets", "windows_per_document", "stride", "tokens_per_document"):
        value = getattr(request, name)
        if value == Request.__dataclass_fields__[name].default:
            continue
        if name not in kind.settings:
            raise EvaluationError(f"{name}={value}: protocol {protocol!r} scores {kind.scores}, leave {name} out")
        if not is_count(value):
            raise EvaluationError(f"{name}={value!r} is not allowed; a whole number of at least 1 is")
    if targets is not None:
        check_targets(targets, lengths)
    return request


def protocol_for(
    language_model: PreTrainedModel, request: Request, tokenizer: Any, training_length: int
) -> Protocol[Any]:
    """The protocol that is asked for, or what `auto` means for a model.

    Args:
        language_model: the model that is scored.
        request: what is asked for.
        tokenizer: of the checkpoint.
        training_length: L in tokens.

    Raises:
        EvaluationError: it is not for this model, or its settings are not for its tokenizer or training length.
    """
    two_parts = language_model.config.is_encoder_decoder
    automatic: type[Protocol[Any]] = SpanCorruption if two_parts else Last
    kind = PROTOCOLS.get(request.protocol, automatic)
    if kind.two_parts != two_parts:
        parts = "an encoder with a decoder" if two_parts else "a decoder alone"
        raise EvaluationError(f"protocol {kind.name!r} is not for {type(language_model).__name__}, which is {parts}")
    return kind(request, tokenizer, training_length)
