"""Baichuan and Baichuan 2 as native models of Transformers 5, for the published checkpoint folders.

Importing this package registers nothing and imports no class; call `register_baichuan()` for that.
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from rope_patch.models.base import AttentionLayer, Heads, Stack
from rope_patch.models.config import BASE
from rope_patch.schemes.alibi import ALiBi
from rope_patch.schemes.slots import Checkpoint
from rope_patch.schemes.tools.rotary import half_split
from rope_patch.typing import RotarySpec

__all__ = ["published_remote_code", "register_baichuan"]

_REMOTE = "transformers_modules."


def register_baichuan() -> None:
    """Let `AutoConfig`, `AutoModel`, `AutoModelForCausalLM` and `AutoTokenizer` load Baichuan's folders natively.

    You may call it more than once. Afterwards the remote code in a checkpoint's `auto_map` never runs, not even with
    `trust_remote_code=True`.
    """
    # imported here, so that importing the library loads none of it
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    from transformers.models.auto.tokenization_auto import REGISTERED_TOKENIZER_CLASSES

    from rope_patch.models.baichuan.configuration import BaichuanConfig
    from rope_patch.models.baichuan.modeling import BaiChuanForCausalLM, BaichuanForCausalLM, BaichuanModel
    from rope_patch.models.baichuan.tokenization import BaiChuanTokenizer, BaichuanTokenizer

    AutoConfig.register(BaichuanConfig.model_type, BaichuanConfig, exist_ok=True)
    AutoModel.register(BaichuanConfig, BaichuanModel, exist_ok=True)
    # Transformers picks the class in the config's `architectures`, or the first one
    AutoModelForCausalLM.register(BaichuanConfig, (BaichuanForCausalLM, BaiChuanForCausalLM), exist_ok=True)
    # by name, not by config class: otherwise AutoTokenizer prefers the code in the checkpoint folder
    for tokenizer in (BaichuanTokenizer, BaiChuanTokenizer):
        REGISTERED_TOKENIZER_CLASSES[tokenizer.__name__] = tokenizer


def published_remote_code(module: nn.Module) -> str | None:
    """Advice for a model that runs the code of 2023 in Baichuan's checkpoint folders; None for any other model.

    That code reads positions from its own tables, outside the attention interface of Transformers. So no scheme can be
    mounted on it, whether it is all of `module` or a part.
    """
    for part in module.modules():
        cls = type(part)
        if cls.__module__.startswith(_REMOTE) and "modeling_baichuan" in cls.__module__ and hasattr(part, "W_pack"):
            return (
                f"{type(module).__name__} runs Baichuan's published remote code ({cls.__module__}), whose attention "
                "bypasses Transformers; load the same folder with rope_patch.from_pretrained(path), or call "
                "register_baichuan() and omit trust_remote_code=True"
            )
    return None


def recognises(module: nn.Module) -> bool:
    """Whether a model is the stack of a native Baichuan of the ALiBi kind; the RoPE kind is read like any Llama."""
    return (
        isinstance(module, PreTrainedModel)
        and getattr(module.config, "uses_alibi", False)
        and isinstance(getattr(module, "layers", None), nn.ModuleList)
    )


def read(stack: PreTrainedModel) -> Stack:
    """Read the layers of a recognised stack, with the rotation that a scheme would add: Baichuan-7B's."""
    config = cast(Any, stack.config)
    length, head_dim = config.model_max_length, config.hidden_size // config.num_attention_heads
    spec, heads = RotarySpec(head_dim, BASE, length), Heads(config.num_attention_heads, head_dim, head_dim)
    layers = tuple(
        AttentionLayer(f"layers.{index}.self_attn", layer.self_attn, index, spec, half_split(head_dim), heads)
        for index, layer in enumerate(stack.layers)
    )
    checkpoint = Checkpoint(length, config.num_attention_heads, length, pairs=head_dim // 2)
    return Stack(stack, checkpoint, ALiBi(), layers)
