"""vLLM: the config as Transformers 5 reads it, then `get_rope`."""

from __future__ import annotations

from dataclasses import replace

from ..entries import ORIGINAL
from ..reader import Deviation, Layer, Limit, Reader
from ..rotation import NEED_L, Rotation
from .cases import (
    DEEPSEEK_CLASSES,
    EXPORT_BASE,
    EXPORT_LISTS,
    all_of,
    any_of,
    as_yarn,
    base_of_longest,
    class_in,
    grown_base,
    has_axes,
    is_type,
    lacks,
    list_temperature_from,
    long_for_all,
    model_in,
    mscales,
    null_factor,
    plain,
    ratio,
    refuse,
    to,
    two_lists,
    unless,
    wrote,
    yarn_temperature,
)
from .transformers import BY_CONFIG

_PACKAGE = "vllm 0.32.0 vllm/model_executor"
_ROPE = f"{_PACKAGE}/layers/rotary_embedding"
_GET_ROPE = f"{_ROPE}/__init__.py get_rope"

_gpt_oss = class_in("GptOssForCausalLM")
_deepseek = class_in(*DEEPSEEK_CLASSES)
_by_class = any_of(_gpt_oss, _deepseek)


def _names_differ(layer: Layer) -> bool:
    """Whether vLLM takes `type` and `rope_type` for different types."""
    old, new = layer.entry.get("type"), layer.entry.get("rope_type")
    same = (("su", "longrope"), ("mrope", "default"))
    return old is not None and new is not None and old != new and (old, new) not in same


def _integer_factor(layer: Layer) -> bool:
    return layer.rotation.rope_type == "linear" and isinstance(layer.entry.get("factor"), int)


def _growth(layer: Layer) -> float:
    """The growth of the base under `dynamic`: k N / L - (k - 1), with N = max_position_embeddings and L =
    max_trained_positions, which is N if it is missing.
    """
    rotation, trained = layer.rotation, float(layer.entry.get("max_trained_positions") or layer.rotation.longest)
    return rotation.factor * rotation.longest / trained - (rotation.factor - 1)


def _one_base(layer: Layer) -> Rotation:
    return grown_base(_growth(layer), layer.rotation)


def _own_width(layer: Layer) -> Rotation:
    return replace(layer.rotation, partial=min(float(layer.entry["rope_dim"]) / layer.rotation.head_dim, 1.0))


