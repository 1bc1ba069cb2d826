"""A tiny random model of every family that the contract holds for."""

from __future__ import annotations

import copy
import functools
import inspect
import os
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    masking_utils,
)

from rope_patch import register_baichuan
from tests.cases import ALL, REPRESENTATIVE

TRAINING_LENGTH = 32
VOCABULARY = 97

_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": TRAINING_LENGTH,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GQA = {**_SHARED, "num_key_value_heads": 2}
_HEAD = {**_GQA, "head_dim": 16}
_DEEP = {"num_hidden_layers": 4}
# every expert is chosen: a choice of some would jump where two scores differ by rounding alone
_MOE = {
    **_HEAD,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 4),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
}
# keys and values are projected from one narrow state, heads of values are narrower, and a part of each key turns
_LATENT = {
    **_MOE,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_TEMPERATURE = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": TRAINING_LENGTH}
_PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
# wider than the training length, narrower than the texts of these tests
_WIDE_WINDOW = {"sliding_window": TRAINING_LENGTH + 4}
_NARROW_WINDOW = {"sliding_window": 16}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_GEMMA = {**_HEAD, "query_pre_attn_scalar": 16}
# layers with a state in place of keys, in turn with attention
_HYBRID = {
    **{**_DEEP, "layer_types": ["linear_attention", "full_attention"] * 2},
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
}
# one complex table of rotations, and chunks that are wider than the training length; a temperature would count pads
_LLAMA4 = {
    **{**_MOE, **_DEEP, "intermediate_size_mlp": 96, "no_rope_layers": [1, 1, 0, 1]},
    **{"attention_chunk_size": TRAINING_LENGTH + 4, "attn_temperature_tuning": False, "use_qk_norm": False},
}
# positions on three axes, of images: time, row and column
_AXES = {"rope_parameters": {**_PARTIAL["rope_parameters"], "mrope_section": [2, 1, 1], "mrope_interleaved": True}}
_GEMMA3 = {"model_type": "gemma3_text", **_GEMMA, **_NARROW_WINDOW}


def _extended(rope_type: str, **values: Any) -> dict[str, Any]:
    """An entry of `rope_parameters` for a checkpoint of the training length that is to read four times as much."""
    trained = {"original_max_position_embeddings": TRAINING_LENGTH}
    return {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0, **trained, **values}


_LONGER = {**_HEAD, "model_type": "llama", "max_position_embeddings": 4 * TRAINING_LENGTH}
_LONG_FACTOR = {"short_factor": [1.0] * 5 + [1.5, 1.5, 2.0], "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0]}
_LLAMA3 = _extended("llama3", low_freq_factor=1.0, high_freq_factor=4.0)
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
_BY_LAYER_TYPE = {
    "full_attention": _extended("yarn"),
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}

register_baichuan()

_SAMPLED: dict[str, dict[str, Any]] = {
    "llama_mha": {"model_type": "llama", **_SHARED},
    "llama": _GQA,
    "mistral": {**_GQA, **_WIDE_WINDOW},
    "qwen3": _HEAD,
    "gpt_neox": {**_SHARED, **_PARTIAL},
    "phi3": _GQA,
    "cohere": {**_GQA, "use_qk_norm": True, "logit_scale": 1.0},
    "glm": {**_HEAD, **_PARTIAL},
    "helium": _HEAD,  # halves its tables before it repeats them
    # scores capped by a tanh, which `sdpa` ignored before Transformers refused it
    "gemma2": {**_GEMMA, **_NARROW_WINDOW, "attn_logit_softcapping": 2.0, "attn_implementation": "eager"},
    "gemma3": {**_GEMMA3, **_DEEP, **_ALTERNATING},
    "smollm3": {**_GQA, **_DEEP, "no_rope_layers": [1, 0, 1, 0]},
    "olmo2": _GQA,
    "qwen3_5_text": {**_HEAD, **_HYBRID, **_AXES},
    "llama4_text": _LLAMA4,
    "baichuan": _SHARED,
    # positions are a penalty on distance, and nothing rotates until a scheme brings it
    "baichuan_alibi": {
        **{"model_type": "baichuan", **_SHARED, "position_embedding_type": "alibi"},
        **{"max_position_embeddings": None, "model_max_length": TRAINING_LENGTH},
    },
    # checkpoints that were extended before they came here
    "llama_yarn": {**_LONGER, "rope_parameters": _extended("yarn")},
    "llama_longrope": {**_LONGER, "rope_parameters": _extended("longrope", **_LONG_FACTOR)},
    "llama_llama3": {**_LONGER, "rope_parameters": _LLAMA3},
    "llama_dynamic": {**_HEAD, "model_type": "llama", "rope_parameters": _DYNAMIC},
    "gemma3_yarn": {
        **{**_GEMMA3, "layer_types": ["sliding_attention", "full_attention"]},
        **{"max_position_embeddings": 4 * TRAINING_LENGTH, "rope_parameters": _BY_LAYER_TYPE},
    },
}

_OTHERS: dict[str, dict[str, Any]] = {
    "afmoe": {**_MOE, **_DEEP, **_WIDE_WINDOW},
    "apertus": {**_GQA, **_PLAIN},
    "arcee": _GQA,
    "aria_text": _MOE,
    "bitnet": _GQA,
    "cohere2": {**_GQA, **_DEEP, **_WIDE_WINDOW, "logit_scale": 1.0},
    "cohere2_moe": {**_MOE, **_DEEP, **_WIDE_WINDOW, "logit_scale": 1.0},
    "cwm": {**_HEAD, **_PLAIN, **_WIDE_WINDOW, "bos_token_id": 1},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "dots1": _MOE,
    "ernie4_5": _HEAD,
    "ernie4_5_moe": _MOE,
    "exaone4": {**_GQA, **_DEEP, **_WIDE_WINDOW},
    "exaone_moe": {**_MOE, **_DEEP, **_WIDE_WINDOW},
    "flex_olmo": _MOE,
    "gemma": _HEAD,
    "glm4": {**_HEAD, **_PARTIAL},
    "glm4_moe": {**_MOE, **_PARTIAL},
    "glm4_moe_lite": _LATENT,
    "gpt_oss": {**_MOE, **_PLAIN, **_WIDE_WINDOW},
    "granite": _GQA,
    "granitemoe": _MOE,
    "granitemoeshared": _MOE,
    "hy_v3": _MOE,
    "hyperclovax": _HEAD,
    "internlm3": _HEAD,
    "iquestcoder": _HEAD,
    "jais2": _HEAD,
    "kolibri1": _MOE,
    "laguna": _MOE,
    "lfm2": {**_GQA, **_DEEP},
    "llama4_normed": {"model_type": "llama4_text", **_LLAMA4, "use_qk_norm": True},
    "longcat_flash": _LATENT,
    "mellum": _MOE,
    "minicpm3": _LATENT,
    "minimax_m2": _MOE,
    "ministral": {**_HEAD, **_WIDE_WINDOW},
    "ministral3": {**_HEAD, "rope_parameters": {**_PLAIN["rope_parameters"], **_TEMPERATURE}},
    "mixtral": _MOE,
    "nanochat": _GQA,
    "nemotron": _GQA,
    "olmo": _GQA,
    "olmo3": {**_GQA, **_DEEP, **_NARROW_WINDOW, **_ALTERNATING},
    "olmoe": _MOE,
    "persimmon": {**_SHARED, **_PARTIAL},
    "phi": {**_GQA, **_PARTIAL},
    "qwen2": _GQA,
    "qwen2_moe": _MOE,
    "qwen3_5_moe_text": {**_MOE, **_HYBRID, **_AXES},
    "qwen3_moe": _MOE,
    "qwen3_next": {**_MOE, **_HYBRID, **_PARTIAL},
    "seed_oss": {**_HEAD, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "solar_open": _MOE,
    "stablelm": {**_GQA, **_PARTIAL},
    "starcoder2": _GQA,
    "vaultgemma": {**_GEMMA, **_WIDE_WINDOW},
    "youtu": _LATENT,
}


def rope_types(parameters: dict[str, Any] | None) -> set[str]:
    """The types that `rope_parameters` say: of all layers, or by layer type."""
    entries = [parameters] if "rope_type" in (parameters or {}) else (parameters or {}).values()
    return {entry["rope_type"] for entry in entries}


# before, Transformers itself fails on chunks: packed rows mix, and a static cache cannot be filled
_MASKS_CHUNKS = "block_sequence_ids" in inspect.signature(masking_utils.create_chunked_causal_mask).parameters

FAMILIES = {
    family: {"model_type": family, **values}
    for family, values in {**_SAMPLED, **_OTHERS}.items()
    if values.get("model_type", family) in CONFIG_MAPPING and ("attention_chunk_size" not in values or _MASKS_CHUNKS)
}
"""Every family that this version of Transformers has, with the values of its config."""

GENERIC = {**_LATENT, **_DEEP}
"""Values of which most config classes can make a tiny model."""

SAMPLE = frozenset(_SAMPLED) & FAMILIES.keys()
"""The families of the usual run: one of each kind of layout, window, mask and rotary module."""

RUN = [family for family in FAMILIES if family in SAMPLE or "ROPE_PATCH_ALL_FAMILIES" in os.environ]
"""The families of this run: what the usual run would leave out is not even collected."""

SCALED = [family for family, values in FAMILIES.items() if rope_types(values.get("rope_parameters")) - {"default"}]
"""Families whose checkpoints are scaled already, by a type of Transformers."""

FOLLOW_THE_LENGTH = {"dynamic", "longrope"}
"""Types whose tables the rotary module makes anew, by the longest text that it is shown."""

FOLLOWING = [family for family in SCALED if rope_types(FAMILIES[family]["rope_parameters"]) & FOLLOW_THE_LENGTH]
"""Families whose checkpoints are of such a type."""

LLAMA_AND_SCALED = [("llama", spec) for spec in ALL] + [(family, spec) for family in SCALED for spec in REPRESENTATIVE]
"""Family and scheme for what is tried on one layout only."""

BIASED = {"baichuan_alibi"}
"""Families whose own positions are a bias, so that there are no rotary tables to mount a scheme on."""

SHARED_TABLES = {"gemma2"}
"""Families whose rotary tables also serve layers that are left alone, so that no scheme can be mounted on them."""

NORMED = {"llama4_normed", "nanochat"} & FAMILIES.keys()
"""Families that norm queries and keys after they turned, so that tables cannot scale them."""

_MIXING = {"afmoe", "gpt_oss", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"}
if not hasattr(masking_utils, "remap_positions_for_packed_sequence"):  # before Transformers 5.23, by a chunk too
    _MIXING |= {family for family, values in FAMILIES.items() if "attention_chunk_size" in values}
PACKED_ROWS_MIX = _MIXING & FAMILIES.keys()
"""Families that let the documents of a packed row see each other, also unpatched: by a window, or by a state."""


def config_of(family: str, **changes: Any) -> PreTrainedConfig:
    """A fresh config of the family, with some of its values changed. A test of a family that this version of
    Transformers lacks is skipped.
    """
    if family in {**_SAMPLED, **_OTHERS}.keys() - FAMILIES.keys():
        pytest.skip(f"{family} is not tested with Transformers {transformers.__version__}")
    return AutoConfig.for_model(**copy.deepcopy({**FAMILIES[family], **changes}))


def build(family: str = "llama", **changes: Any) -> PreTrainedModel:
    """A fresh model of the family in evaluation mode; the same weights every time."""
    if changes:
        return from_config(config_of(family, **changes))
    return copy.deepcopy(_prototype(family))


def from_config(config: PreTrainedConfig, auto: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """A model of this very config object, whose logits depend on positions as much as those of a trained model."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto.from_config(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    # Gemma's norms multiply by one plus their weight
                    parameter.add_(0.3 * torch.randn_like(parameter))
                if any(part in name for part in ("q_norm", "k_norm")):
                    parameter.mul_(2)
                elif any(part in name for part in ("q_proj.w", "k_proj.w", "q_b_proj.w", "kv_a_proj_with_mqa.w")):
                    parameter.mul_(4)
                elif any(part in name for part in ("qkv_proj.w", "query_key_value.w")):
                    parameter.mul_(3)
                elif name.endswith("bias"):
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@functools.cache
def _prototype(family: str) -> PreTrainedModel:
    return from_config(config_of(family))
