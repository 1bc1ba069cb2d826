"""The length that a checkpoint reads under a scheme, and the warning for a scheme that takes length away."""

from __future__ import annotations

import dataclasses
import math

from rope_patch.schemes.base import Scheme
from rope_patch.schemes.compose import Combined
from rope_patch.schemes.slots import Checkpoint
from rope_patch.schemes.target import takes_target


def shortened(scheme: Scheme, checkpoint: Checkpoint) -> str:
    """The warning, without a full stop, that a scheme's frequencies reach less far than the checkpoint's own scaling
    does today. It is empty if the scheme reaches as far or keeps that scaling, or if the checkpoint has none.
    """
    owner, today = scheme.frequency_owner, checkpoint.max_length
    if owner is None or today <= checkpoint.training_length or checkpoint.under(owner).training_length == today:
        return ""
    typed, reach = spelled(owner), reach_of(owner, checkpoint)
    reads = f"this checkpoint already reads {today:,} tokens ({scaling_of(checkpoint)})"
    if reach is None:
        return f"{reads}; {typed} replaces that scaling, and the length that it reaches is not known"
    if reach >= today:
        return ""
    cure = f"Leave {owner.name} out to keep that scaling"
    if takes_target(type(owner)):
        cure = f"For twice today's length: {owner.name}:target={2 * today}"
    return f"{reads}; {typed} reaches {reach:,}. {cure}"


def reach_of(owner: Scheme, checkpoint: Checkpoint) -> float | None:
    """The length in tokens that the frequencies of `owner` reach on a checkpoint: the factor times the original length.
    It is infinite if they follow the text, and None if they define no length.
    """
    if owner.length_dependent and owner.rope_type != "longrope":
        return math.inf
    factor = getattr(owner.resolve(checkpoint), "factor", 1 if owner.rope_type == "default" else None)
    original = getattr(owner, "original_max_position_embeddings", None) or checkpoint.training_length
    return None if factor is None else round(factor * original)


def scaling_of(checkpoint: Checkpoint) -> str:
    """Name a checkpoint's own scaling in a few words, such as `llama3, factor 8`."""
    if checkpoint.native is None:
        return "by a scaling of its own"
    factor = getattr(checkpoint.native.resolve(checkpoint), "factor", None)
    return f"{checkpoint.native.rope_type}, factor {factor:g}" if factor else f"{checkpoint.native.rope_type}"


def spelled(scheme: Scheme) -> str:
    """Spell a scheme as you would type it: its parts by name, each with the fields that differ from their defaults."""
    if len(parts := scheme.parts()) > 1:
        return "+".join(map(spelled, parts))
    if not dataclasses.is_dataclass(scheme) or isinstance(scheme, Combined):
        return str(scheme)  # by layer, or with a target
    values = {field.name: (getattr(scheme, field.name), field.default) for field in dataclasses.fields(scheme)}
    fields = ",".join(f"{name}={_short(value)}" for name, (value, default) in values.items() if value != default)
    return f"{scheme.name}:{fields}" if fields else scheme.name


def _short(value: object) -> str:
    return f"{value:g}" if type(value) is float else str(value)
