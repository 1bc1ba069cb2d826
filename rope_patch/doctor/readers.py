"""The table of readers: one row for each program, with what it computes otherwise than the config says.

A new row needs a source that somebody can open: a repository, a file and a version, or a thread. How each was
established is in docs/serving.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .entries import Spelling
from .reader import Case, Deviation, Reader
from .rotation import Rotation
from .sources import Source

LLAMA_CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM")
"""Architectures for which llama.cpp's converter writes the factors of `llama3`."""

DEEPSEEK_CLASSES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
"""Architectures for which some servers have code of their own, which takes every type for yarn."""

_OLD = Spelling(keys=("rope_scaling",), inner_theta=False, nested=False)
"""The words of Transformers before 5: `rope_scaling`, and `rope_theta` at the top."""


def _is(*types: str) -> Case:
    return lambda rotation, source: rotation.rope_type in types


def _has(**values: Any) -> Case:
    """Whether the fields of a rotation have these values."""
    return lambda rotation, source: all(getattr(rotation, name) == value for name, value in values.items())


def _all(*cases: Case) -> Case:
    return lambda rotation, source: all(case(rotation, source) for case in cases)


def _class_in(*names: str) -> Case:
    return lambda rotation, source: any(name in names for name in source.architectures)


def _not(case: Case) -> Case:
    return lambda rotation, source: not case(rotation, source)


def _to(**values: Any) -> Callable[[Rotation, Source], Rotation]:
    return lambda rotation, source: replace(rotation, **values)


def _plain(rotation: Rotation, source: Source) -> Rotation:
    """The rotation without its scaling."""
    return replace(rotation, rope_type="default", factor=1.0, original=None)


def _own_temperature(rotation: Rotation, source: Source) -> bool:
    return rotation.rope_type == "yarn" and rotation.attention_factor is not None


def _long_for_all(rotation: Rotation, source: Source) -> Rotation:
    return replace(rotation, short_factor=rotation.long_factor)


def _two_lists(rotation: Rotation, source: Source) -> bool:
    return rotation.rope_type == "longrope" and rotation.short_factor != rotation.long_factor


def _longest_base(rotation: Rotation, source: Source) -> Rotation:
    """`dynamic` with the one base of the longest text, max_position_embeddings times factor."""
    length = round(rotation.longest * rotation.factor)
    growth = rotation.factor * length / rotation.longest - (rotation.factor - 1)
    theta = rotation.theta * growth ** (rotation.width / (rotation.width - 2))
    return replace(rotation, rope_type="default", theta=theta, factor=1.0)


def _nested(rotation: Rotation, source: Source) -> bool:
    entry = source.fields.get("rope_parameters") or source.fields.get("rope_scaling") or {}
    return isinstance(entry, dict) and any(isinstance(value, dict) for value in entry.values())


def _mscales(rotation: Rotation, source: Source) -> bool:
    return rotation.rope_type == "yarn" and bool(rotation.mscale or rotation.mscale_all_dim)


def _l_not_at_top(rotation: Rotation, source: Source) -> bool:
    return rotation.rope_type in ("llama3", "longrope") and "original_max_position_embeddings" not in source.fields


def _l_missing(rotation: Rotation, source: Source) -> bool:
    entry = source.fields.get("rope_scaling") or source.fields.get("rope_parameters") or {}
    name = "original_max_position_embeddings"
    return rotation.original is not None and name not in entry and name not in source.fields


def _integer_factor(rotation: Rotation, source: Source) -> bool:
    entry = source.fields.get("rope_scaling") or source.fields.get("rope_parameters") or {}
    return rotation.rope_type == "linear" and isinstance(entry.get("factor"), int)


def _lists_temperature(rotation: Rotation, source: Source) -> bool:
    return rotation.rope_type == "longrope" and rotation.attention_factor is not None


def _mscale_of_lists(name: str) -> Callable[[Rotation, Source], Rotation]:
    """`longrope` whose temperature is read under this name, or follows from the lengths."""

    def read(rotation: Rotation, source: Source) -> Rotation:
        entry = source.fields.get("rope_scaling") or source.fields.get("rope_parameters") or {}
        found = entry.get(name)
        factor = rotation.longest / rotation.trained
        return replace(rotation, attention_factor=float(found) if found is not None else None, factor=factor)

    return read


def _yarn_of_deepseek(rotation: Rotation, source: Source) -> Rotation:
    return replace(rotation, rope_type="yarn", attention_factor=None, truncate=True, original=rotation.trained)


_DEEPSEEK_WORDS = "takes every type for yarn in its code for DeepSeek, without attention_factor and truncate"
_LISTS_CURE = "write two equal lists: rope-patch export DIR --scheme SCHEME --for {key} --output OUT"


def _equal_lists(key: str) -> str:
    return _LISTS_CURE.replace("{key}", key)


