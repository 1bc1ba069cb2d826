import numpy as np
import pytest
import torch

from rope_patch import Hierarchical, InvalidField


def table(n=6, dim=8, dtype=torch.float64):
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def decomposed(p, alpha):
    """The post's two equations, one row at a time, float64."""
    n = len(p)
    u = [(p[i] - alpha * p[0]) / (1 - alpha) for i in range(n)]
    q = np.empty((n * n, p.shape[1]))
    for i in range(1, n + 1):
        for j in range(1, n + 1):
            q[(i - 1) * n + j - 1] = alpha * u[i - 1] + (1 - alpha) * u[j - 1]
    return q


@pytest.mark.parametrize("alpha", [0.1, 0.4, 0.6, 0.9])
def test_every_row_is_the_published_mixture(alpha):
    p = table()
    found = Hierarchical(alpha).embedding(p)
    assert found.shape == (36, 8)
    np.testing.assert_allclose(found.numpy(), decomposed(p.numpy(), alpha), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("alpha", [0.3, 0.4, 0.99])
def test_the_first_rows_are_the_checkpoint_bit_for_bit(dtype, alpha):
    p = table(dtype=dtype)
    assert torch.equal(Hierarchical(alpha).embedding(p).to(dtype)[:6], p)


def test_the_table_that_was_given_stays_as_it_is():
    p = table()
    Hierarchical().embedding(p)
    assert torch.equal(p, table())


@pytest.mark.parametrize("alpha", [0.2, 0.4, 0.6])
def test_no_two_positions_are_the_same(alpha):
    rows = Hierarchical(alpha).embedding(table())
    distance = torch.cdist(rows, rows) + torch.eye(36, dtype=torch.float64)
    assert distance.min() > 1e-3


@pytest.mark.parametrize("rows", [6, 7, 12, 13, 35, 36])
def test_fewer_rows_are_the_first_of_all(rows):
    assert torch.equal(Hierarchical(num_positions=rows).embedding(table()), Hierarchical().embedding(table())[:rows])


@pytest.mark.parametrize("rows", [5, 37])
def test_rows_that_cannot_be_decomposed_are_refused(rows):
    with pytest.raises(InvalidField, match=rf"num_positions={rows} is not allowed; 6 positions .* 6 to 36"):
        Hierarchical(num_positions=rows).embedding(table())


@pytest.mark.parametrize("alpha", [0, 1, 0.5, -0.1, 1.5, float("nan"), "0.4", None, True])
def test_alpha_is_named(alpha):
    with pytest.raises(InvalidField, match=r"hierarchical: alpha=.* not 0\.5"):
        Hierarchical(alpha)


@pytest.mark.parametrize("rows", [0, 2.5, True, "9"])
def test_the_number_of_positions_is_named(rows):
    with pytest.raises(InvalidField, match="hierarchical: num_positions="):
        Hierarchical(num_positions=rows)
