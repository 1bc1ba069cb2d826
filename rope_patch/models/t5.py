"""Read T5-style stacks: attention with learned biases by bucket of distance, in an encoder and in a decoder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from rope_patch.errors import UnsupportedModel
from rope_patch.models.base import AttentionLayer, Stack
from rope_patch.models.config import BASE
from rope_patch.models.probe import Measuring
from rope_patch.schemes.slots import Checkpoint
from rope_patch.schemes.t5 import T5Bias
from rope_patch.schemes.tools.rotary import half_split
from rope_patch.typing import RotarySpec

TRAINING_LENGTH = 512  # L in tokens if a config has no `n_positions`: that of T5 (1910.10683, section 3.1.2)


def recognises(module: nn.Module) -> bool:
    """Whether a model runs blocks of T5's attention."""
    blocks = getattr(module, "block", None)
    return (
        isinstance(module, PreTrainedModel)
        and isinstance(blocks, nn.ModuleList)
        and any(True for _ in _attention_modules(blocks, "SelfAttention"))
    )


def read(stack: PreTrainedModel) -> Stack:
    """Read the layers of a recognised encoder or decoder.

    Raises:
        UnsupportedModel: the model is LongT5, whose encoders bypass the attention interface, or UDOP, whose biases also
            depend on the page layout, or its attention bypasses the interface in another way.
    """
    config, family = cast(Any, stack.config), type(stack).__name__
    if config.model_type == "longt5":
        raise UnsupportedModel(f"{family}: the local attention of LongT5 bypasses the attention interface")
    if hasattr(stack, "relative_bias"):
        raise UnsupportedModel(f"{family} has biases for the page layout, which are not supported")
    own, measuring = list(_attention_modules(stack.block, "SelfAttention")), Measuring()
    tables = [getattr(module, "relative_attention_bias", None) for _, module in own]
    length = int(getattr(config, "n_positions", None) or TRAINING_LENGTH)
    buckets = (config.relative_attention_num_buckets, config.relative_attention_max_distance)
    both_sides = not config.is_decoder
    spec = RotarySpec(config.d_kv, BASE, length)
    layout = half_split(config.d_kv)
    layers = tuple(
        # if only the first layer has a table, all share it
        AttentionLayer(
            f"block.{name}", module, index, spec, layout, measuring.heads(module), bias_table=table or tables[0]
        )
        for index, ((name, module), table) in enumerate(zip(own, tables, strict=True))
    )
    across = [module for _, module in _attention_modules(stack.block, "EncDecAttention")]
    modules = [module for _, module in own] + across
    replacements = (
        # umT5 of Transformers 5.17 does not set it on its decoder
        *((module, "is_causal", config.is_decoder) for _, module in own),
        *((module, "has_relative_attention_bias", True) for module in modules),
        *((module, "compute_bias", NoBias(module)) for module in modules),
    )
    return Stack(
        stack,
        Checkpoint(length, config.num_heads, length, both_sides, buckets, pairs=config.d_kv // 2),
        T5Bias(*buckets),
        layers,
        part="encoder" if both_sides else "decoder",
        replacements=replacements,
    )


def _attention_modules(blocks: nn.Module, name: str) -> Iterator[tuple[str, Any]]:
    for path, module in blocks.named_modules():
        if path.rpartition(".")[2] == name and hasattr(module, "compute_bias"):
            yield path, module


@dataclass(eq=False)
class NoBias:
    """A replacement for `compute_bias` of an attention module while it is patched.

    Self-attention then gets its biases from distances; if another attention function scores it, the module's own biases
    are computed. Cross-attention has no biases, but would allocate zeros for all pairs.
    """

    module: nn.Module

    def __call__(self, query_length: int, key_length: int, **kwargs: Any) -> torch.Tensor | None:
        """Return None, or the module's own biases, `(1, heads, query_length, key_length)`, if another function scores
        it.
        """
        module = cast(Any, self.module)
        has_own = hasattr(module, "relative_attention_bias")
        if has_own and not module.config._attn_implementation.startswith("rope_patch"):
            return type(module).compute_bias(module, query_length, key_length, **kwargs)
        return None
