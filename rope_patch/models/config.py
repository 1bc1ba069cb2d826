"""The facts about positions in a config."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Container, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rope_patch.errors import InvalidField, MissingField, UnsupportedModel, did_you_mean
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.registry import list_schemes, scheme_class, scheme_from_dict
from rope_patch.schemes.rules import rules_of
from rope_patch.schemes.slots import Checkpoint

BASE = 10_000.0  # b for a checkpoint without a rotary embedding: the published one (RoFormer, section 3.2.2)

_ORIGINAL = "original_max_position_embeddings"

_NUMBERS = ("rope_theta", "partial_rotary_factor", _ORIGINAL)
"""Properties of the checkpoint in an entry of any type; only the first is required."""

_UNREAD = {"dynamic": {"original_max_position_embeddings", "length"}, "longrope": {"length", "learned"}}
"""Fields of schemes that Transformers does not read in an entry of the equivalent type."""

SCALING = frozenset(
    {
        *("rope_type", "type", "factor", "alpha", "original_max_position_embeddings", "truncate"),
        *("attention_factor", "mscale", "mscale_all_dim", "short_mscale", "long_mscale", "beta_fast", "beta_slow"),
        *("short_factor", "long_factor", "low_freq_factor", "high_freq_factor"),
    }
)
"""Keys of an entry that a scheme sets; all others, such as `mrope_section`, belong to the checkpoint."""

_LARGEST = 1e300  # larger numbers overflow in computations

_NATIVE = ("rope_parameters", "max_position_embeddings")
"""What a patch may change in a config; the record in `config.rope_patch` then has the values from before."""


def restore_native(config: Any, record: dict[str, Any]) -> dict[str, Any]:
    """Give a config the values from before the patch of a record, and return those that they replace."""
    replaced = {}
    for name in _NATIVE:
        if name in record:
            replaced[name] = getattr(config, name, None)
            setattr(config, name, record[name])
    return replaced


def before_patch(config: Any) -> Any:
    """A config that records a scheme, as it was before the patch."""
    record = getattr(config, "rope_patch", None)
    if not isinstance(record, dict):
        return config
    native = copy.copy(config)
    own = {native.attribute_map.get(name, name): record[name] for name in _NATIVE if name in record}
    vars(native).update(own)  # `setattr` could raise Transformers' own errors
    return native


_REQUIRED = ("hidden_size", "num_hidden_layers")
_WIDTHS = ("intermediate_size", "head_dim", "num_attention_heads", "num_key_value_heads")
_LARGEST_SIZE = 10**15


def wrong_field(fields: Mapping[str, Any], names: Container[str] | None = None) -> str:
    """What is impossible in the `fields` of a config and of configs inside it: name and value of a field, and what is
    allowed; empty without one. `names` are the fields to look at, by default all that are known here.
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


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST_SIZE


def _is_size(value: Any, largest: int = _LARGEST_SIZE) -> bool:
    if isinstance(value, (list, tuple, dict)):  # by layer, or by part of the model
        return bool(value) and all(_is_size(part) for part in (value.values() if isinstance(value, dict) else value))
    return _is_number(value) and 1 <= value <= largest and value % 1 == 0


_SIZE = (_is_size, f"a whole number from 1 to {_LARGEST_SIZE:g}")
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("hidden_size", "max_position_embeddings", "vocab_size", *_WIDTHS), _SIZE),
    "num_hidden_layers": (lambda value: _is_size(value, 10**5), "a whole number from 1 to 100000"),
    "sliding_window": (_is_number, "a number of tokens"),
    "layer_types": (lambda value: isinstance(value, (list, tuple)) and {*map(type, value)} <= {str}, "a list of words"),
}


