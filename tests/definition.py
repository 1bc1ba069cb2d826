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
Learned = dict[str, Array]


@dataclass(frozen=True)
class Head:
    """One head of one layer. Several heads may have the same keys: of 4 heads over 2 of keys, 0 and 1 have the first.

    Attributes:
        index: of the head.
        x: what enters the attention, normed, `(length, hidden)`.
        q, k: `(length, d)`, as projected: not rotated.
        m, n: `(length, 1)` and `(1, length)`.
        scores: `(length, length)`, as they are before any bias.
        learned: arrays of the layer, and those that all layers share, by name.
    """

    index: int
    x: Array
    q: Array
    k: Array
    m: Array
    n: Array
    scores: Array
    learned: Learned


@dataclass(frozen=True)
class Text:
    """The tokens of one text where they enter the stack, or a block of it.

    Attributes:
        x: their vectors, `(length, hidden)`.
        ids: of the words, `(length,)`.
        m: 0, 1, ..., `(length,)`.
        learned: arrays that all layers share, by name.
    """

    x: Array
    ids: Array
    m: Array
    learned: Learned


@dataclass(frozen=True)
class Definition:
    """What a scheme means, in arrays: m `(q, 1)`, n `(1, k)`, theta `(d/2,)`, l the length of the text in tokens.

    `distance` is what rotates a pair of tokens, `(q, k)`, or `(q, k, d/2)` if every pair of dimensions has its own.
    `pair_weights` multiply each pair's share of a score, by the distance that rotates it, `(q, k, d/2)`. Whatever looks
    at queries and keys, or was learned, is given a `Head`: `head_scale` multiplies its scores, `(q, 1)`;
    `learned_frequencies` replace its frequencies, `(d/2,)`, and `head_frequencies` those of the head of this number;
    `content_bias` comes on top of its scores, `(q, k)`;
    `weight_factor` multiplies their softmax, `(q, k)`; and `relative_values` join the values, `(q, k, d)`. Vectors of
    tokens are replaced where they enter the stack (`embedding`) and each of its blocks (`block_embedding`).
    """

    distance: Callable[[Array, Array], Array] = lambda m, n: m - n
    visible: Callable[[Array, Array], Array | bool] = lambda m, n: True
    query_scale: Callable[[Array], Array] = lambda m: np.ones(m.shape)
    bias: Callable[[int, Array, Array], Array | float] = lambda head, m, n: 0.0
    frequencies: Callable[[Array, int], Array] = lambda theta, length: theta
    learned_frequencies: Callable[[Array, Learned], Array] = lambda theta, learned: theta
    head_frequencies: Callable[[int, Array], Array] | None = None
    temperature: float = 1.0
    pair_weights: Callable[[Array], Array | float] = lambda distance: 1.0
    head_scale: Callable[[Head], Array | float] = lambda head: 1.0
    content_bias: Callable[[Head], Array | float] = lambda head: 0.0
    weight_factor: Callable[[Head], Array | float] = lambda head: 1.0
    relative_values: Callable[[Head], Array | float] = lambda head: 0.0
    embedding: Callable[[Text], Array] = lambda text: text.x
    block_embedding: Callable[[int, Text], Array] = lambda block, text: text.x


def no_rotation(m: Array, n: Array) -> Array:
    """The distance that turns a pair where something else gives the positions."""
    return 0 * (m - n)


def learned_arrays(model: LlamaForCausalLM) -> Learned:
    """What a patched model has learned for its positions, by the names under which it is saved."""
    return {name: tensor.double().numpy() for name, tensor in model.state_dict().items() if ".rope_patch." in name}


