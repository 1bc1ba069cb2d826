import numpy as np
import pytest
import torch

from rope_patch import InvalidField, Sandwich
from tests.definition import Definition

CASES = ["sandwich:embedding_dim=16,base=100"]


def sinusoidal(positions, dim, base):
    """The embedding of "Attention Is All You Need", float64, `(positions, dim)`."""
    angles = positions[:, None] / base ** (np.arange(0, dim, 2) / dim)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)


def product(dim, base):
    def bias(head, m, n):
        rows, columns = (sinusoidal(np.ravel(x).astype(float), dim, base) for x in (m, n))
        return rows @ columns.T / ((head + 1) * 8 / 4)

    return bias


DEFINITIONS = {
    "sandwich:embedding_dim=16,base=100": Definition(
        frequencies=lambda theta, length: 0 * theta, bias=product(16, 100.0)
    ),
    "rope+sandwich:embedding_dim=16,base=100": Definition(bias=product(16, 100.0)),
}


@pytest.mark.parametrize("heads", [1, 8, 12])
def test_the_bias_is_the_inner_product_of_sinusoidal_embeddings(heads):
    positions = np.arange(300)
    embeddings = sinusoidal(positions, 128, 10000.0)
    distance = torch.tensor(positions[:, None] - positions[None])
    found = Sandwich().bias(distance, heads)
    for head in range(heads):
        expected = (embeddings @ embeddings.T - 64) * heads / (8 * (head + 1))
        torch.testing.assert_close(found[head].double(), torch.tensor(expected), atol=2e-3 * heads, rtol=0)
    assert not found.diagonal(dim1=1, dim2=2).any()


def test_an_odd_dimension_is_named():
    with pytest.raises(InvalidField, match="embedding_dim=7 is not allowed"):
        Sandwich(7)