def rope_entries(config: Any) -> dict[str | None, dict[str, Any]]:
    """The entries of `config.rope_parameters` by layer type; the key is None if one entry serves all layers.

    Raises:
        UnsupportedModel: the config has no rotary parameters, or invalid ones.
    """
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        raise UnsupportedModel(f"{type(config).__name__} has no `rope_parameters`, so the checkpoint does not rotate")
    if not isinstance(parameters, dict):
        raise UnsupportedModel(f"{type(config).__name__}: rope_parameters={parameters!r} is not allowed; use a dict")
    if "rope_theta" in parameters:
        entries: dict[str | None, dict[str, Any]] = {None: parameters}
    else:
        entries = {layer_type: entry for layer_type, entry in parameters.items() if isinstance(entry, dict)}
    if not entries:
        raise UnsupportedModel(f"{type(config).__name__} has `rope_parameters` without a rope_theta: {parameters!r}")
    for entry in entries.values():
        if not isinstance(kind := entry.get("rope_type", "default"), str):
            raise UnsupportedModel(f"{type(config).__name__}: rope_type={kind!r} is not allowed; it must be a string")
        for name in _NUMBERS:
            value: Any = entry.get(name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (is_number and 0 < value < _LARGEST) and (value is not None or name == "rope_theta"):
                wrong = f"{name}={value!r} in `rope_parameters`; it must be a number above 0"
                raise UnsupportedModel(f"{type(config).__name__}: {wrong}")
    return entries


class ContextLengths(NamedTuple):
    """The two lengths of a checkpoint in tokens: the `original` one, before its own scaling, and what it reads
    `today`, under that scaling; the same without one.
    """

    original: int
    today: int


def context_lengths(config: Any) -> ContextLengths:
    """The lengths of a checkpoint, by one rule for all spellings; from before the patch if the config records a scheme.

    `max_position_embeddings` is what the checkpoint reads today, and `original_max_position_embeddings` the original
    length. Where the factor times the original length goes further than the maximum, the maximum was not raised, as
    Qwen's documentation has it, and the product is what it reads today. `linear` and `proportional` name no original
    length, so it is today's over the factor (Gemma 3: 131,072 / 8). `dynamic` scales only beyond the maximum, which is
    both lengths.

    Raises:
        UnsupportedModel: the config contains no length.
    """
    config = before_patch(config)
    entry = _scaled_entry(rope_entries(config))
    kind, factor = entry.get("rope_type", "default"), entry.get("factor")
    if not (isinstance(factor, (int, float)) and 0 < factor <= _LARGEST_SIZE):
        factor = 0  # not given, or refused where the scheme is read
    stated, longest = entry.get(_ORIGINAL), getattr(config, "max_position_embeddings", None)
    if not (stated or longest):
        raise UnsupportedModel(f"{type(config).__name__} has no `max_position_embeddings`; its length is unknown")
    longest = int(longest or cast(float, stated))
    if kind in ("default", "dynamic"):
        return ContextLengths(longest, longest)
    if not stated:
        longest = max(longest, int(getattr(config, "max_sequence_length", None) or 0))  # as Vicuna 1.5 and LongChat
        return ContextLengths(max(1, round(longest / max(1, factor))) if kind in _SLOWED else longest, longest)
    original = int(stated)
    raised = kind in ("llama3", "longrope") and longest > original  # the factor of Llama 3.2 is more than was trained
    return ContextLengths(original, max(original, longest, 0 if raised else round(factor * original)))


_SLOWED = ("linear", "proportional")
"""Types that divide the frequencies of a shorter checkpoint by their factor, without naming its length."""


def _scaled_entry(entries: dict[str | None, dict[str, Any]]) -> dict[str, Any]:
    """The entry that stands for a checkpoint: of full attention, unless only another one scales."""
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
    """Dimensions of a head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def config_of_layer(config: Any, index: int) -> Any:
    """The config of one layer; most configs are the same for every layer."""
    return config.per_layer_config[index] if getattr(config, "is_heterogeneous", False) else config


def configs_of_type(config: Any, layer_type: str | None) -> list[Any]:
    """The configs of all layers of one type, or of all layers; the config itself if no layer has this type."""
    types = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    return [config_of_layer(config, i) for i, kind in enumerate(types) if layer_type in (None, kind)] or [config]


def scheme_of_layer_type(config: Any, layer_type: str | None) -> Scheme | None:
    """The scheme that `config.rope_parameters` describes for the layers of one type, as Transformers computes it; None
    if there is none here.

    Raises:
        InvalidField: a field is missing or wrong.
    """
    entry, _ = as_computed(rope_entries(config)[layer_type], config)
    return scheme_of_entry(entry, nested=layer_type is not None, checked=False)


def as_computed(entry: dict[str, Any], config: Any) -> tuple[dict[str, Any], list[str]]:
    """An entry of a checkpoint with the values that Transformers computes with (`modeling_rope_utils.py`, 5.23), and a
    sentence for each value that other programs may take otherwise.
    """
    computed, said = dict(entry), []
    original, longest = entry.get(_ORIGINAL), getattr(config, "max_position_embeddings", None)
    if isinstance(original, float):
        said.append(f"{_ORIGINAL}={original} is a float, not an integer")
        if original.is_integer():
            computed[_ORIGINAL] = int(original)
    if entry.get("rope_type") == "yarn":
        if "factor" in entry and entry["factor"] is None and original and longest:
            computed["factor"] = longest / original
            said.append(f"factor=null stands for max_position_embeddings / {_ORIGINAL} = {computed['factor']:g}")
        for name in ("mscale", "mscale_all_dim", "beta_fast", "beta_slow"):
            if entry.get(name) == 0:
                del computed[name]
                said.append(f"{name}={entry[name]} counts as not given")
        fast, slow = computed.get("beta_fast") or 32, computed.get("beta_slow") or 1
        if _is_number(fast) and _is_number(slow) and fast < slow:
            said.append(f"beta_fast={fast} is below beta_slow={slow}: the ramp runs backwards")
    factor = computed.get("factor")
    if _is_number(factor) and 0 < factor < 1:  # type: ignore[operator]
        said.append(f"factor={factor} is below 1: it makes the rotation faster")
    if entry.get("attention_factor") == 0 and entry.get("rope_type") in ("yarn", "longrope"):
        said.append(f"attention_factor={entry['attention_factor']} makes cos and sin 0, so every score is 0")
    return computed, said


def check_computable(config: Any) -> None:
    """Check that Transformers can compute `config.rope_parameters`, before a model is built from the config.

    Raises:
        UnsupportedModel: they are not rotary parameters, or of a type that Transformers does not have.
        InvalidField: a number is missing or wrong.
    """
    entries = rope_entries(config)
    for entry in entries.values():
        scheme = scheme_of_entry(as_computed(entry, config)[0], nested=None not in entries, checked=False)
        if scheme is None and entry["rope_type"] not in ROPE_INIT_FUNCTIONS:
            allowed = did_you_mean(entry["rope_type"], ["default", *ROPE_INIT_FUNCTIONS])
            raise UnsupportedModel(f"{type(config).__name__}: rope_type={entry['rope_type']!r}; {allowed}")


def main_layer_type(entries: dict[str | None, dict[str, Any]]) -> str | None:
    """The layer type of `rope_entries` that stands for a checkpoint: full attention, or the first."""
    return "full_attention" if entries.get("full_attention") else next(iter(entries))


def scheme_of_entry(entry: dict[str, Any], nested: bool, checked: bool = True) -> Scheme | None:
    """The scheme that an entry describes, alone or `nested` by layer type; None if there is none here.

    Args:
        checked: whether the rules of new schemes hold; a checkpoint may have any values that can be computed.

    Raises:
        InvalidField: a field is missing or wrong.
    """
    rope_type = entry.get("rope_type", "default")
    for cls in map(scheme_class, list_schemes()):
        if cls.rope_type == rope_type:
            fields = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
            fields -= _UNREAD.get(rope_type, set())
            if nested:
                fields.discard("truncate")  # ignored by Transformers in nested entries
            values = {key: value for key, value in entry.items() if key in fields and value is not None}
            if "truncate" in fields and "truncate" in entry:
                values["truncate"] = bool(entry["truncate"])  # None is False in Transformers
            try:
                return scheme_from_dict({"name": cls.name, **values})
            except MissingField:
                raise
            except InvalidField:
                if checked or not _is_computable(cls, values):
                    raise
                return _unchecked(cls, values)
    return None


def _is_computable(cls: type[Scheme], values: dict[str, Any]) -> bool:
    """Whether the only values that break a rule of the class are numbers of at least 0, and its factor is above it."""
    rules = [rule for rule in rules_of(cls).values() if rule.name in values]  # type: ignore[arg-type]
    numbers = {rule.name for rule in rules if rule.kind in (int, float)}
    if not all(_is_number(values[name]) and values[name] >= 0 for name in numbers) or values.get("factor") == 0:
        return False
    beside = SimpleNamespace(**{field.name: field.default for field in dataclasses.fields(cls)} | values)  # type: ignore[arg-type]
    return all(rule.name in numbers or rule.broken(values[rule.name], beside) is None for rule in rules)


def _unchecked(cls: type[Scheme], values: dict[str, Any]) -> Scheme:
    """A scheme with values that no new one may have; its methods do not check them again."""
    scheme = object.__new__(cls)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        value = values.get(field.name, field.default)
        object.__setattr__(scheme, field.name, tuple(map(float, value)) if isinstance(value, list) else value)
    return scheme