def defined_logits(
    model: LlamaForCausalLM,
    ids: torch.Tensor,
    definition: Definition,
    learned: Learned | None = None,
    seen: Array | None = None,
) -> torch.Tensor:
    """Logits of one row of tokens, `(1, length, vocabulary)`.

    Args:
        model: as it is without any patch.
        ids: `(1, length)`.
        definition: of the scheme.
        learned: what the patched model has learned, as `learned_arrays` finds it.
        seen: which tokens see which, `(length, length)`; by default a token sees itself and those before.
    """
    weights = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}
    config = model.config
    theta = config.rope_parameters["rope_theta"] ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    words = ids.flatten().numpy()
    places = np.arange(len(words))
    seen = places[:, None] >= places[None] if seen is None else seen
    shared = _under("model.rope_patch.", learned)
    x = weights["model.embed_tokens.weight"][words]
    x = definition.embedding(Text(x, words, places, shared))

    def norm(x: Array, name: str) -> Array:
        return weights[f"{name}.weight"] * x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps)

    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"

        def linear(x: Array, name: str, layer: str = layer) -> Array:
            return x @ weights[f"{layer}.{name}.weight"].T

        x = definition.block_embedding(index, Text(x, words, places, shared))
        normed = norm(x, f"{layer}.input_layernorm")
        q, k, v = (
            linear(normed, f"self_attn.{name}_proj").reshape(len(x), -1, config.head_dim).swapaxes(0, 1)
            for name in "qkv"
        )
        known = shared | _under(f"{layer}.self_attn.rope_patch.", learned)
        x = x + linear(_attend(normed, q, k, v, theta, definition, known, seen), "self_attn.o_proj")
        normed = norm(x, f"{layer}.post_attention_layernorm")
        gate = linear(normed, "mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(normed, "mlp.up_proj"), "mlp.down_proj")
    return torch.tensor(norm(x, "model.norm") @ weights["lm_head.weight"].T)[None]


def _under(prefix: str, learned: Learned | None) -> Learned:
    """The arrays whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): array for name, array in (learned or {}).items() if name.startswith(prefix)}


def _attend(
    x: Array, q: Array, k: Array, v: Array, theta: Array, definition: Definition, learned: Learned, seen: Array
) -> Array:
    """`(length, heads * head_dim)` from q `(heads, length, head_dim)`, k and v `(kv_heads, length, head_dim)`."""
    length, half = q.shape[1], q.shape[2] // 2
    m, n = np.arange(length)[:, None], np.arange(length)[None, :]
    distance = definition.distance(m, n)
    theta = definition.learned_frequencies(definition.frequencies(theta, length), learned)
    size = definition.temperature**2 * definition.pair_weights(distance)

    def turns(theta: Array) -> tuple[Array, Array]:
        angle = (distance if distance.ndim == 3 else distance[..., None]) * theta
        return size * np.cos(angle), size * np.sin(angle)

    cos, sin = turns(theta)
    heads = []
    for head in range(len(q)):
        if definition.head_frequencies is not None:
            cos, sin = turns(definition.head_frequencies(head, theta))
        group = head * len(k) // len(q)
        (q1, q2), (k1, k2) = ((x[:, :half], x[:, half:]) for x in (q[head], k[group]))
        straight = q1[:, None] * k1[None] + q2[:, None] * k2[None]
        crossed = q1[:, None] * k2[None] - q2[:, None] * k1[None]
        scores = (straight * cos + crossed * sin).sum(-1) / np.sqrt(q.shape[2])
        scores = definition.query_scale(m) * scores
        scores = definition.head_scale(Head(head, x, q[head], k[group], m, n, scores, learned)) * scores
        known = Head(head, x, q[head], k[group], m, n, scores, learned)
        scores = scores + definition.bias(head, m, n) + definition.content_bias(known)
        scores = np.where(seen & definition.visible(m, n), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = definition.weight_factor(known) * weights / weights.sum(-1, keepdims=True)
        values = np.broadcast_to(v[group] + definition.relative_values(known), (length, *v[group].shape))
        heads.append(np.einsum("mn,mnd->md", weights, values))
    return np.concatenate(heads, axis=-1)