_VLLM = "vllm-project/vllm@0.32.0 vllm/model_executor/layers/rotary_embedding/__init__.py get_rope"
_SGLANG = "sgl-project/sglang@0.5.23 python/sglang/srt/layers/rotary_embedding/factory.py"
_CONVERTER = "ggml-org/llama.cpp@0c1e570 conversion/base.py and conversion/llama.py"
_MLX = "ml-explore/mlx-lm@0.32.2 mlx_lm/models/rope_utils.py"
_ONNX = "microsoft/onnxruntime-genai@0.18.0 src/python/py/models/builders/base.py and llama.py"

READERS: tuple[Reader, ...] = (
    Reader(
        "Transformers 5",
        "transformers",
        "5.23",
        "run",
        "transformers/modeling_rope_utils.py",
        record=": load it with rope_patch.from_pretrained",
        deviations=(
            Deviation(
                "rounds the ends of the ramp where parameters are nested by layer type: it looks for truncate at the "
                "top alone",
                _all(_nested, _has(rope_type="yarn", truncate=False)),
                _to(truncate=True),
                "huggingface/transformers@5.23 src/transformers/modeling_rope_utils.py _compute_yarn_parameters",
            ),
        ),
    ),
    Reader(
        "Transformers 4",
        "transformers4",
        "4.57",
        "read",
        "transformers/modeling_rope_utils.py",
        spelling=_OLD,
        record=": load it with rope_patch.from_pretrained",
    ),
    Reader(
        "vLLM",
        "vllm",
        "0.32.0",
        "run",
        _VLLM,
        start="--max-model-len {length}",
        record=", unless rope_patch is installed with it, on a CPU",
        cut=("llama3", "longrope"),
        deviations=(
            Deviation(
                "does not start with a factor of linear that is an integer",
                _integer_factor,
                lambda rotation, source: None,
                _VLLM,
                'write the factor as a float: "factor": 4.0',
            ),
            Deviation(
                _DEEPSEEK_WORDS,
                _all(_class_in(*DEEPSEEK_CLASSES), _not(_is("default"))),
                _yarn_of_deepseek,
                "vllm-project/vllm@0.32.0 vllm/model_executor/models/deepseek_v2.py",
            ),
            Deviation(
                "uses the long factors for short texts, too, once its limit is beyond L",
                _two_lists,
                _long_for_all,
                _VLLM,
                "start it with --max-model-len L for short texts, and a second one for long texts",
                partly=True,
            ),
            Deviation(
                "reads short_mscale and long_mscale, not attention_factor",
                _lists_temperature,
                _mscale_of_lists("long_mscale"),
                _VLLM,
                "write short_mscale and long_mscale with the value of attention_factor",
            ),
            Deviation("ignores the factor", _is("proportional"), _to(factor=1.0), _VLLM, _equal_lists("vllm")),
            Deviation(
                "uses one base, for the longest text that it serves",
                _is("dynamic"),
                _longest_base,
                "vllm-project/vllm@3cfbaf3 vllm/model_executor/layers/rotary_embedding/dynamic_ntk_scaling_rope.py",
                "choose one length: rope-patch export DIR --scheme ntk:factor=k --output OUT",
            ),
        ),
    ),
    Reader(
        "llama.cpp",
        "llama.cpp",
        "0c1e570",
        "run",
        _CONVERTER,
        start="-c {length}",
        cut=("yarn", "llama3", "longrope"),
        deviations=(
            Deviation(
                "computes the temperature 0.1 ln k + 1 itself",
                lambda rotation, source: _own_temperature(rotation, source) or _mscales(rotation, source),
                _to(attention_factor=None, mscale=None, mscale_all_dim=None),
                f"{_CONVERTER}; src/llama-context.cpp",
                "start it with --override-kv ARCH.rope.scaling.attn_factor=float:A, A = attention_factor / (0.1 ln k + 1)",
            ),
            Deviation(
                "rounds the ends of the ramp",
                _has(rope_type="yarn", truncate=False),
                _to(truncate=True),
                _CONVERTER,
            ),
            Deviation(
                "reads L at the top of the config and takes 8192 without it",
                _all(_l_not_at_top, _is("llama3"), _class_in(*LLAMA_CLASSES)),
                _to(original=8192),
                f"{_CONVERTER} generate_extra_tensors",
                'write "original_max_position_embeddings" at the top of the config, too',
            ),
            Deviation(
                f"writes the factors of llama3 for {', '.join(LLAMA_CLASSES)} only",
                _all(_is("llama3"), _not(_class_in(*LLAMA_CLASSES))),
                _plain,
                _CONVERTER,
            ),
            Deviation(
                "writes lists of factors for a few architectures only, such as Phi-3",
                _all(
                    _is("longrope"),
                    lambda rotation, source: source.kind == "config",
                    _not(_class_in("Phi3ForCausalLM", "MiniCPM3ForCausalLM", "MiniCPMForCausalLM")),
                ),
                _plain,
                _CONVERTER,
                "export a GGUF file: rope-patch export PLAIN.gguf --scheme SCHEME --output OUT.gguf",
            ),
            Deviation(
                "has no proportional, and keeps the plain frequencies",
                _is("proportional"),
                _plain,
                _CONVERTER,
                "export a GGUF file: rope-patch export PLAIN.gguf --scheme SCHEME --output OUT.gguf",
            ),
            Deviation("keeps the checkpoint's base", _is("dynamic"), _plain, _CONVERTER),
        ),
    ),
    Reader(
        "mlx-lm",
        "mlx",
        "0.32.2",
        "run",
        _MLX,
        spelling=_OLD,
        deviations=(
            Deviation(
                "ignores attention_factor and computes 0.1 ln k + 1",
                _own_temperature,
                _to(attention_factor=None),
                _MLX,
                _equal_lists("mlx"),
            ),
            Deviation(
                "counts one of mscale and mscale_all_dim alone",
                lambda rotation, source: (
                    _mscales(rotation, source) and not (rotation.mscale and rotation.mscale_all_dim)
                ),
                lambda rotation, source: replace(
                    rotation,
                    attention_factor=_mlx_scale(rotation.factor, rotation.mscale, 1.0)
                    / _mlx_scale(rotation.factor, rotation.mscale_all_dim, 0.0),
                ),
                _MLX,
                partly=True,
            ),
            Deviation(
                "rounds the ends of the ramp",
                _has(rope_type="yarn", truncate=False),
                _to(truncate=True),
                _MLX,
                _equal_lists("mlx"),
            ),
            Deviation(
                "takes L = 4096 for yarn and 8192 for llama3 where it is missing",
                _l_missing,
                lambda rotation, source: replace(rotation, original=8192 if rotation.rope_type == "llama3" else 4096),
                _MLX,
                'write "original_max_position_embeddings" into the entry',
            ),
            Deviation("uses the long factors for short texts, too", _two_lists, _long_for_all, _MLX, partly=True),
            Deviation(
                "ignores attention_factor and computes sqrt(1 + ln k / ln L)",
                _lists_temperature,
                _mscale_of_lists("-"),
                _MLX,
                _equal_lists("mlx"),
            ),
            Deviation(
                "grows the base by the position of each token",
                _is("dynamic"),
                _plain,
                _MLX,
                "choose one length: rope-patch export DIR --scheme ntk:factor=k --output OUT",
            ),
        ),
    ),
    Reader(
        "SGLang",
        "sglang",
        "0.5.23",
        "read",
        _SGLANG,
        start="--context-length {length}",
        deviations=(
            Deviation(
                _DEEPSEEK_WORDS,
                _all(_class_in(*DEEPSEEK_CLASSES), _not(_is("default"))),
                _yarn_of_deepseek,
                "sgl-project/sglang@0.5.23 python/sglang/srt/models/deepseek_v2.py",
            ),
            Deviation(
                "ignores attention_factor; it reads attn_factor and mscale",
                _own_temperature,
                _to(attention_factor=None),
                _SGLANG,
                "write attn_factor = attention_factor / (0.1 ln k + 1)",
            ),
            Deviation(
                "gives all texts of a batch the long factors if one is beyond L",
                _two_lists,
                _long_for_all,
                _SGLANG,
                partly=True,
            ),
            Deviation("ignores the factor", _is("proportional"), _to(factor=1.0), _SGLANG, _equal_lists("sglang")),
            Deviation(
                "uses one base, for the longest text that it serves",
                _is("dynamic"),
                _longest_base,
                _SGLANG,
                "choose one length: rope-patch export DIR --scheme ntk:factor=k --output OUT",
            ),
        ),
    ),
    Reader(
        "ONNX Runtime GenAI",
        "onnx",
        "0.18.0",
        "read",
        _ONNX,
        deviations=(
            Deviation(
                "reads llama3 alone in its builder for Llama and silently ignores other types",
                _all(_class_in(*LLAMA_CLASSES), _not(_is("default", "llama3"))),
                _plain,
                _ONNX,
            ),
            Deviation(
                "refuses the type in its other builders",
                _all(_not(_class_in(*LLAMA_CLASSES)), _not(_is("default", "llama3", "linear", "yarn"))),
                lambda rotation, source: None,
                _ONNX,
                silent=False,
            ),
            Deviation("ignores attention_factor", _own_temperature, _to(attention_factor=None), _ONNX),
        ),
    ),
)


def _mlx_scale(factor: float, mscale: float | None, default: float) -> float:
    """mlx-lm's temperature of one of the two words."""
    return 0.1 * (default if mscale is None else mscale) * math.log(factor) + 1.0 if factor > 1 else 1.0
