"""ONNX Runtime GenAI: its builder writes the cos and sin of a config into the model."""

from __future__ import annotations

import math

from ..entries import ORIGINAL
from ..reader import Deviation, Layer, Reader
from .cases import (
    BOTH_SPELLINGS,
    EXPORT_LISTS,
    OLD,
    all_of,
    any_of,
    class_in,
    is_nested,
    is_type,
    lacks,
    list_temperature_from,
    model_in,
    mscales,
    new_words_alone,
    plain,
    refuse,
    taken_as,
    to,
    unless,
    yarn_temperature,
)

_BUILDERS = "onnxruntime-genai 0.18.0 onnxruntime_genai/models/builders"
_BASE = f"{_BUILDERS}/base.py Model.make_rope_init"

_llama = class_in("LlamaForCausalLM", "NemotronForCausalLM", "SmolLM3ForCausalLM")
_phi = class_in("Phi3ForCausalLM", "PhiMoEForCausalLM", "Phi3SmallForCausalLM", "Phi3VForCausalLM", "Phi4MMForCausalLM")
_gemma4 = model_in("gemma4*")


def _ramp_outside(layer: Layer) -> bool:
    """Whether an end of yarn's ramp lies outside the head: the builder asserts 0 < low < high < d/2 - 1."""
    rotation = layer.rotation
    if rotation.rope_type != "yarn":
        return False

    def dimension(rotations: float) -> float:
        return (
            rotation.head_dim * math.log(rotation.trained / (rotations * 2 * math.pi)) / (2 * math.log(rotation.theta))
        )

    return not 0 < dimension(rotation.beta_fast) < dimension(rotation.beta_slow) < rotation.head_dim / 2 - 1


def _one_mscale(layer: Layer) -> bool:
    return mscales(layer) and bool(layer.rotation.mscale) and not layer.rotation.mscale_all_dim


ONNX = Reader(
    "ONNX Runtime GenAI",
    "onnx",
    "0.18.0",
    "read",
    f"{_BASE}; {_BUILDERS}/llama.py, phi.py",
    "the config as Transformers reads it, by its rope_type, which Llama's builder only reads for llama3",
    by_layer=("gemma4*",),
    deviations=(
        Deviation(
            "reads only rope_theta and rope_scaling at the top",
            all_of(new_words_alone, unless(is_nested)),
            taken_as(OLD),
            "microsoft/onnxruntime-genai#2311",
            BOTH_SPELLINGS,
            ended="microsoft/onnxruntime-genai#2311, 21 July 2026",
        ),
        Deviation(
            "reads only llama3 in its builder for Llama, Nemotron and SmolLM3, and silently ignores other types",
            all_of(_llama, unless(is_type("default", "llama3"))),
            plain,
            f"{_BUILDERS}/llama.py LlamaModel.make_rope_init",
        ),
        Deviation(
            "refuses the type in its builder for this model (NotImplementedError)",
            all_of(
                unless(any_of(_llama, _gemma4, all_of(_phi, is_type("longrope")))),
                unless(is_type("default", "linear", "yarn")),
            ),
            refuse,
            _BASE,
            silent=False,
        ),
        Deviation(
            "fails in its builder for Phi-3 without the key type (KeyError)",
            all_of(_phi, is_type("longrope"), lacks("type")),
            refuse,
            f"{_BUILDERS}/phi.py Phi3MiniLongRoPEModel.make_rope_init",
            'write "type": "longrope" beside rope_type',
            silent=False,
        ),
        Deviation(
            "fails at yarn without beta_fast and beta_slow (ZeroDivisionError)",
            all_of(is_type("yarn"), any_of(lacks("beta_fast"), lacks("beta_slow"))),
            refuse,
            f"{_BUILDERS}/base.py make_inv_freq_rescaled_with_ntk",
            'write "beta_fast": 32.0 and "beta_slow": 1.0',
            silent=False,
        ),
        Deviation(
            "fails if an end of yarn's ramp is not within the head (AssertionError)",
            _ramp_outside,
            refuse,
            f"{_BUILDERS}/base.py make_inv_freq_rescaled_with_ntk",
            silent=False,
        ),
        Deviation(
            "does not round the ends of yarn's ramp",
            is_type("yarn"),
            to(truncate=False),
            f"{_BUILDERS}/base.py make_inv_freq_rescaled_with_ntk",
            'write "truncate": false for a checkpoint that is trained so',
        ),
        Deviation(
            "ignores attention_factor",
            yarn_temperature,
            to(attention_factor=None),
            f"{_BASE}, make_mscale",
        ),
        Deviation(
            "takes mscale itself for the temperature if mscale_all_dim is missing",
            _one_mscale,
            lambda layer: to(attention_factor=layer.rotation.mscale, mscale=None)(layer),
            f"{_BUILDERS}/base.py make_mscale",
            "write both, or none",
        ),
        Deviation(
            "reads short_mscale and long_mscale, not attention_factor; without them it computes "
            "sqrt(1 + ln k / ln L), k = max_position_embeddings / L",
            all_of(_phi, is_type("longrope")),
            list_temperature_from("long_mscale"),
            f"{_BUILDERS}/phi.py Phi3MiniLongRoPEModel.make_rope_init",
            EXPORT_LISTS.replace("{key}", "onnx"),
        ),
    ),
    unknown=f"What it takes where a key is in the entry and at the top, and {ORIGINAL} in both. Builders of Gemma 4 "
    "and HunYuan have code of their own.",
)
