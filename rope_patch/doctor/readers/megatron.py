"""Megatron-Core, with the settings that Megatron-Bridge derives from a config of Hugging Face."""

from __future__ import annotations

from ..entries import ORIGINAL, Spelling
from ..reader import Deviation, Layer, Reader
from .cases import (
    L_IN_ENTRY,
    all_of,
    any_of,
    class_in,
    is_type,
    model_in,
    plain,
    ratio,
    to,
    unless,
    wrote,
    yarn_temperature,
)

_CORE = "megatron-core 0.19.2 megatron/core/models/common/embeddings"
_BRIDGE = "NVIDIA-NeMo/Megatron-Bridge src/megatron/bridge/models/conversion/model_bridge.py"
_LLAMA_BRIDGE = "NVIDIA-NeMo/Megatron-Bridge LlamaBridge"

_llama = class_in("LlamaForCausalLM")
_mistral = class_in("MistralForCausalLM")
_gemma3_linear = all_of(model_in("gemma3*"), is_type("linear"))


def _a_zero(layer: Layer) -> bool:
    return layer.rotation.rope_type == "yarn" and 0 in (layer.entry.get("mscale"), layer.entry.get("mscale_all_dim"))


MEGATRON = Reader(
    "Megatron-Core with Megatron-Bridge",
    "megatron",
    "0.19.2",
    "read",
    f"{_CORE}/rotary_pos_embedding.py, yarn_rotary_pos_embedding.py; {_BRIDGE}",
    "command-line arguments, which the bridge fills from a config: theta at the top before that of the entry, type "
    "before rope_type, and the scaling of yarn; its bridge for Llama also fills in linear and llama3",
    spelling=Spelling(top_theta_first=True, type_first=True),
    by_layer=("gemma3*",),
    deviations=(
        Deviation(
            "drops linear in its bridge for Llama",
            all_of(_llama, is_type("linear")),
            plain,
            "NVIDIA-NeMo/Megatron-Bridge#5097",
            ended="26 July 2026",
        ),
        Deviation(
            "reads only the factor of llama3 in its bridge for Llama, and takes low_freq_factor = 1, high_freq_factor "
            "= 4 and L = 8192",
            all_of(_llama, is_type("llama3")),
            to(low_freq_factor=1.0, high_freq_factor=4.0, original=8192),
            f"{_LLAMA_BRIDGE}; {_CORE}/rotary_pos_embedding.py _apply_scaling",
        ),
        Deviation(
            "silently drops every scaling but yarn; its bridge for Llama keeps yarn, llama3 and linear",
            any_of(
                all_of(unless(_llama), unless(_gemma3_linear), unless(is_type("default", "yarn"))),
                all_of(_llama, is_type("dynamic", "longrope", "proportional")),
            ),
            plain,
            f"{_BRIDGE}; {_LLAMA_BRIDGE}",
        ),
        Deviation(
            "reads only the factor of yarn in its bridge for Mistral, and takes L = 4096, beta_fast = 32 and beta_slow "
            "= 1",
            all_of(_mistral, is_type("yarn")),
            to(
                original=4096,
                beta_fast=32.0,
                beta_slow=1.0,
                truncate=True,
                attention_factor=None,
                mscale=None,
                mscale_all_dim=None,
            ),
            "NVIDIA-NeMo/Megatron-Bridge, its bridge for Mistral",
            L_IN_ENTRY.replace("into the entry", "into the provider"),
        ),
        Deviation(
            "ignores attention_factor of yarn",
            yarn_temperature,
            to(attention_factor=None),
            _BRIDGE,
        ),
        Deviation(
            "takes an mscale or mscale_all_dim of 0 as given",
            all_of(_a_zero, wrote("mscale"), wrote("mscale_all_dim"), unless(_mistral)),
            ratio(None, None),
            f"{_CORE}/yarn_rotary_pos_embedding.py",
        ),
        Deviation(
            "rotates the whole head under yarn, whatever partial_rotary_factor is",
            all_of(is_type("yarn"), lambda layer: layer.rotation.partial != 1),
            to(partial=1.0),
            f"{_CORE}/yarn_rotary_pos_embedding.py",
        ),
    ),
    unknown=f"Whether latent attention still takes max_position_embeddings for L (NVIDIA/Megatron-LM#1418, open since "
    f"May 2025). With yarn without {ORIGINAL} in the entry Megatron's own default is 4096. Which release of the "
    "bridge was read.",
)
