"""A T5 in float64 that scores every pair of tokens by its definition; it shares no code with the package."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

Array = np.ndarray


@functools.cache
def bucket(relative: int, both: bool, buckets: int, farthest: int) -> int:
    """Bucket of n - m, distance by distance, as section 2.1 of 1910.10683 and the authors' code have it."""
    found = 0
    if both:
        buckets //= 2
        if relative > 0:
            found = buckets
        relative = abs(relative)
    else:
        relative = max(-relative, 0)
    exact = buckets // 2
    if relative < exact:
        return found + relative
    # steps that fall on an edge exactly are meant to be taken
    steps = math.log(relative / exact) / math.log(farthest / exact) * (buckets - exact)
    return found + min(exact + int(steps + 1e-9), buckets - 1)


@dataclass(frozen=True)
class Meaning:
    """What a scheme means on a T5: `distance(m, n)` turns pairs, None for no rotation; `relative(n - m)` is looked up
    in the table, None for no table; `bias` comes on top.
    """

    distance: Callable[[Array, Array], Array] | None = None
    relative: Callable[[int], int] | None = None
    farthest: int | None = None
    frequencies: Callable[[Array], Array] = lambda theta: theta
    temperature: float = 1.0
    visible: Callable[[Array, Array], Array] = lambda m, n: np.ones(np.broadcast(m, n).shape, dtype=bool)
    query_scale: Callable[[Array], Array] = lambda m: np.ones(m.shape)
    bias: Callable[[int, int, Array, Array], Array | float] = lambda head, heads, m, n: 0.0


def defined_logits(model: PreTrainedModel, source: torch.Tensor, target: torch.Tensor, meaning: Meaning) -> Array:
    """Logits of one row, `(target length, vocabulary)`."""
    weights = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}
    config = model.config
    states = _stack(weights, config, "encoder", source, meaning, None)
    states = _stack(weights, config, "decoder", target, meaning, states)
    if config.scale_decoder_outputs if hasattr(config, "scale_decoder_outputs") else config.tie_word_embeddings:
        states = states * config.d_model**-0.5
    return states @ weights["lm_head.weight"].T


def _stack(weights, config, part, ids, meaning, encoded):
    x = weights["shared.weight"][ids.flatten().numpy()]
    causal = part == "decoder"
    layers = config.num_decoder_layers if causal else config.num_layers
    table = None
    for index in range(layers):
        block = f"{part}.block.{index}.layer"
        normed = _norm(x, weights[f"{block}.0.layer_norm.weight"], config)
        own = weights.get(f"{block}.0.SelfAttention.relative_attention_bias.weight")
        table = own if own is not None else table
        x = x + _attend(weights, f"{block}.0.SelfAttention", normed, normed, config, causal, meaning, table)
        if causal:
            normed = _norm(x, weights[f"{block}.1.layer_norm.weight"], config)
            x = x + _attend(weights, f"{block}.1.EncDecAttention", normed, encoded, config, False, None, None)
        last = f"{block}.{2 if causal else 1}"
        x = x + _feed(weights, f"{last}.DenseReluDense", _norm(x, weights[f"{last}.layer_norm.weight"], config))
    return _norm(x, weights[f"{part}.final_layer_norm.weight"], config)


def _norm(x: Array, weight: Array, config) -> Array:
    return weight * x / np.sqrt((x**2).mean(-1, keepdims=True) + config.layer_norm_epsilon)


def _feed(weights, name: str, x: Array) -> Array:
    if f"{name}.wi.weight" in weights:
        return np.maximum(x @ weights[f"{name}.wi.weight"].T, 0) @ weights[f"{name}.wo.weight"].T
    gate = x @ weights[f"{name}.wi_0.weight"].T
    gate = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    return (gate * (x @ weights[f"{name}.wi_1.weight"].T)) @ weights[f"{name}.wo.weight"].T


def _attend(weights, name, queries, keys, config, causal, meaning, table) -> Array:
    q, k, v = (
        (states @ weights[f"{name}.{which}.weight"].T).reshape(len(states), -1, config.d_kv).swapaxes(0, 1)
        for which, states in (("q", queries), ("k", keys), ("v", keys))
    )
    m, n = np.arange(len(queries))[:, None], np.arange(len(keys))[None]
    heads = []
    for head in range(len(q)):
        if meaning is None:  # cross-attention
            scores = q[head] @ k[head].T
        else:
            scores = _scores(q[head], k[head], m, n, head, len(q), config, not causal, meaning, table)
            seen = meaning.visible(m, n) & ((m >= n) | (not causal))
            scores = np.where(seen, scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(shares / shares.sum(-1, keepdims=True) @ v[head])
    return np.concatenate(heads, axis=-1) @ weights[f"{name}.o.weight"].T


def _scores(q, k, m, n, head, heads, config, both, meaning, table) -> Array:
    if meaning.distance is None:
        scores = q @ k.T
    else:
        half = config.d_kv // 2
        theta = meaning.frequencies(10000.0 ** (-np.arange(half) / half))
        angle = meaning.distance(m, n)[..., None] * theta
        size = meaning.temperature**2
        straight = q[:, None, :half] * k[None, :, :half] + q[:, None, half:] * k[None, :, half:]
        crossed = q[:, None, :half] * k[None, :, half:] - q[:, None, half:] * k[None, :, :half]
        scores = size * (straight * np.cos(angle) + crossed * np.sin(angle)).sum(-1)
    scores = meaning.query_scale(m) * scores + meaning.bias(head, heads, m, n)
    if meaning.relative is not None:
        farthest = meaning.farthest or config.relative_attention_max_distance
        places = [
            [bucket(meaning.relative(int(j - i)), both, config.relative_attention_num_buckets, farthest) for j in n[0]]
            for i in m[:, 0]
        ]
        scores = scores + table[np.array(places), head]
    return scores
