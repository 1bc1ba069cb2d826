"""A Llama in float64 that scores every pair of tokens by its definition; it shares no code with the package.

Rotation is written on pairs: the score of (m, n) turns by the distance of the pair, not by positions of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from transformers import LlamaForCausalLM

Array = np.ndarray


@dataclass(frozen=True)
class Definition:
    """What a scheme means, in arrays: m `(q, 1)`, n `(1, k)`, theta `(d/2,)`, l the length of the text in tokens.

    `pair_weights` multiply each pair's share of a score, by the distance that rotates it, `(q, k, d/2)`.
    """

    distance: Callable[[Array, Array], Array] = lambda m, n: m - n
    visible: Callable[[Array, Array], Array] = lambda m, n: m >= n
    query_scale: Callable[[Array], Array] = lambda m: np.ones(m.shape)
    bias: Callable[[int, Array, Array], Array | float] = lambda head, m, n: 0.0
    frequencies: Callable[[Array, int], Array] = lambda theta, length: theta
    temperature: float = 1.0
    pair_weights: Callable[[Array], Array | float] = lambda distance: 1.0


def defined_logits(model: LlamaForCausalLM, ids: torch.Tensor, definition: Definition) -> torch.Tensor:
    """Logits of one row of tokens, `(1, length, vocabulary)`."""
    weights = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}
    config = model.config
    theta = config.rope_parameters["rope_theta"] ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    x = weights["model.embed_tokens.weight"][ids.flatten().numpy()]

    def norm(x: Array, name: str) -> Array:
        return weights[f"{name}.weight"] * x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps)

    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"

        def linear(x: Array, name: str, layer: str = layer) -> Array:
            return x @ weights[f"{layer}.{name}.weight"].T

        normed = norm(x, f"{layer}.input_layernorm")
        q, k, v = (
            linear(normed, f"self_attn.{name}_proj").reshape(len(x), -1, config.head_dim).swapaxes(0, 1)
            for name in "qkv"
        )
        x = x + linear(_attend(q, k, v, theta, definition), "self_attn.o_proj")
        normed = norm(x, f"{layer}.post_attention_layernorm")
        gate = linear(normed, "mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(normed, "mlp.up_proj"), "mlp.down_proj")
    return torch.tensor(norm(x, "model.norm") @ weights["lm_head.weight"].T)[None]


def _attend(q: Array, k: Array, v: Array, theta: Array, definition: Definition) -> Array:
    """`(length, heads * head_dim)` from q `(heads, length, head_dim)`, k and v `(kv_heads, length, head_dim)`."""
    length, half = q.shape[1], q.shape[2] // 2
    m, n = np.arange(length)[:, None], np.arange(length)[None, :]
    distance = definition.distance(m, n)
    angle = distance[..., None] * definition.frequencies(theta, length)
    size = definition.temperature**2 * definition.pair_weights(distance)
    cos, sin = size * np.cos(angle), size * np.sin(angle)
    heads = []
    for head in range(len(q)):
        group = head * len(k) // len(q)
        (q1, q2), (k1, k2) = ((x[:, :half], x[:, half:]) for x in (q[head], k[group]))
        straight = q1[:, None] * k1[None] + q2[:, None] * k2[None]
        crossed = q1[:, None] * k2[None] - q2[:, None] * k1[None]
        scores = (straight * cos + crossed * sin).sum(-1) / np.sqrt(q.shape[2])
        scores = definition.query_scale(m) * scores + definition.bias(head, m, n)
        scores = np.where((m >= n) & definition.visible(m, n), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(weights / weights.sum(-1, keepdims=True) @ v[group])
    return np.concatenate(heads, axis=-1)
