"""Disentangled attention, as in DeBERTa: content attends to positions, and positions attend to content."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated

import torch

from rope_patch.errors import InvalidField
from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.rules import AtLeast, SomeOf
from rope_patch.schemes.slots import Checkpoint, ModelShape, Pairs, Tokens
from rope_patch.schemes.tools.buckets import signed_log_buckets
from rope_patch.schemes.tools.tables import rows_at
from rope_patch.typing import NO_WEIGHTS, Weights

_TERMS = ("c2p", "p2c")


@dataclass(frozen=True)
class Disentangled(Scheme):
    """Project one table of relative positions to keys for the queries, and to queries for the keys.

    delta(m, n) = clip(m - n + k, 0, 2k - 1) is a row of that table. With t terms in addition to the content, scores are
    divided by sqrt((1 + t) d) instead of sqrt(d), so that more terms do not make larger scores.

    Args:
        max_distance: k in tokens; default the training length, at most 512 as in the paper.
        terms: `"c2p"`, query and distance; `"p2c"`, key and distance; or both.
        buckets: replaces k, as in DeBERTa v2 and v3 (256): half of the buckets hold single distances on either side,
            the rest hold distances up to `max_distance` at logarithmic steps. None for single distances.
        clamped: clip distances to `max_distance` - 1 before bucketing, as the authors' later code does; False as in
            Transformers, where later keys beyond that distance have one more row.
        scaled: divide by sqrt((1 + t) d); False keeps the model's own scaling, which a pretrained model expects.
        released: p2c reads row delta(m, n), as all released code does; False for the paper's delta(n, m).
        absolute_layers: number of last layers whose input gets the token's absolute position; 0 for none.
        num_positions: number of learned absolute positions; default the training length.

    Tables and projections start at normal(0, 0.02), absolute positions and the offset of projected queries at zero.
    The projection of keys has no offset: v2 has one, but softmax cancels it. Two parts of v2 and v3 are left out: the
    norm of the table, and projections shared with the content's.

    DeBERTa's decoder (EMD) runs its last layer twice, with absolute positions in the queries alone and the keys and
    values of the previous layer. Here absolute positions are added to the input of the last layers, and so reach
    queries, keys and values.
    """

    name = "deberta"
    summary = "learns a vector per distance and compares it with queries and keys"
    title = "DeBERTa"
    equation = "s = (q.k + q . R^K_delta(m,n) + k . R^Q_delta(m,n)) / sqrt((1 + terms) d)"
    source = Source(
        "DeBERTa: Decoding-enhanced BERT with Disentangled Attention",
        2020,
        "https://arxiv.org/abs/2006.03654",
        "https://github.com/microsoft/DeBERTa",
    )
    regime = "from-scratch"
    shared = ("relative_embeddings", "absolute_positions")

    max_distance: Annotated[int, AtLeast(1)] | None = None
    terms: Annotated[tuple[str, ...], SomeOf(_TERMS)] = _TERMS
    buckets: Annotated[int, AtLeast(4)] | None = None
    clamped: bool = True
    scaled: bool = True
    released: bool = True
    absolute_layers: Annotated[int, AtLeast(0)] = 0
    num_positions: Annotated[int, AtLeast(1)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        single = (self.buckets or 0) // 2
        if self.buckets and self.max_distance is not None and self.max_distance - 1 <= single:
            raise InvalidField(
                f"deberta: max_distance={self.max_distance} is not allowed; {self.buckets} buckets hold single "
                f"distances up to {single}, and max_distance - 1 must lie beyond"
            )

    @property
    def methods(self) -> frozenset[str]:
        scaled = {"query_scale"} if self.scaled else set()
        return frozenset({"content_bias"} | scaled | ({"embedding"} if self.absolute_layers else set()))

    @property
    def every_block(self) -> bool:  # type: ignore[override]
        return self.absolute_layers > 0

    @property
    def absolute(self) -> bool:  # type: ignore[override]
        return self.absolute_layers > 0

    def resolve(self, checkpoint: Checkpoint) -> Scheme:
        farthest = self.max_distance or min(512, checkpoint.training_length)
        return dataclasses.replace(self, max_distance=farthest)

    def parameters(self, shape: ModelShape, random: torch.Generator) -> dict[str, torch.Tensor]:
        width, hidden = shape.num_heads * shape.head_dim, shape.hidden_size
        rows = 2 * (self.buckets or self.max_distance or min(512, shape.training_length))
        parameters = {"relative_embeddings": 0.02 * torch.randn(rows, hidden, generator=random)}
        if "c2p" in self.terms:
            parameters["position_key"] = 0.02 * torch.randn(width, hidden, generator=random)
        if "p2c" in self.terms:
            parameters["position_query"] = 0.02 * torch.randn(width, hidden, generator=random)
            parameters["position_query_offset"] = torch.zeros(width)
        if self.absolute_layers > shape.num_layers:
            raise InvalidField(
                f"deberta: absolute_layers={self.absolute_layers}; the stack has {shape.num_layers} layers"
            )
        if self.absolute_layers:
            parameters["absolute_positions"] = torch.zeros(self.num_positions or shape.training_length, hidden)
        return parameters

    def query_scale(self, positions: torch.Tensor, num_heads: int, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        return torch.full_like(positions, self._share, dtype=torch.float32)[None]

    def content_bias(self, pairs: Pairs, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        dtype, heads = pairs.scores.dtype, pairs.scores.shape[1]

        def learned(name: str) -> torch.Tensor:
            return weights[name].to(dtype)

        table, total = learned("relative_embeddings"), torch.zeros_like(pairs.scores)
        rows = self._rows(pairs.distance, len(table))
        if "c2p" in self.terms:
            keys = (table @ learned("position_key").T).unflatten(-1, (heads, -1)).transpose(0, 1)
            products = pairs.query.to(dtype) @ keys.transpose(-1, -2)
            total = total + products.gather(-1, rows[:, None].expand(total.shape))
        if "p2c" in self.terms:
            if not self.released:
                rows = self._rows(-pairs.distance, len(table))
            queries = table @ learned("position_query").T + learned("position_query_offset")
            total = total + _by_key(pairs.key.to(dtype), queries.unflatten(-1, (heads, -1)).transpose(0, 1), rows)
        return total * pairs.scaling * self._share

    def embedding(self, tokens: Tokens, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        if tokens.remaining > self.absolute_layers:
            return tokens.states
        rows = rows_at(weights["absolute_positions"], tokens.positions, self.name)
        return (tokens.states + rows).to(tokens.states.dtype)

    @property
    def _share(self) -> float:
        return (1 + len(self.terms)) ** -0.5 if self.scaled else 1.0

    def _rows(self, distance: torch.Tensor, count: int) -> torch.Tensor:
        if self.buckets:
            farthest = self.max_distance or 512
            if self.clamped:
                distance = distance.clamp(1 - farthest, farthest - 1)
            distance = signed_log_buckets(distance, self.buckets, farthest)
        return (distance + count // 2).clamp(0, count - 1)


def _by_key(key: torch.Tensor, queries: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The scores <k_n, queries[rows(m, n)]>, `(batch, heads, q_len, kv_len)`, from queries `(heads, rows,
    head_dim)`.
    """
    if rows.shape[1] == 1:  # a decoding step: one vector per key is cheaper than a product with every row
        return (key * queries[:, rows[:, 0]].transpose(0, 1)).sum(dim=-1)[:, :, None]
    products = key @ queries.transpose(-1, -2)
    places = rows.transpose(1, 2)[:, None].expand(*products.shape[:3], -1)
    return products.gather(-1, places).transpose(-1, -2)
