"""Cases and changes that several readers share: tests whether a deviation applies to layers, and the computation that
follows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..architecture import THETA
from ..entries import KNOWN, ORIGINAL, Spelling, rotations_of
from ..reader import Case, Change, Layer
from ..rotation import Rotation

OLD = Spelling(
    keys=("rope_scaling",),
    inner_theta=False,
    nested=False,
    inner_partial=False,
    original=("entry",),
    top_theta_first=True,
)
"""The fields of Transformers before 5: `rope_scaling`, and `rope_theta` and `partial_rotary_factor` at the top."""

DEEPSEEK_CLASSES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
"""Architectures for which some servers have their own code, which takes every type for yarn."""

EXPORT_LISTS = "write two equal lists: rope-patch export DIR --scheme SCHEME --for {key} --output OUT"
EXPORT_BASE = "choose one length: rope-patch export DIR --scheme ntk:factor=k --output OUT"
BOTH_SPELLINGS = "write the entry in both spellings: rope-patch export does"
L_IN_ENTRY = f'write "{ORIGINAL}" into the entry'


def all_of(*cases: Case) -> Case:
    """Whether all of the cases hold."""
    return lambda layer: all(case(layer) for case in cases)


def any_of(*cases: Case) -> Case:
    """Whether one of the cases holds."""
    return lambda layer: any(case(layer) for case in cases)


def unless(case: Case) -> Case:
    """Whether the case does not hold."""
    return lambda layer: not case(layer)


def always(layer: Layer) -> bool:
    """True for every config."""
    return True


def is_type(*types: str) -> Case:
    """Whether the rope type is one of the given ones."""
    return lambda layer: layer.rotation.rope_type in types


def has(**values: Any) -> Case:
    """Whether fields of the rotation have the given values."""
    return lambda layer: all(getattr(layer.rotation, name) == value for name, value in values.items())


def class_in(*names: str) -> Case:
    """Whether the config names one of the given architectures."""
    return lambda layer: any(name in names for name in layer.source.architectures)


def model_in(*names: str) -> Case:
    """Whether `model_type` is one of the given types; a type that ends in `*` matches all that begin with it."""
    starts = tuple(name[:-1] for name in names if name.endswith("*"))
    return lambda layer: (
        layer.source.model_type in names or (bool(starts) and layer.source.model_type.startswith(starts))
    )


def wrote(*names: str) -> Case:
    """Whether the entry has one of the given keys with a value."""
    return lambda layer: any(layer.entry.get(name) is not None for name in names)


def lacks(name: str) -> Case:
    """Whether the entry lacks the key."""
    return lambda layer: layer.entry.get(name) is None


def named(word: str) -> Case:
    """Whether the entry spells its type in this way, before any translation."""
    return lambda layer: word in (layer.entry.get("type"), layer.entry.get("rope_type"))


def is_yarn(**values: Any) -> Case:
    """Whether the rotation is yarn with the given values."""
    return has(rope_type="yarn", **values)


def own_temperature(layer: Layer) -> bool:
    """Whether the rotation is yarn or has lists, with `attention_factor`."""
    return layer.rotation.attention_factor is not None


yarn_temperature = all_of(is_type("yarn"), own_temperature)
list_temperature = all_of(is_type("longrope"), own_temperature)


def mscales(layer: Layer) -> bool:
    """Whether the rotation is yarn with one or both of DeepSeek's fields for the temperature."""
    return layer.rotation.rope_type == "yarn" and bool(layer.rotation.mscale or layer.rotation.mscale_all_dim)


def two_lists(layer: Layer) -> bool:
    """Whether the lists of factors differ for short and long texts."""
    return layer.rotation.rope_type == "longrope" and layer.rotation.short_factor != layer.rotation.long_factor


def is_nested(layer: Layer) -> bool:
    """Whether the config has parameters by layer type."""
    entry = layer.source.fields.get("rope_scaling") or layer.source.fields.get("rope_parameters") or {}
    return isinstance(entry, dict) and any(isinstance(value, dict) for value in entry.values())


def new_words_alone(layer: Layer) -> bool:
    """Whether the config has `rope_parameters`, as Transformers 5 writes it, without `rope_scaling`."""
    return bool(layer.source.fields.get("rope_parameters")) and not layer.source.fields.get("rope_scaling")


def null_factor(layer: Layer) -> bool:
    """Whether the rotation is yarn with a null factor, which Transformers derives from the two lengths."""
    return layer.rotation.rope_type == "yarn" and "factor" in layer.entry and layer.entry["factor"] is None


def text_for_a_number(layer: Layer) -> bool:
    """Whether a number of the entry, or theta at the top, is written as a string."""
    fields, words = layer.source.fields, ("rope_type", "type")
    values = [value for name, value in layer.entry.items() if name in KNOWN and name not in words]
    return any(isinstance(value, str) for value in (*values, *(fields.get(name) for name in (*THETA, ORIGINAL))))


def older_su(layer: Layer) -> bool:
    """Whether the config has the first spelling of Phi-3's lists, with L only at the top of the config."""
    return named("su")(layer) and lacks(ORIGINAL)(layer)


