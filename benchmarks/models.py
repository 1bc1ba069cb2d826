"""Small Llamas with random weights, patched or not: a forward, a decoding step, an attention module by itself."""

from __future__ import annotations

import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks.attention import spec
from benchmarks.comparison import Shape, Side
from rope_patch import CachedKeys, patch

_LAYERS = 4
_DECODING_LAYERS = 2


def llama(shape: Shape, layers: int, vocabulary: int = 1024) -> LlamaForCausalLM:
    """A Llama with the heads, the dtype and the device of the shape; the same weights every time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=shape.heads * shape.head_dim,
        intermediate_size=2 * shape.heads * shape.head_dim,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=max(8, shape.length // 8),
        attn_implementation="sdpa",
    )
    with torch.device(shape.device):
        return LlamaForCausalLM(config).eval().to(getattr(torch, shape.dtype))


def forward(shape: Shape, scheme: str | None = None) -> Side:
    """A forward of the whole model without a cache."""
    model = llama(shape, _LAYERS)
    if scheme:
        patch(model, scheme)
    tokens = torch.randint(1, 1024, (1, shape.length), device=shape.device)
    return Side(torch.no_grad()(lambda: model(tokens, use_cache=False)))


def decoding(shape: Shape, scheme: str | None = None) -> Side:
    """One token after a cache of `shape.length`, from the embedding to the logits."""
    model = llama(shape, _DECODING_LAYERS)
    if scheme:
        patch(model, spec(scheme, shape.length))
    cache = DynamicCache(config=model.config)
    token = torch.ones(1, 1, dtype=torch.long, device=shape.device)
    step = torch.no_grad()(lambda: model(token, past_key_values=cache, use_cache=True))
    step()  # a patched model takes a cache that it began itself
    for layer in range(_DECODING_LAYERS):
        # what else stands in it does not matter for the time, only how much
        past = [shape.random(1, shape.kv_heads, shape.length - 1, shape.head_dim) for _ in range(2)]
        keys, _ = cache.update(past[0], past[1], layer)
        cache.layers[layer].keys = CachedKeys.of(keys, torch.arange(shape.length, device=shape.device)[None])
    return Side(step, reset=lambda: _shorten(cache, shape.length))


def _shorten(cache: DynamicCache, length: int) -> None:
    if (extra := cache.get_seq_length() - length) > 0:
        cache.crop(-extra)  # by how much, not to what: the only form that all versions of Transformers know


def attention_module(shape: Shape, scheme: str | None = None) -> Side:
    """An attention module as a model calls it, rotation included, without its four projections."""
    model = llama(shape, layers=1)
    if scheme:
        patch(model, spec(scheme, shape.length) if scheme == "rerope" else scheme)
    module = model.model.layers[0].self_attn
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(module, name, nn.Identity())
    hidden = shape.random(1, shape.length, shape.heads * shape.head_dim)
    positions = torch.arange(shape.length, device=shape.device)[None]
    tables = model.model.rotary_emb(hidden, positions)
    call = torch.no_grad()(
        lambda: module(hidden, position_embeddings=tables, attention_mask=None, position_ids=positions)
    )
    return Side(call)
