"""The relative encoding of Transformer-XL and XLNet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.rules import Above, AtLeast
from rope_patch.schemes.slots import ModelShape, Pairs
from rope_patch.schemes.tools.sinusoids import sinusoidal_rows
from rope_patch.typing import NO_WEIGHTS, Weights


@dataclass(frozen=True)
class TransformerXL(Scheme):
    """Multiply out absolute sinusoids, and replace the key's position by its distance.

    The product of two tokens with positions has four terms: content with content (the usual score), content with
    distance, and one of each in which learned vectors u and v replace the query. The sinusoid of a distance needs no
    table and has no limit; keys after the query have negative distances.

    The sinusoid of m - n is the sinusoid of n, rotated. So the projected query is rotated by m once and multiplied by
    the sinusoids of the keys. This is exact at any positions, whereas the released code's shift of rows needs positions
    without gaps. It costs hidden_size / head_dim times the product of queries and keys.

    Args:
        untied: give each layer its own u and v, as in XLNet and with `untie_r` of the released code; by default all
            layers share them, as in Transformer-XL. The projection of distances is always per layer.
        clamp_len: clip distances to this many tokens, at least 1, on either side, as in XLNet; default None.
        initial_std: standard deviation of the initial projection, above 0; default 0.001, which changes a pretrained
            model little. The released code draws it, u and v from normal(0, 0.02); u and v start at zero here.
    """

    name = "xl"
    summary = "compares queries with sinusoids of the distance"
    title = "Transformer-XL"
    equation = "b = (u . k + (q + v) . W R_(m-n)) * scaling"
    source = Source(
        "Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context",
        2019,
        "https://arxiv.org/abs/1901.02860",
        "https://github.com/kimiyoung/transformer-xl",
    )
    regime = "from-scratch"

    untied: bool = False
    initial_std: Annotated[float, Above(0)] = 0.001
    clamp_len: Annotated[int, AtLeast(1)] | None = None

    @property
    def shared(self) -> tuple[str, ...]:  # type: ignore[override]
        return () if self.untied else ("content_offset", "distance_offset")

    def parameters(self, shape: ModelShape, random: torch.Generator) -> dict[str, torch.Tensor]:
        width = shape.num_heads * shape.head_dim
        return {
            "content_offset": torch.zeros(shape.num_heads, shape.head_dim),
            "distance_offset": torch.zeros(shape.num_heads, shape.head_dim),
            "distance_projection": self.initial_std * torch.randn(width, shape.hidden_size, generator=random),
        }

    def content_bias(self, pairs: Pairs, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        query, key = (x.to(pairs.scores.dtype) for x in (pairs.query, pairs.key))
        u, v, projection = (
            weights[name].to(query.dtype) for name in ("content_offset", "distance_offset", "distance_projection")
        )
        by_key = key @ u[:, :, None]
        projected = (query + v[:, None]) @ projection.unflatten(0, (query.shape[1], -1))
        hidden = projected.shape[-1]
        at_m, at_n = (
            sinusoidal_rows(x, hidden, layout="split").to(query.dtype)[:, None]
            for x in (pairs.m[:, :, 0], pairs.n[:, 0])
        )
        # sin(m-n) = sin m cos n - cos m sin n, cos(m-n) = cos m cos n + sin m sin n
        (of_sin, of_cos), (sin, cos) = projected.chunk(2, dim=-1), at_m.chunk(2, dim=-1)
        turned = torch.cat([of_cos * sin - of_sin * cos, of_sin * sin + of_cos * cos], dim=-1)
        by_distance = turned @ at_n.transpose(-1, -2)
        if self.clamp_len is not None:
            ends = torch.tensor([-self.clamp_len, self.clamp_len], device=query.device)
            at_ends = projected @ sinusoidal_rows(ends, hidden, layout="split").to(query.dtype).T
            distance = pairs.distance[:, None]
            by_distance = torch.where(distance < -self.clamp_len, at_ends[..., :1], by_distance)
            by_distance = torch.where(distance > self.clamp_len, at_ends[..., 1:], by_distance)
        return (by_key.transpose(-1, -2) + by_distance) * pairs.scaling
