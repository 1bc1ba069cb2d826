"""Facts about positions in a config."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple, cast

from rope_patch.errors import UnsupportedModel
from rope_patch.models.record import before_patch
from rope_patch.models.rope_entries import (
    LARGEST_SIZE,
    ORIGINAL,
    as_computed,
    is_number,
    main_layer_type,
    rope_entries,
    rotates_by,
    scheme_of_entry,
)
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.slots import Checkpoint

BASE = 10_000.0  # b for a checkpoint without a rotary embedding: the published one (RoFormer, section 3.2.2)

_REQUIRED = ("hidden_size", "num_hidden_layers")
_WIDTHS = ("intermediate_size", "head_dim", "num_attention_heads", "num_key_value_heads")


def wrong_field(fields: Mapping[str, Any], names: Container[str] | None = None) -> str:
    """Find an impossible value in the `fields` of a config and of configs inside it: a message with the field, its
    value, and what is allowed; empty without one. `names` are the fields to check, by default all known fields.
    """
    for name, value in fields.items():
        if name in _FIELDS and (names is None or name in names) and (value is not None or name in _REQUIRED):
            allows, allowed = _FIELDS[name]
            latent = name == "head_dim" and value == 0 and "qk_rope_head_dim" in fields  # has widths of its own
            if not (allows(value) or latent):
                return f"{name}={value!r:.40}; it must be {allowed}"
        elif isinstance(value, dict) and (wrong := wrong_field(value, names)):
            return wrong
    return ""


def _is_size(value: Any, largest: int = LARGEST_SIZE) -> bool:
    if isinstance(value, (list, tuple, dict)):  # values by layer, or by part of the model
        return bool(value) and all(_is_size(part) for part in (value.values() if isinstance(value, dict) else value))
    return type(value) in (int, float) and 1 <= value <= largest and value % 1 == 0


_SIZE = (_is_size, f"a whole number from 1 to {LARGEST_SIZE:g}")
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("hidden_size", "max_position_embeddings", "vocab_size", *_WIDTHS), _SIZE),
    "num_hidden_layers": (lambda value: _is_size(value, 10**5), "a whole number from 1 to 100000"),
    "sliding_window": (is_number, "a number of tokens"),
    "layer_types": (lambda value: isinstance(value, (list, tuple)) and {*map(type, value)} <= {str}, "a list of words"),
}


class ContextLengths(NamedTuple):
    """The two lengths of a checkpoint in tokens: the `original` length, before its own scaling, and the length that it
    reads `today`, under that scaling. Without a scaling both are equal.
    """

    original: int
    today: int


def context_lengths(config: Any) -> ContextLengths:
    """Read the two lengths of a checkpoint, by one rule for all spellings; from before the patch if the config records
    a scheme.

    `max_position_embeddings` is the length that the checkpoint reads today, and `original_max_position_embeddings` the
    original length. If the factor times the original length exceeds the maximum, the maximum was not raised, as in
    Qwen's documentation, and the product is the length today. `linear` and `proportional` name no original length, so
    it is today's length over the factor (Gemma 3: 131,072 / 8). `dynamic` scales only beyond the maximum, which is both
    lengths.

    Raises:
        UnsupportedModel: the config contains no length.
    """
    config = before_patch(config)
    entry = _scaled_entry(rope_entries(config))
    kind, factor = entry.get("rope_type", "default"), entry.get("factor")
    if not (isinstance(factor, (int, float)) and 0 < factor <= LARGEST_SIZE):
        factor = 0  # not given, or refused where the scheme is read
    stated, longest = entry.get(ORIGINAL), getattr(config, "max_position_embeddings", None)
    if not (stated or longest):
        raise UnsupportedModel(f"{type(config).__name__} has no `max_position_embeddings`; its length is unknown")
    longest = int(longest or cast(float, stated))
    if kind in ("default", "dynamic"):
        return ContextLengths(longest, longest)
    if not stated:
        longest = max(longest, int(getattr(config, "max_sequence_length", None) or 0))  # Vicuna 1.5 and LongChat
        return ContextLengths(max(1, round(longest / max(1, factor))) if kind in _SLOWED else longest, longest)
    original = int(stated)
    raised = kind in ("llama3", "longrope") and longest > original  # the factor of Llama 3.2 is more than was trained
    return ContextLengths(original, max(original, longest, 0 if raised else round(factor * original)))


_SLOWED = ("linear", "proportional")
"""Types that divide the frequencies of a shorter checkpoint by their factor, without naming its length."""


def _scaled_entry(entries: dict[str | None, dict[str, Any]]) -> dict[str, Any]:
    """The entry that represents a checkpoint: the entry of full attention, unless only another entry scales."""
    main = entries[main_layer_type(entries)]
    scaled = (entry for entry in (main, *entries.values()) if entry.get("rope_type", "default") != "default")
    return next(scaled, main)


def training_length(config: Any) -> int:
    """The original length in tokens, before the checkpoint's own scaling; see `context_lengths`.

    Raises:
        UnsupportedModel: the config contains no length.
    """
    return context_lengths(config).original


def length_today(config: Any) -> int:
    """The length in tokens that a checkpoint reads today, under its own scaling; see `context_lengths`.

    Raises:
        UnsupportedModel: the config contains no length.
    """
    return context_lengths(config).today


def checkpoint_of_config(config: Any) -> Checkpoint:
    """The properties from which a scheme takes its defaults."""
    original, today = context_lengths(config)
    native = scheme_of_layer_type(config, main_layer_type(rope_entries(config)))
    return Checkpoint(original, config_of_layer(config, 0).num_attention_heads, today, native=native)


def head_dim(config: Any) -> int:
    """The number of dimensions of a head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def config_of_layer(config: Any, index: int) -> Any:
    """The config of one layer; most configs are the same for every layer."""
    return config.per_layer_config[index] if getattr(config, "is_heterogeneous", False) else config


def configs_of_type(config: Any, layer_type: str | None) -> list[Any]:
    """The configs of the layers that rotate by the entry of a type, or of all layers; only the config itself if there
    are no such layers.
    """
    types = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    return [config_of_layer(config, i) for i, kind in enumerate(types) if rotates_by(kind, layer_type)] or [config]


def scheme_of_layer_type(config: Any, layer_type: str | None) -> Scheme | None:
    """The scheme that `config.rope_parameters` describes for the layers of one type, as Transformers computes it; None
    if the library has no such scheme.

    Raises:
        InvalidField: a field is missing or wrong.
    """
    entry, _ = as_computed(rope_entries(config)[layer_type], config)
    return scheme_of_entry(entry, nested=layer_type is not None, checked=False)
