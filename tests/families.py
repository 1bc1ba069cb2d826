"""A tiny random model of every family that the contract holds for."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GlmConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    SmolLM3Config,
)

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
_GQA: dict[str, Any] = {**_SHARED, "num_key_value_heads": 2}
_DEEP: dict[str, Any] = {**_GQA, "num_hidden_layers": 4}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama_mha": (LlamaConfig, _SHARED),
    "llama": (LlamaConfig, _GQA),
    # wider than the training length, narrower than the texts of these tests
    "mistral": (MistralConfig, {**_GQA, "sliding_window": TRAINING_LENGTH + 4}),
    "qwen3": (Qwen3Config, {**_GQA, "head_dim": 16}),
    "gpt_neox": (GPTNeoXConfig, {**_SHARED, "rope_parameters": _PARTIAL}),
    "phi3": (Phi3Config, _GQA),
    "cohere": (CohereConfig, {**_GQA, "use_qk_norm": True, "logit_scale": 1.0}),
    "glm": (GlmConfig, {**_GQA, "head_dim": 16, "rope_parameters": _PARTIAL}),
    # scores capped by a tanh, which `sdpa` ignored before Transformers refused it
    "gemma2": (
        Gemma2Config,
        {
            **_GQA,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 16,
            "attn_logit_softcapping": 2.0,
            "attn_implementation": "eager",
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        {
            **_DEEP,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "smollm3": (SmolLM3Config, {**_DEEP, "no_rope_layers": [1, 0, 1, 0]}),
    "olmo2": (Olmo2Config, _GQA),
}

SHARED_TABLES = {"gemma2"}
"""Families whose rotary tables also serve layers that are left alone, so that no scheme can be mounted on them."""


def config_of(family: str, **changes: Any) -> PreTrainedConfig:
    """A fresh config of the family, with some of its values changed."""
    cls, values = FAMILIES[family]
    return cls(**copy.deepcopy({**values, **changes}))


def build(family: str = "llama", **changes: Any) -> PreTrainedModel:
    """A fresh model of the family in evaluation mode; the same weights every time."""
    if changes:
        return from_config(config_of(family, **changes))
    return copy.deepcopy(_prototype(family))


def from_config(config: PreTrainedConfig) -> PreTrainedModel:
    """A model of this very config object, whose logits depend on positions as much as those of a trained model."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    # Gemma's norms multiply by one plus their weight
                    parameter.add_(0.3 * torch.randn_like(parameter))
                if any(part in name for part in ("q_norm", "k_norm")):
                    parameter.mul_(2)
                elif any(part in name for part in ("q_proj.w", "k_proj.w")):
                    parameter.mul_(4)
                elif any(part in name for part in ("qkv_proj.w", "query_key_value.w")):
                    parameter.mul_(3)
                elif name.endswith("bias"):
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@functools.cache
def _prototype(family: str) -> PreTrainedModel:
    return from_config(config_of(family))
