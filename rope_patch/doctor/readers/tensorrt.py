"""TensorRT-LLM, its PyTorch backend."""

from __future__ import annotations

from dataclasses import replace

from ..entries import Spelling
from ..reader import Deviation, Layer, Reader
from ..rotation import Rotation
from .cases import (
    EXPORT_BASE,
    EXPORT_LISTS,
    all_of,
    any_of,
    grown_base,
    is_type,
    is_yarn,
    list_temperature_from,
    long_for_all,
    model_in,
    named,
    ratio,
    refuse,
    scale,
    to,
    two_lists,
    unless,
    yarn_temperature,
)

_PARAMS = "NVIDIA/TensorRT-LLM tensorrt_llm/_torch/attention_backend/interface.py RopeParams.from_config"
_UTILS = "NVIDIA/TensorRT-LLM RopeEmbeddingUtils, RotaryScalingType"
_gemma4 = model_in("gemma4*")


def _by_alpha(layer: Layer) -> Rotation:
    """Scale `dynamic` by alpha, which is 1 if it is missing."""
    return grown_base(float(layer.entry.get("alpha") or 1.0), layer.rotation)


def _twice(layer: Layer) -> Rotation:
    """Take attention_factor for mscale, so that the logarithm is applied twice."""
    rotation = layer.rotation
    return replace(rotation, attention_factor=scale(rotation.factor, rotation.attention_factor or 1.0))


TENSORRT = Reader(
    "TensorRT-LLM",
    "tensorrt-llm",
    "51ea5c9 and newer",
    "read",
    f"{_PARAMS}@51ea5c9 and a newer stored version; {_UTILS}",
    "every key of a flat rope_parameters before the same key at the top, with type before rope_type. It takes 10000 if "
    "theta is nowhere",
    spelling=Spelling(type_first=True),
    by_layer=("gemma4*",),
    deviations=(
        Deviation(
            "fails, because it does not know this type (ValueError)",
            any_of(all_of(is_type("proportional"), unless(_gemma4)), named("su")),
            refuse,
            _UTILS,
            EXPORT_LISTS.replace("{key}", "tensorrt-llm"),
            silent=False,
        ),
        Deviation(
            "spreads the exponents over the dimensions that rotate, not over the head, in its class for Gemma 4, and "
            "ignores the factor",
            all_of(is_type("proportional"), _gemma4),
            to(rope_type="default", factor=1.0),
            "NVIDIA/TensorRT-LLM, its class for Gemma 4",
        ),
        Deviation(
            "reads alpha of dynamic, not the factor; without alpha it keeps the checkpoint's base",
            is_type("dynamic"),
            _by_alpha,
            _UTILS,
            EXPORT_BASE,
        ),
        Deviation(
            "takes attention_factor for mscale in its class for Laguna, so the logarithm is applied twice",
            all_of(model_in("laguna"), yarn_temperature),
            _twice,
            "NVIDIA/TensorRT-LLM#16379",
            ended="14 July 2026",
        ),
        Deviation(
            "ignores attention_factor, uses mscale and mscale_all_dim even if one is missing, and takes 1 for a "
            "missing mscale and 0 for a missing mscale_all_dim",
            all_of(is_type("yarn"), unless(model_in("laguna"))),
            ratio(1.0, 0.0),
            _PARAMS,
            EXPORT_LISTS.replace("{key}", "tensorrt-llm"),
        ),
        Deviation("rounds the ends of the ramp", is_yarn(truncate=False), to(truncate=True), _PARAMS),
        Deviation(
            "uses one list for all texts: the long one, if its limit is beyond L",
            two_lists,
            long_for_all,
            _UTILS,
            partly=True,
        ),
        Deviation(
            "computes the temperature sqrt(1 + ln k / ln L), k = max_position_embeddings / L, without "
            "attention_factor, short_mscale and long_mscale",
            is_type("longrope"),
            list_temperature_from(),
            _UTILS,
            EXPORT_LISTS.replace("{key}", "tensorrt-llm"),
        ),
    ),
    unknown="Which release reads rope_parameters: 51ea5c9 did not (theta 10000). With Transformers 4, yarn without L "
    "has L = 1024. How parameters by layer type reach its model classes.",
)
