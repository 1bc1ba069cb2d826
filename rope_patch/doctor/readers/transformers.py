"""Transformers, whose newest release is the reference."""

from __future__ import annotations

from dataclasses import replace

from ..entries import ORIGINAL
from ..reader import Deviation, Layer, Reader
from ..rotation import Rotation
from .cases import (
    OLD,
    all_of,
    factor_of_lengths,
    is_nested,
    is_type,
    is_yarn,
    lacks,
    of_lengths,
    older_su,
    refuse,
    text_for_a_number,
    to,
    unless,
    wrote,
)

_LOAD = ": load it with rope_patch.from_pretrained"
_ROPE_UTILS = "huggingface/transformers src/transformers/modeling_rope_utils.py"
_LATEST_4 = "transformers 4.57.3 transformers/modeling_rope_utils.py"


def _has_l_at_top(layer: Layer) -> bool:
    return layer.source.fields.get(ORIGINAL) is not None


def _l_at_top(layer: Layer) -> Rotation:
    """Use lists with L only from the top of the config, and the factor that follows from that L."""
    top = layer.source.fields.get(ORIGINAL)
    if not isinstance(top, int):
        return replace(layer.rotation, original=layer.rotation.longest or layer.rotation.original)
    rotation = replace(layer.rotation, original=top)
    return replace(rotation, factor=of_lengths(rotation))


NO_STRINGS = Deviation(
    "fails if a number is written as a string (TypeError)",
    text_for_a_number,
    refuse,
    _ROPE_UTILS,
    "write it as a number",
    silent=False,
)

BY_CONFIG = (
    NO_STRINGS,
    Deviation(
        f"fails at the type su, because {ORIGINAL} is not in the entry (KeyError)",
        older_su,
        refuse,
        "transformers 5.23.0 transformers/modeling_rope_utils.py _check_received_keys",
        f'write "longrope" for the type, and "{ORIGINAL}" into the entry',
        silent=False,
    ),
)
"""Deviations of every program that takes the config as Transformers 5 has read it."""


TRANSFORMERS = Reader(
    "Transformers 5",
    "transformers",
    "5.23",
    "run",
    "transformers 5.23.0 transformers/modeling_rope_utils.py standardize_rope_params, configuration_utils.py",
    "rope_scaling where it is not empty, else rope_parameters; theta and partial_rotary_factor of the entry before "
    "those at the top; L at the top before L of the entry",
    deviations=(
        *BY_CONFIG,
        Deviation(
            "rounds the ends of the ramp if parameters are nested by layer type, because it looks for truncate only at "
            "the top",
            all_of(is_nested, is_yarn(truncate=False)),
            to(truncate=True),
            "transformers 5.23.0 transformers/modeling_rope_utils.py _compute_yarn_parameters",
        ),
        Deviation(
            "fails in its validation, because yarn is nested by layer type (KeyError)",
            all_of(is_nested, is_type("yarn")),
            refuse,
            "huggingface/transformers#45887",
            ended="a release after May 2026",
            silent=False,
        ),
    ),
    by_layer=("*",),
    record=_LOAD,
    unknown="Since when 5.x leaves the sliding layers of OLMo 3 without yarn (huggingface/transformers#45945).",
)

TRANSFORMERS_4 = Reader(
    "Transformers 4",
    "transformers4",
    "4.57.3",
    "run",
    _LATEST_4,
    "rope_scaling, with rope_type before type; rope_theta and partial_rotary_factor at the top. It silently ignores "
    "rope_parameters (Open-Athena/MarinFold#184)",
    spelling=OLD,
    deviations=(
        NO_STRINGS,
        Deviation(
            "fails, because it does not know this rope_type (KeyError)",
            is_type("proportional"),
            refuse,
            f"{_LATEST_4} ROPE_INIT_FUNCTIONS",
            silent=False,
        ),
        Deviation(
            f"fails, because {ORIGINAL} is not in the entry (KeyError)",
            all_of(is_type("llama3"), lacks(ORIGINAL)),
            refuse,
            f"{_LATEST_4} _compute_llama3_parameters",
            f'write "{ORIGINAL}" into rope_scaling',
            silent=False,
        ),
        Deviation(
            f"fails, because the config has neither factor, nor attention_factor, nor {ORIGINAL} at the top "
            "(TypeError)",
            all_of(is_type("longrope"), lacks("factor"), lacks("attention_factor"), unless(_has_l_at_top)),
            refuse,
            f"{_LATEST_4} _compute_longrope_parameters",
            f'write "{ORIGINAL}" at the top of the config, too',
            silent=False,
        ),
        Deviation(
            f"looks for L of longrope only at the top, and takes max_position_embeddings / {ORIGINAL} for the factor",
            is_type("longrope"),
            _l_at_top,
            f"{_LATEST_4} _compute_longrope_parameters",
            f'write "{ORIGINAL}" at the top of the config, too',
        ),
        Deviation(
            "takes max_position_embeddings / L for the factor of yarn, whatever the factor is",
            all_of(is_type("yarn"), wrote(ORIGINAL)),
            factor_of_lengths,
            f"transformers 4.55.4 and 4.56.0 {_ROPE_UTILS.partition(' ')[2]}; huggingface/transformers#38224",
            "write max_position_embeddings = factor times L",
            until="4.56",
        ),
    ),
    by_layer=("*",),
    unchecked=("deepseek_v4",),
    record=_LOAD,
    unknown="From which 4.x on yarn's ramp was computed from L and mscale was read: code of early 4.4x did neither.",
)