VLLM = Reader(
    "vLLM",
    "vllm",
    "0.32.0",
    "run",
    _GET_ROPE,
    "the config as Transformers 5 reads it",
    by_layer=("gemma3*", "gemma4*"),
    start="start it with --max-model-len {length}",
    record=", unless rope_patch is installed with it, on a CPU",
    limits=(
        Limit(("llama3", "longrope")),
        Limit(("yarn",), begun="vllm-project/vllm#56446, September 2026; before, it multiplied L by the factor"),
    ),
    deviations=(
        *BY_CONFIG,
        Deviation(
            "does not start, because type and rope_type differ",
            _names_differ,
            refuse,
            "vllm 0.32.0 vllm/transformers_utils/config.py patch_legacy_rope_type",
            "write one of the two",
            silent=False,
        ),
        Deviation(
            "does not start with a factor of linear that is an integer",
            _integer_factor,
            refuse,
            f"{_ROPE}/linear_scaling_rope.py LinearScalingRotaryEmbedding",
            'write the factor as a float: "factor": 4.0',
            silent=False,
        ),
        Deviation(
            "does not start with yarn whose factor is null (TypeError)",
            null_factor,
            refuse,
            f"{_ROPE}/yarn_scaling_rope.py",
            "write the factor, max_position_embeddings / L",
            silent=False,
        ),
        Deviation(
            "computes the ramp of yarn from 4 L, the size of its table for videos",
            all_of(is_type("yarn"), has_axes, model_in("qwen2_vl*", "qwen2_5_vl*")),
            lambda layer: replace(layer.rotation, original=4 * layer.rotation.trained),
            f"{_ROPE}/mrope.py MRotaryEmbedding.__init__",
        ),
        Deviation(
            "takes rope_dim for the number of dimensions that rotate",
            wrote("rope_dim"),
            _own_width,
            _GET_ROPE,
        ),
        Deviation(
            f"does not start in its code for DeepSeek without {ORIGINAL} (KeyError)",
            all_of(_deepseek, unless(is_type("default", *NEED_L)), lacks(ORIGINAL)),
            refuse,
            f"{_PACKAGE}/models/deepseek_v2.py; {_GET_ROPE}",
            silent=False,
        ),
        Deviation(
            "takes every type for yarn in its code for DeepSeek, without attention_factor and truncate",
            all_of(_deepseek, unless(is_type("default"))),
            as_yarn(ratio(1.0, 0.0)),
            f"{_PACKAGE}/models/deepseek_v2.py; {_ROPE}/deepseek_scaling_rope.py",
        ),
        Deviation(
            "does not start in its code for GPT-OSS without beta_fast and beta_slow (KeyError)",
            all_of(_gpt_oss, any_of(lacks("beta_fast"), lacks("beta_slow"))),
            refuse,
            f"{_PACKAGE}/models/gpt_oss.py",
            'write "beta_fast": 32.0 and "beta_slow": 1.0',
            silent=False,
        ),
        Deviation(
            "reads no attention_factor, mscale and mscale_all_dim in its code for GPT-OSS",
            all_of(_gpt_oss, any_of(yarn_temperature, mscales)),
            to(attention_factor=None, mscale=None, mscale_all_dim=None),
            f"{_PACKAGE}/models/gpt_oss.py",
        ),
        Deviation(
            "ignores attention_factor, mscale and mscale_all_dim, and computes 0.1 ln k + 1",
            all_of(any_of(yarn_temperature, mscales), unless(_by_class)),
            to(attention_factor=None, mscale=None, mscale_all_dim=None),
            "vllm-project/vllm@926c71f vllm/model_executor/layers/rotary_embedding/__init__.py; "
            "vllm-project/vllm#48351",
            ended="pull requests of June to September 2026 (vllm-project/vllm#46280, #48351, #48623, #56446)",
        ),
        Deviation(
            "drops yarn if there is an mrope_section",
            all_of(is_type("yarn"), has_axes),
            plain,
            "vllm-project/vllm#25384",
            ended="September 2025",
        ),
        Deviation(
            "fails at yarn beside mrope_section (AttributeError: truncate)",
            all_of(is_type("yarn"), has_axes),
            refuse,
            "vllm-project/vllm#35080",
            ended="vllm-project/vllm#35080, opened in February 2026",
            silent=False,
        ),
        Deviation(
            "uses the long factors for short texts, too, once its limit is beyond L",
            two_lists,
            long_for_all,
            f"{_ROPE}/phi3_long_rope_scaled_rope.py; vllm-project/vllm#27431",
            "start it with --max-model-len L for short texts, and a second one for long texts",
            partly=True,
        ),
        Deviation(
            "reads short_mscale and long_mscale, not attention_factor; without them it computes "
            "sqrt(1 + ln k / ln L), k = max_position_embeddings / L",
            is_type("longrope"),
            list_temperature_from("long_mscale"),
            f"{_ROPE}/phi3_long_rope_scaled_rope.py",
            "write short_mscale and long_mscale with the value of attention_factor",
        ),
        Deviation(
            "ignores the factor",
            is_type("proportional"),
            to(factor=1.0),
            f"{_ROPE}/gemma4_rope.py",
            EXPORT_LISTS.replace("{key}", "vllm"),
        ),
        Deviation(
            "does not start if max_trained_positions of dynamic give a negative base",
            all_of(is_type("dynamic"), lambda layer: _growth(layer) <= 0),
            refuse,
            f"{_ROPE}/dynamic_ntk_scaling_rope.py",
            "write max_trained_positions, at most the length that the checkpoint was trained on",
            silent=False,
        ),
        Deviation(
            "uses one base for all texts, computed from max_trained_positions; without that key, the checkpoint's own "
            "base",
            is_type("dynamic"),
            _one_base,
            f"{_ROPE}/dynamic_ntk_scaling_rope.py; {_GET_ROPE}",
            EXPORT_BASE,
        ),
        Deviation(
            "uses one base, for max_position_embeddings times factor",
            is_type("dynamic"),
            base_of_longest,
            "vllm-project/vllm#41236",
            EXPORT_BASE,
            ended="vllm-project/vllm#41277, opened in April 2026",
        ),
    ),
    unknown="Which releases brought the fixes. What it does with mrope_section beside linear, dynamic, llama3 and "
    "longrope, and with alpha of dynamic.",
)