def has_axes(layer: Layer) -> bool:
    """Whether the pairs are divided into sections for the three axes of an image."""
    return bool(layer.rotation.sections)


def from_config(layer: Layer) -> bool:
    """Whether the source is a config. A GGUF file is not: its converter has settled everything."""
    return layer.source.kind == "config"


def refuse(layer: Layer) -> Rotation | None:
    """Return no rotation, because the reader does not load the checkpoint."""
    return None


def to(**values: Any) -> Change:
    """Replace fields of the rotation."""
    return lambda layer: replace(layer.rotation, **values)


def plain(layer: Layer) -> Rotation:
    """The rotation without its scaling."""
    return replace(layer.rotation, rope_type="default", factor=1.0, original=None, attention_factor=None)


def taken_as(spelling: Spelling) -> Change:
    """Read the config again under another spelling."""

    def change(layer: Layer) -> Rotation:
        found = rotations_of(layer.source, spelling).rotations
        return found.get(layer.kind, next(iter(found.values())))

    return change


def long_for_all(layer: Layer) -> Rotation:
    """Use the long list for short texts, too."""
    return replace(layer.rotation, short_factor=layer.rotation.long_factor)


def one_list(layer: Layer) -> Rotation:
    """Use one list for all texts: the long one if max_position_embeddings is beyond L."""
    rotation = layer.rotation
    chosen = rotation.long_factor if rotation.longest > rotation.trained else rotation.short_factor
    return replace(rotation, short_factor=chosen, long_factor=chosen)


def of_lengths(rotation: Rotation) -> float:
    """The ratio max_position_embeddings / L, which some readers take for the factor; 1 if there is no maximum."""
    return rotation.longest / rotation.trained if rotation.longest and rotation.trained else 1.0


def factor_of_lengths(layer: Layer) -> Rotation:
    """Use max_position_embeddings / L as the factor."""
    return replace(layer.rotation, factor=of_lengths(layer.rotation))


def list_temperature_from(*names: str) -> Change:
    """Read the temperature of lists under one of these names, or derive it from max_position_embeddings and L."""

    def change(layer: Layer) -> Rotation:
        found = next((value for name in names if (value := _value(layer.entry, name, None)) is not None), None)
        return replace(layer.rotation, attention_factor=found, factor=of_lengths(layer.rotation))

    return change


def scale(factor: float, mscale: float) -> float:
    """The temperature 0.1 m ln k + 1; it is 1 for a factor up to 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def ratio(mscale: float | None, mscale_all_dim: float | None, times: str = "") -> Change:
    """Use yarn's temperature g(mscale) / g(mscale_all_dim), where a 0 counts as present; `attention_factor` is not
    read.

    Args:
        mscale, mscale_all_dim: value of a missing key; None if the temperature is 0.1 ln k + 1 unless both keys are
            present.
        times: a key of the entry whose value multiplies the temperature.
    """

    def change(layer: Layer) -> Rotation:
        rotation, defaults = layer.rotation, {"mscale": mscale, "mscale_all_dim": mscale_all_dim}
        given = {name: _value(layer.entry, name, default) for name, default in defaults.items()}
        above, below = given["mscale"], given["mscale_all_dim"]
        if above is None or below is None:
            above, below = 1.0, 0.0
        temperature = scale(rotation.factor, above) / scale(rotation.factor, below)
        temperature *= _value(layer.entry, times, 1.0) or 1.0
        return replace(rotation, attention_factor=temperature, mscale=None, mscale_all_dim=None)

    return change


def as_yarn(change: Change) -> Change:
    """Treat any type as yarn, with its ramp rounded and the temperature of another change."""

    def changed(layer: Layer) -> Rotation | None:
        original = _value(layer.entry, ORIGINAL, layer.rotation.trained) or None
        if original is None:
            return None
        rotation = replace(layer.rotation, rope_type="yarn", truncate=True, original=int(original))
        return change(replace(layer, rotation=rotation))

    return changed


def grown_base(growth: float, rotation: Rotation) -> Rotation:
    """Use one base for all texts, b g^(d / (d - 2))."""
    theta = rotation.theta * growth ** (rotation.width / (rotation.width - 2))
    return replace(rotation, rope_type="default", theta=theta, factor=1.0)


def base_of_longest(layer: Layer) -> Rotation:
    """Use `dynamic` with the base of the longest text, max_position_embeddings times factor, for all texts."""
    factor = layer.rotation.factor
    return grown_base(factor * factor - (factor - 1), layer.rotation)


def theta_at_top(layer: Layer, name: str, default: float) -> float:
    """Read theta under its name at the top of the config; use the default if the field is missing or is no base."""
    found = _value(layer.source.fields, name, default)
    return found if found is not None and 1.0 < found <= 1e30 else default


def _value(entry: Mapping[str, Any], name: str, default: float | None) -> float | None:
    found = entry.get(name)
    return float(found) if isinstance(found, (int, float)) and not isinstance(found, bool) else default
