"""Tiny random models of T5's style, whose scores depend on distance as much as those of a trained model."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedModel

from tests.families import VOCABULARY

_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "n_positions": 32,
    "relative_attention_max_distance": 24,
    "relative_attention_num_buckets": 16,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "eos_token_id": None,
    "decoder_start_token_id": 0,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "t5": {"model_type": "t5", **_SHARED},
    # Flan and T5 1.1: gated, with a head of its own; heads wider than the stream, as in the large ones
    "flan": {
        **{"model_type": "t5", **_SHARED},
        **{"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "d_kv": 16},
    },
    # ByT5: a deep encoder and a shallow decoder
    "byt5": {"model_type": "t5", **_SHARED, "num_layers": 3, "num_decoder_layers": 1},
    "mt5": {"model_type": "mt5", **_SHARED},
    # biases of its own in every layer
    "umt5": {"model_type": "umt5", **_SHARED},
}

SPECS = [
    "t5",
    "t5:interpolation=4",
    "t5:max_distance=96",
    "alibi",
    "rope",
    "nope",
    "pi:factor=4",
    "ntk:factor=4",
    "yarn:factor=4",
    "dynamic_yarn",
    "rerope:window=6",
    "leaky_rerope:window=6,factor=4",
    "self_extend:group_size=4,window=7",
    "window:window=7",
    "logn:training_length=8",
    "t5:interpolation=2+logn:training_length=8",
    "t5+rerope:window=6",
    "yarn:factor=4+alibi",
    "shaw:max_distance=6",
    "xl:initial_std=0.02",
    "deberta:max_distance=12,buckets=8",
    "t5+urpe:max_distance=12",
    "kerple:initial_scale=1",
    "sinusoidal",
    "learned:num_positions=700",
    "complex_order",
    "floater:width=16,blocks=true",
    "rnn:width=16",
]
"""What the tests here hold for: one of each kind, in an encoder and a decoder."""


def build(family: str = "t5", **changes: Any) -> PreTrainedModel:
    """A fresh model in evaluation mode; the same weights every time."""
    return copy.deepcopy(_prototype(family, tuple(sorted(changes.items()))))


@functools.cache
def _prototype(family: str, changes: tuple[tuple[str, Any], ...]) -> PreTrainedModel:
    values = {**FAMILIES[family], **dict(changes)}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(**values)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _enlarge(name, parameter)
    return model


def _enlarge(name: str, parameter: nn.Parameter) -> None:
    if "relative_attention_bias" in name:
        parameter.normal_(0, 2)
    elif "Attention.q" in name or "Attention.k" in name:
        parameter.normal_(0, 0.3)
    elif "norm" in name:
        parameter.add_(0.3 * torch.randn_like(parameter))
    else:
        parameter.normal_(0, 0.15)
