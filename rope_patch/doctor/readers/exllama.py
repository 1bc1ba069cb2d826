"""exllamav3: the raw config, one function for all scalings."""

from __future__ import annotations

from dataclasses import replace

from ..entries import ORIGINAL, Spelling
from ..reader import Deviation, Layer, Reader
from ..rotation import Rotation
from .cases import (
    EXPORT_BASE,
    EXPORT_LISTS,
    L_IN_ENTRY,
    OLD,
    all_of,
    class_in,
    factor_of_lengths,
    is_nested,
    is_type,
    lacks,
    list_temperature_from,
    model_in,
    new_words_alone,
    one_list,
    plain,
    refuse,
    taken_as,
    theta_at_top,
    to,
    two_lists,
    unless,
    wrote,
    yarn_temperature,
)

_ROPE = "exllamav3 1.6.5 exllamav3/util/rope.py RoPE"
_CONFIG = "exllamav3 1.6.5 exllamav3/model/config.py read_rope_settings_default"
_gemma3 = model_in("gemma3", "gemma3_text")
_asks_for_ratio = class_in("DeepseekV3ForCausalLM")


def _both_mscales(layer: Layer) -> bool:
    rotation = layer.rotation
    return rotation.rope_type == "yarn" and bool(rotation.mscale and rotation.mscale_all_dim)


def _gemma3_full(layer: Layer) -> Rotation:
    return replace(plain(layer), theta=theta_at_top(layer, "rope_theta", 1e6))


def _without_l(layer: Layer) -> Rotation:
    return replace(layer.rotation, original=layer.rotation.longest or layer.rotation.original)


def _mscale_row(since: str, until: str) -> Deviation:
    return Deviation(
        "computes 0.1 ln k + 1 if the config has both mscale and mscale_all_dim, except in its class for DeepSeek V3",
        all_of(_both_mscales, unless(_asks_for_ratio), unless(yarn_temperature)),
        to(mscale=None, mscale_all_dim=None),
        f"{_ROPE}._rope_params_yarn; turboderp-org/exllamav3#259",
        "write attention_factor",
        since=since,
        until=until,
    )


EXLLAMA = Reader(
    "exllamav3",
    "exllamav3",
    "1.6.5",
    "run",
    f"{_CONFIG}; {_ROPE}",
    "config.json itself: rope_scaling where it is not empty, else rope_parameters; theta and partial_rotary_factor at "
    "the top before those of the entry",
    spelling=Spelling(top_theta_first=True, top_partial_first=True, original=("entry", "top")),
    by_layer=("gemma3*",),
    deviations=(
        Deviation(
            "reads only rope_scaling and rope_theta at the top",
            new_words_alone,
            taken_as(OLD),
            "turboderp-org/exllamav3 exllamav3/model/config.py, an older version",
            ended="a release before 1.6.5",
        ),
        Deviation(
            "fails, because it does not know this type (ValueError)",
            is_type("dynamic"),
            refuse,
            _ROPE,
            EXPORT_BASE,
            silent=False,
        ),
        Deviation(
            "reads no parameters by layer type in its class for Gemma 3: theta at the top, or 1,000,000",
            all_of(_gemma3, is_nested),
            _gemma3_full,
            "exllamav3 1.6.5 exllamav3/architecture/gemma3.py",
            layers=("full_attention",),
        ),
        Deviation(
            "rotates the sliding layers of Gemma 3 with theta = 10000",
            _gemma3,
            lambda layer: to(theta=1e4)(replace(layer, rotation=plain(layer))),
            "exllamav3 1.6.5 exllamav3/architecture/gemma3.py",
            layers=("sliding_attention",),
        ),
        Deviation(
            "takes max_position_embeddings for L of yarn if the entry has no L",
            all_of(is_type("yarn"), lacks(ORIGINAL)),
            _without_l,
            f"{_ROPE}._rope_params_yarn",
            L_IN_ENTRY,
        ),
        Deviation(
            "takes max_position_embeddings / L for the factor of yarn, whatever the factor is",
            all_of(is_type("yarn"), wrote(ORIGINAL)),
            factor_of_lengths,
            f"{_ROPE}._rope_params_yarn",
            "write max_position_embeddings = factor times L",
        ),
        _mscale_row("", "1.0.0"),
        _mscale_row("1.2.2", ""),
        Deviation(
            "leaves the temperature at 1 if the config has llama_4_scaling_beta",
            all_of(is_type("yarn"), wrote("llama_4_scaling_beta"), unless(yarn_temperature), unless(_asks_for_ratio)),
            to(attention_factor=1.0),
            f"{_ROPE}._rope_params_yarn",
            "write attention_factor",
        ),
        Deviation(
            "takes L = 8192 for llama3 if it is not in the entry",
            all_of(is_type("llama3"), lacks(ORIGINAL)),
            to(original=8192),
            f"{_ROPE}._rope_params_llama3",
            L_IN_ENTRY,
        ),
        Deviation(
            "uses one list for all texts: the long one, if max_position_embeddings is beyond L",
            two_lists,
            one_list,
            f"{_ROPE}._rope_params_longrope",
            partly=True,
        ),
        Deviation(
            "computes the temperature sqrt(1 + ln k / ln L), k = max_position_embeddings / L, without "
            "attention_factor, factor, short_mscale and long_mscale",
            is_type("longrope"),
            list_temperature_from(),
            f"{_ROPE}._rope_params_longrope",
            EXPORT_LISTS.replace("{key}", "exllamav3"),
        ),
    ),
    unknown="Parameters by layer type in its other classes. Which release began to read rope_parameters.",
)
