"""A tiny random model of each family with learned absolute positions."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, PreTrainedModel

CAPACITY = 8
"""n: the longest text in tokens that these models are made for."""
VOCABULARY = 61

_SIZES = {"vocab_size": VOCABULARY, "initializer_range": 0.1, "bos_token_id": None, "eos_token_id": None}
_BERT = {
    **_SIZES,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": CAPACITY,
    "pad_token_id": 0,
}
_GPT2 = {**_SIZES, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CAPACITY, "pad_token_id": 0}
_OPT = {**_BERT, "ffn_dim": 48, "pad_token_id": 1, "init_std": 0.1}

CONFIGS: dict[str, dict[str, Any]] = {
    "bert": _BERT,
    # two reserved rows, which its config counts
    "roberta": {**_BERT, "max_position_embeddings": CAPACITY + 2, "pad_token_id": 1},
    "electra": {**_BERT, "embedding_size": 16},
    "gpt2": _GPT2,
    # two reserved rows, which its config does not count
    "opt": _OPT,
}
RESERVED = {"bert": 0, "roberta": 2, "electra": 0, "gpt2": 0, "opt": 2}
DECODERS = ("gpt2", "opt")


def build(family: str, **changes: Any) -> PreTrainedModel:
    """A model with random weights, the same ones each time; with a head over the vocabulary where it generates."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**{**CONFIGS[family], **changes})
    auto = AutoModelForCausalLM if family in DECODERS else AutoModel
    return auto.from_config(config).eval()


def table_of(model: PreTrainedModel) -> torch.nn.Embedding:
    """Its table of positions, by the name that the family gives it."""
    names = ("position_embeddings", "wpe", "embed_positions")
    return next(module for name, module in model.named_modules() if name.rpartition(".")[2] in names)


def tokens(length: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    """Random token ids, none of which is special in any family, `(rows, length)`."""
    return torch.randint(4, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def outputs(model: PreTrainedModel, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """The first tensor of a forward: logits or hidden states, `(rows, length, width)`."""
    return model(input_ids=ids, **inputs)[0]
