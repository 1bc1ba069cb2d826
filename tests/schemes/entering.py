"""Tokens and parameters for the schemes that place tokens where they enter a model."""

import torch

from rope_patch.schemes.slots import ModelShape, Tokens

SHAPE = ModelShape(num_heads=2, head_dim=4, hidden_size=8, num_layers=3, vocab_size=23, training_length=32, value_dim=4)


def started(scheme, shape=SHAPE, seed=0):
    """The parameters of a scheme as they start."""
    return scheme.parameters(shape, torch.Generator().manual_seed(seed))


def trained(scheme, seed=0, dtype=torch.float64, spread=0.3):
    """The parameters of a scheme, moved well away from where they started."""
    random = torch.Generator().manual_seed(seed + 1)
    moved = {
        name: value + spread * torch.randn(value.shape, generator=random)
        for name, value in started(scheme, seed=seed).items()
    }
    return {name: value.to(dtype).requires_grad_() for name, value in moved.items()}


def some_tokens(positions, hidden=8, batch=None, seed=0, dtype=torch.float64, block=0):
    """Random tokens at these positions, `(batch or 1, length)`."""
    positions, random = torch.tensor([list(row) for row in positions]), torch.Generator().manual_seed(seed)
    size = (batch or len(positions), positions.shape[1])
    states = torch.randn(*size, hidden, generator=random, dtype=torch.float64).to(dtype)
    return Tokens(states, positions, torch.randint(SHAPE.vocab_size, size, generator=random), block)


def some_of(tokens, columns, rows=slice(None)):
    """Some columns of all rows, or of some."""
    positions = tokens.positions if len(tokens.positions) == 1 else tokens.positions[rows]
    return Tokens(tokens.states[rows, columns], positions[:, columns], tokens.ids[rows, columns], tokens.block)
