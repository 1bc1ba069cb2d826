"""The entries of `config.rope_parameters`: one for all layers of a checkpoint, or one for each type of layer."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rope_patch.errors import InvalidField, MissingField, UnsupportedModel, did_you_mean
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.registry import list_schemes, scheme_class, scheme_from_dict
from rope_patch.schemes.rules import rules_of

ORIGINAL = "original_max_position_embeddings"

_NUMBERS = ("rope_theta", "partial_rotary_factor", ORIGINAL)
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

_LAYER_TYPES = {
    "main": ("sliding_attention",),
    "compress": ("compressed_sparse_attention", "heavily_compressed_attention"),
}
"""The layer types of entries whose names are no layer types: DeepSeek V4's, with and without compressed keys."""

_LARGEST = 1e300  # larger numbers overflow in computations

LARGEST_SIZE = 10**15  # the largest size or factor in a config


def is_number(value: Any) -> bool:
    """Whether a value is a number that a config may contain."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST_SIZE


def rope_entries(config: Any) -> dict[str | None, dict[str, Any]]:
    """The entries of `config.rope_parameters` by layer type; the key is None if one entry serves all layers.

    Raises:
        UnsupportedModel: the config has no rotary parameters, or invalid ones.
    """
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        raise UnsupportedModel(
            f"{type(config).__name__} has no `rope_parameters`: the checkpoint does not rotate, "
            "or rotates by a module of its own, which is not supported"
        )
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
            is_finite = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (is_finite and 0 < value < _LARGEST) and (value is not None or name == "rope_theta"):
                wrong = f"{name}={value!r} in `rope_parameters`; it must be a number above 0"
                raise UnsupportedModel(f"{type(config).__name__}: {wrong}")
    return entries


def rotates_by(layer_type: str, name: str | None) -> bool:
    """Whether layers of a type rotate by the entry of this name."""
    return name in (None, layer_type) or layer_type in _LAYER_TYPES.get(name or "", ())


def layer_types_of(name: str | None, config: Any) -> list[str]:
    """The layer types of a config that rotate by the entry of this name; only the name itself if it is a layer type."""
    kinds = _LAYER_TYPES.get(name or "")
    return [str(name)] if kinds is None else [kind for kind in kinds if kind in config.layer_types]


def as_computed(entry: dict[str, Any], config: Any) -> tuple[dict[str, Any], list[str]]:
    """An entry with the values that Transformers computes with (`modeling_rope_utils.py`, 5.23), and a sentence for
    each value that other programs may read differently.
    """
    computed, said = dict(entry), []
    original, longest = entry.get(ORIGINAL), getattr(config, "max_position_embeddings", None)
    if isinstance(original, float):
        said.append(f"{ORIGINAL}={original} is a float, not an integer")
        if original.is_integer():
            computed[ORIGINAL] = int(original)
    if entry.get("rope_type") == "yarn":
        if "factor" in entry and entry["factor"] is None and original and longest:
            computed["factor"] = longest / original
            said.append(f"factor=null stands for max_position_embeddings / {ORIGINAL} = {computed['factor']:g}")
        for name in ("mscale", "mscale_all_dim", "beta_fast", "beta_slow"):
            if entry.get(name) == 0:
                del computed[name]
                said.append(f"{name}={entry[name]} counts as not given")
        fast, slow = computed.get("beta_fast") or 32, computed.get("beta_slow") or 1
        if is_number(fast) and is_number(slow) and fast < slow:
            said.append(f"beta_fast={fast} is below beta_slow={slow}: the ramp runs backwards")
    factor = computed.get("factor")
    if is_number(factor) and 0 < factor < 1:  # type: ignore[operator]
        said.append(f"factor={factor} is below 1: it makes the rotation faster")
    if entry.get("attention_factor") == 0 and entry.get("rope_type") in ("yarn", "longrope"):
        said.append(f"attention_factor={entry['attention_factor']} makes cos and sin 0, so every score is 0")
    return computed, said


def check_computable(config: Any) -> None:
    """Check that Transformers can compute `config.rope_parameters`, before a model is built from the config.

    Raises:
        UnsupportedModel: the value is no dict of rotary parameters, or its type is not one of Transformers.
        InvalidField: a number is missing or wrong.
    """
    entries = rope_entries(config)
    for entry in entries.values():
        scheme = scheme_of_entry(as_computed(entry, config)[0], nested=None not in entries, checked=False)
        if scheme is None and entry["rope_type"] not in ROPE_INIT_FUNCTIONS:
            allowed = did_you_mean(entry["rope_type"], ["default", *ROPE_INIT_FUNCTIONS])
            raise UnsupportedModel(f"{type(config).__name__}: rope_type={entry['rope_type']!r}; {allowed}")


def main_layer_type(entries: dict[str | None, dict[str, Any]]) -> str | None:
    """The layer type in `rope_entries` that represents a checkpoint: one that sees the whole text, or the first."""
    return next((name for name in ("full_attention", "compress") if entries.get(name)), next(iter(entries)))


def scheme_of_entry(entry: dict[str, Any], nested: bool, checked: bool = True) -> Scheme | None:
    """The scheme that an entry describes, alone or `nested` by layer type; None if the library has no scheme of its
    type.

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
    """Whether the values can be computed: only numbers of at least 0 break a rule of the class, and the factor is above
    0.
    """
    rules = [rule for rule in rules_of(cls).values() if rule.name in values]
    numbers = {rule.name for rule in rules if rule.kind in (int, float)}
    if not all(is_number(values[name]) and values[name] >= 0 for name in numbers) or values.get("factor") == 0:
        return False
    beside = SimpleNamespace(**{field.name: field.default for field in dataclasses.fields(cls)} | values)  # type: ignore[arg-type]
    return all(rule.name in numbers or rule.broken(values[rule.name], beside) is None for rule in rules)


def _unchecked(cls: type[Scheme], values: dict[str, Any]) -> Scheme:
    """Build a scheme with values that a new scheme may not have; its methods do not check them again."""
    scheme = object.__new__(cls)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        value = values.get(field.name, field.default)
        object.__setattr__(scheme, field.name, tuple(map(float, value)) if isinstance(value, list) else value)
    return scheme
