"""Read the ALiBi kind: attention without rotation, with a bias by distance.

The RoPE kind is read like any Llama-style stack.
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


def recognises(module: nn.Module) -> bool:
    """Whether a model is the stack of a native Baichuan of the ALiBi kind."""
    return (
        isinstance(module, PreTrainedModel)
        and getattr(module.config, "uses_alibi", False)
        and isinstance(getattr(module, "layers", None), nn.ModuleList)
    )


def read(stack: PreTrainedModel) -> Stack:
    """The layers of a recognised stack, with the rotation that a scheme would add: Baichuan-7B's."""
    config = cast(Any, stack.config)
    length, head_dim = config.model_max_length, config.hidden_size // config.num_attention_heads
    spec, heads = RotarySpec(head_dim, BASE, length), Heads(config.num_attention_heads, head_dim, head_dim)
    layers = tuple(
        AttentionLayer(f"layers.{index}.self_attn", layer.self_attn, index, spec, half_split(head_dim), heads)
        for index, layer in enumerate(stack.layers)
    )
    checkpoint = Checkpoint(length, config.num_attention_heads, length, pairs=head_dim // 2)
    return Stack(stack, checkpoint, ALiBi(), layers)
