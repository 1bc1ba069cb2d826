"""Random pairs and learned parameters in float64, for schemes that act in attention."""

from __future__ import annotations

import torch

from rope_patch.schemes.base import Scheme
from rope_patch.schemes.slots import ModelShape, Pairs

SHAPE = ModelShape(
    num_heads=3, head_dim=4, hidden_size=12, num_layers=2, vocab_size=50, training_length=16, value_dim=5
)


def random(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_pairs(
    m: range, n: range, seen: torch.Tensor | None = None, batch: int = 2, shape: ModelShape = SHAPE
) -> Pairs:
    """Queries at positions m, keys at positions n; a query sees the keys up to itself unless stated otherwise."""
    queries, keys = torch.tensor(m)[None, :, None], torch.tensor(n)[None, None]
    query = random(batch, shape.num_heads, len(m), shape.head_dim, seed=1)
    key = random(batch, shape.num_heads, len(n), shape.head_dim, seed=2)
    seen = (queries >= keys)[:, None] if seen is None else seen
    states = random(batch, len(m), shape.hidden_size, seed=4)
    return Pairs(query, key, queries, keys, 0.7 * query @ key.transpose(-1, -2), seen, 0.7, states)


def trained(scheme: Scheme, shape: ModelShape = SHAPE, seed: int = 3) -> dict[str, torch.Tensor]:
    """The scheme's parameters, each some steps away from its start, in float64."""
    start = scheme.parameters(shape, torch.Generator().manual_seed(seed))
    return {
        name: (value.double() + 0.5 * random(*value.shape, seed=seed + index)).requires_grad_()
        for index, (name, value) in enumerate(start.items())
    }


def at_start(scheme: Scheme, shape: ModelShape = SHAPE) -> dict[str, torch.Tensor]:
    """The scheme's parameters as they start, in float64."""
    return {
        name: value.double().requires_grad_()
        for name, value in scheme.parameters(shape, torch.Generator().manual_seed(3)).items()
    }
