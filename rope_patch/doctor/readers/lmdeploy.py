"""LMDeploy: its two engines."""

from __future__ import annotations

from dataclasses import replace

from ..entries import Spelling
from ..reader import Deviation, Layer, Reader
from ..rotation import Rotation
from .cases import (
    BOTH_SPELLINGS,
    EXPORT_LISTS,
    OLD,
    all_of,
    is_type,
    is_yarn,
    lacks,
    mscales,
    new_words_alone,
    of_lengths,
    plain,
    ratio,
    refuse,
    taken_as,
    to,
    unless,
    wrote,
    yarn_temperature,
)

_TURBOMIND = "InternLM/lmdeploy@15692e3 lmdeploy/turbomind parse_rope_param"
_PYTORCH = "InternLM/lmdeploy@07e6bea lmdeploy/pytorch/nn/rotary_embedding.py"

_NO_L = "With Transformers 5 the config object has L in its entry. Without L there, "


def _factor_of_frequencies(layer: Layer) -> Rotation:
    """Scale frequencies by max_position_embeddings / L, and take the temperature from the config's factor."""
    rotation = layer.rotation
    return replace(rotation, factor=of_lengths(rotation), attention_factor=rotation.temperature())


TURBOMIND = Reader(
    "LMDeploy TurboMind",
    "lmdeploy",
    "15692e3",
    "read",
    _TURBOMIND,
    "rope_parameters where they are not null, else rope_theta and rope_scaling at the top",
    start="session_len={length} of its TurbomindEngineConfig",
    deviations=(
        Deviation(
            "reads only rope_theta and rope_scaling at the top",
            new_words_alone,
            taken_as(OLD),
            "InternLM/lmdeploy#4304",
            BOTH_SPELLINGS,
            ended="30 January 2026",
        ),
        Deviation(
            "fails, because it does not know this rope_type (RuntimeError)",
            is_type("longrope", "proportional"),
            refuse,
            _TURBOMIND,
            silent=False,
        ),
        Deviation(
            "drops the type if there is an mrope_section, and keeps the plain frequencies",
            all_of(unless(is_type("default")), lambda layer: bool(layer.rotation.sections)),
            plain,
            _TURBOMIND,
        ),
        Deviation(
            "ignores mscale and mscale_all_dim, and computes 0.1 ln k + 1",
            all_of(mscales, unless(yarn_temperature)),
            to(mscale=None, mscale_all_dim=None),
            "InternLM/lmdeploy lmdeploy/turbomind, older stored versions",
            ended="a version before 15692e3",
        ),
        Deviation(
            "takes max_position_embeddings / L for the factor of yarn's frequencies, whatever the factor is",
            all_of(is_type("yarn"), wrote("original_max_position_embeddings")),
            _factor_of_frequencies,
            _TURBOMIND,
            "write max_position_embeddings = factor times L",
        ),
        Deviation("rounds the ends of the ramp", is_yarn(truncate=False), to(truncate=True), _TURBOMIND),
        Deviation(
            "rotates the whole head, whatever partial_rotary_factor is",
            all_of(unless(is_type("proportional")), lambda layer: layer.rotation.partial != 1),
            to(partial=1.0),
            _TURBOMIND,
        ),
    ),
    unknown="What its kernels do with max_position_embeddings in place of L. "
    f"{_NO_L}llama3 would have L = 0 and a high_freq_factor of 1. Parameters by layer type.",
)

LMDEPLOY_PYTORCH = Reader(
    "LMDeploy PyTorch engine",
    "lmdeploy-pytorch",
    "07e6bea",
    "read",
    f"{_PYTORCH} get_rope_parameters, build_rotary_params",
    "rope_parameters of the config object, else rope_scaling; theta of the entry; partial_rotary_factor at the top "
    "first",
    spelling=Spelling(top_partial_first=True),
    start="session_len={length} of its PytorchEngineConfig",
    deviations=(
        Deviation(
            "reads only rope_theta and rope_scaling at the top",
            new_words_alone,
            taken_as(OLD),
            "InternLM/lmdeploy#4303",
            BOTH_SPELLINGS,
            ended="28 January 2026",
        ),
        Deviation(
            "fails, because it does not know this rope_type (KeyError)",
            is_type("proportional"),
            refuse,
            _PYTORCH,
            EXPORT_LISTS.replace("{key}", "lmdeploy-pytorch"),
            silent=False,
        ),
        Deviation(
            "takes 1 for an mscale that is missing beside mscale_all_dim",
            all_of(is_type("yarn"), wrote("mscale_all_dim"), lacks("mscale"), unless(yarn_temperature)),
            ratio(1.0, 0.0),
            _PYTORCH,
            "write both, or none",
        ),
    ),
    unknown=f"{_NO_L}yarn takes max_position_embeddings, and llama3 8192. What an attention_factor of null does, and "
    "parameters by layer type.",
)
