"""Tiny checkpoint folders in the layout in which Baichuan published its models."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

TRAINING_LENGTH = 24

# code that must never run: importing it leaves a mark beside it
_REMOTE_CODE = """
import pathlib
(pathlib.Path({mark!r})).write_text("remote code ran")
raise RuntimeError("remote code ran")
"""


@dataclass(frozen=True)
class Variant:
    """One of the published kinds, in small.

    Attributes:
        alibi: whether positions are a penalty on distance.
        norm_head: whether the head has rows of length one.
        spelling: of the architecture.
        config: fields beside the sizes, as published.
    """

    alibi: bool
    norm_head: bool
    spelling: str
    heads: int = 4
    head_dim: int = 8
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def hidden_size(self) -> int:
        return self.heads * self.head_dim


VARIANTS = {
    "baichuan_7b": Variant(False, False, "BaiChuanForCausalLM", config={"max_position_embeddings": TRAINING_LENGTH}),
    "baichuan_13b": Variant(
        True,
        False,
        "BaichuanForCausalLM",
        heads=5,
        config={"model_max_length": TRAINING_LENGTH, "gradient_checkpointing": [False], "_from_model_config": True},
    ),
    "baichuan2_7b": Variant(
        False,
        True,
        "BaichuanForCausalLM",
        config={
            "max_position_embeddings": TRAINING_LENGTH,
            "model_max_length": TRAINING_LENGTH,
            "z_loss_weight": 0,
            "normalize_lm_head": True,
            "tokenizer_class": "BaichuanTokenizer",
        },
    ),
    "baichuan2_13b": Variant(
        True,
        True,
        "BaichuanForCausalLM",
        heads=10,
        head_dim=4,
        config={
            "model_max_length": TRAINING_LENGTH,
            "gradient_checkpointing": [False],
            "z_loss_weight": 0,
            "normalize_lm_head": True,
            "tokenizer_class": "BaichuanTokenizer",
        },
    ),
}

GENERATION = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "user_token_id": 195,
    "assistant_token_id": 196,
    "max_new_tokens": 2048,
}
"""A `generation_config.json` of a chat model, without the settings that make it sample."""

LAYERS, VOCABULARY, INTERMEDIATE = 2, 97, 48


def config_of(variant: Variant, **changes: Any) -> dict[str, Any]:
    """A `config.json` in the words of the published ones."""
    return {
        "architectures": [variant.spelling],
        "auto_map": {
            "AutoConfig": "configuration_baichuan.BaichuanConfig",
            "AutoModelForCausalLM": f"modeling_baichuan.{variant.spelling}",
        },
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": variant.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": INTERMEDIATE,
        "model_type": "baichuan",
        "num_attention_heads": variant.heads,
        "num_hidden_layers": LAYERS,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.29.2",
        "use_cache": True,
        "vocab_size": VOCABULARY,
        **variant.config,
        **changes,
    }


def weights_of(variant: Variant, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights under the published names, large enough for positions to matter."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(shape, generator=generator)

    width = variant.hidden_size
    weights = {
        "model.embed_tokens.weight": random(VOCABULARY, width),
        "model.norm.weight": 1 + random(width, scale=0.2),
        "lm_head.weight": random(VOCABULARY, width, scale=0.3),
    }
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        weights |= {
            f"{layer}.self_attn.W_pack.weight": random(3 * width, width, scale=1.5 * width**-0.5),
            f"{layer}.self_attn.o_proj.weight": random(width, width, scale=width**-0.5),
            f"{layer}.mlp.gate_proj.weight": random(INTERMEDIATE, width, scale=width**-0.5),
            f"{layer}.mlp.up_proj.weight": random(INTERMEDIATE, width, scale=width**-0.5),
            f"{layer}.mlp.down_proj.weight": random(width, INTERMEDIATE, scale=INTERMEDIATE**-0.5),
            f"{layer}.input_layernorm.weight": 1 + random(width, scale=0.2),
            f"{layer}.post_attention_layernorm.weight": 1 + random(width, scale=0.2),
        }
    return weights


def write_folder(folder: Path, variant: Variant, shards: int = 0, **changes: Any) -> dict[str, torch.Tensor]:
    """A checkpoint folder, with the remote code that it must do without; its weights, without what is ignored.

    Args:
        folder: is made.
        shards: number of `pytorch_model-*.bin` files; 0 for one safetensors file.
        **changes: of the config.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(variant, **changes), indent=2))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    for name in ("configuration_baichuan", "modeling_baichuan", "tokenization_baichuan"):
        (folder / f"{name}.py").write_text(_REMOTE_CODE.format(mark=str(folder / "remote_code_ran")))
    weights = weights_of(variant)
    stored = dict(weights)
    if not variant.alibi:
        for index in range(LAYERS):  # not the true frequencies: whoever reads them is found out
            stored[f"model.layers.{index}.self_attn.rotary_emb.inv_freq"] = torch.full((variant.head_dim // 2,), 0.5)
    if shards:
        _write_shards(folder, stored, shards)
    else:
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


def _write_shards(folder: Path, stored: dict[str, torch.Tensor], shards: int) -> None:
    names = sorted(stored)
    files = {name: f"pytorch_model-{1 + place % shards:05d}-of-{shards:05d}.bin" for place, name in enumerate(names)}
    for file in set(files.values()):
        torch.save({name: stored[name] for name in names if files[name] == file}, folder / file)
    size = sum(tensor.numel() * tensor.element_size() for tensor in stored.values())
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
