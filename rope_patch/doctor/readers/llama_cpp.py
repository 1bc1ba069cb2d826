"""llama.cpp: its converter writes a config into a GGUF file, and its loader computes positions from that file."""

from __future__ import annotations

from dataclasses import replace

from ..entries import ORIGINAL
from ..reader import Case, Deviation, Layer, Limit, Reader
from ..rotation import Rotation
from .cases import (
    DEEPSEEK_CLASSES,
    all_of,
    any_of,
    class_in,
    from_config,
    is_type,
    is_yarn,
    lacks,
    long_for_all,
    mscales,
    plain,
    to,
    two_lists,
    unless,
    yarn_temperature,
)

_CONVERTER = "ggml-org/llama.cpp@00bd27a conversion/base.py TextModel.set_gguf_parameters"
_LLAMA = "ggml-org/llama.cpp@0274f0f conversion/llama.py LlamaModel"
_LOADER = "ggml-org/llama.cpp@001d906 src/llama-context.cpp"
_GGUF = "export a GGUF file: rope-patch export PLAIN.gguf --scheme SCHEME --output OUT.gguf"

LLAMA_CLASSES = (
    *("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "LLaMAForCausalLM", "VLlama3ForCausalLM"),
    *("LlavaForConditionalGeneration", "VoxtralForConditionalGeneration", "IQuestCoderForCausalLM", "LlamaModel"),
)
"""Architectures of the converter's class for Llama, which writes the factors of `llama3`."""

_OWN_CLASSES = (
    *("ArceeForCausalLM", "GraniteForCausalLM", "SmolLM3ForCausalLM", "ApertusForCausalLM", "DeciLMForCausalLM"),
    *("ExaoneForCausalLM", "Exaone4ForCausalLM"),
)
"""Architectures whose converter may take the factors from Llama's class or from its own; its source was not read."""

_LISTS_CLASSES = ("Phi3ForCausalLM", "MiniCPM3ForCausalLM", "MiniCPMForCausalLM")
_deepseek = class_in(*DEEPSEEK_CLASSES)


def _from_config(*cases: Case) -> Case:
    return all_of(from_config, *cases)


def _without_rotated_part(layer: Layer) -> Rotation:
    return replace(plain(layer), partial=1.0)


def _deepseek_temperature(layer: Layer) -> Rotation:
    """The temperature: 1 with mscale_all_dim, whatever mscale is; else 0.1 ln k + 1."""
    temperature = 1.0 if layer.rotation.mscale_all_dim else None
    return replace(layer.rotation, attention_factor=temperature, mscale=None, mscale_all_dim=None)


LLAMA_CPP = Reader(
    "llama.cpp",
    "llama.cpp",
    "0c1e570",
    "run",
    f"llama-cpp-python 0.3.36; {_CONVERTER}; {_LOADER}",
    "the config as the installed Transformers reads it, else config.json itself, with rope_parameters before "
    "rope_scaling; theta of the entry before theta at the top",
    by_layer=("*",),
    unchecked=("deepseek_v4",),
    start="convert_hf_to_gguf.py writes it into the GGUF; start it with -c {length}",
    limits=(Limit(("yarn", "llama3", "longrope")),),
    deviations=(
        Deviation(
            "drops a scaling whose factor is null or missing",
            _from_config(is_type("yarn", "linear"), lacks("factor")),
            plain,
            _CONVERTER,
            "write the factor",
        ),
        Deviation(
            "drops yarn in its converter for Qwen2-MoE and Qwen3-MoE",
            _from_config(is_type("yarn"), class_in("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")),
            plain,
            "ggml-org/llama.cpp#13322",
            ended="ggml-org/llama.cpp#13331, 6 May 2025",
        ),
        Deviation(
            "computes the temperature from mscale_all_dim in its code for DeepSeek, and takes 1 if the config has it",
            _from_config(_deepseek, is_type("yarn")),
            _deepseek_temperature,
            _LOADER,
        ),
        Deviation(
            "computes the temperature 0.1 ln k + 1 itself",
            _from_config(any_of(yarn_temperature, mscales), unless(_deepseek)),
            to(attention_factor=None, mscale=None, mscale_all_dim=None),
            f"{_CONVERTER}; {_LOADER}",
            "start it with --override-kv ARCH.rope.scaling.attn_factor=float:A, A = attention_factor / (0.1 ln k + 1)",
        ),
        Deviation(
            "rounds the ends of the ramp and does not support truncate=false",
            _from_config(is_yarn(truncate=False)),
            to(truncate=True),
            f"{_CONVERTER}; {_LOADER}",
        ),
        Deviation(
            "reads L at the top of the config and takes 8192 without it",
            _from_config(
                is_type("llama3"), class_in(*LLAMA_CLASSES), lambda layer: ORIGINAL not in layer.source.fields
            ),
            to(original=8192),
            f"{_LLAMA}.generate_extra_tensors",
            f'write "{ORIGINAL}" at the top of the config, too',
        ),
        Deviation(
            "writes the factors of llama3 only in its converter for Llama, Mistral and Mixtral",
            _from_config(is_type("llama3"), unless(class_in(*LLAMA_CLASSES, *_OWN_CLASSES))),
            plain,
            f"{_LLAMA}.generate_extra_tensors; conversion/qwen.py@03173d5",
            _GGUF,
        ),
        Deviation(
            "writes lists of factors only for a few architectures, such as Phi-3",
            _from_config(is_type("longrope"), unless(class_in(*_LISTS_CLASSES))),
            plain,
            _CONVERTER,
            _GGUF,
        ),
        Deviation(
            "uses the long factors for short texts, too, once its context is larger than L",
            two_lists,
            long_for_all,
            "ggml-org/llama.cpp#24823 (builds b9608 and b9728)",
            "start it with -c L for short texts",
            partly=True,
        ),
        Deviation(
            "does not know proportional, and keeps the plain frequencies",
            _from_config(is_type("proportional")),
            _without_rotated_part,
            f"{_CONVERTER}; ggml-org/llama.cpp#21403",
            _GGUF,
            silent=False,
        ),
        Deviation("keeps the checkpoint's base", _from_config(is_type("dynamic")), plain, _CONVERTER),
        Deviation(
            "writes no scaling for sliding layers",
            _from_config(unless(is_type("default"))),
            plain,
            _CONVERTER,
            layers=("sliding_attention",),
        ),
        Deviation(
            "rotates the whole head of a Llama, whatever partial_rotary_factor is",
            _from_config(class_in(*LLAMA_CLASSES), lambda layer: layer.rotation.partial != 1),
            to(partial=1.0),
            f"{_LLAMA}.set_gguf_parameters",
        ),
    ),
    unknown="Which builds before December 2025 did not read rope_parameters (ggml-org/llama.cpp#18013), and since when "
    "the sliding layers of Gemma 3 have their own scale (#14367). Which converter classes beside Llama's write the "
    "factors of llama3.",
)
