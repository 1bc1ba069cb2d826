import numpy as np
import pytest
import torch

from rope_patch import Hierarchical, InvalidField
from tests.definition import Definition, no_rotation
from tests.schemes.entering import SHAPE, some_tokens, started

CASES = ["hierarchical"]


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


DEFINITIONS = {
    "hierarchical": Definition(
        distance=no_rotation, embedding=lambda text: text.x + decomposed(text.learned["base_positions"], 0.4)[text.m]
    )
}


@pytest.mark.parametrize("alpha", [0.1, 0.4, 0.6, 0.9])
def test_every_row_is_the_published_mixture(alpha):
    p = table()
    found = Hierarchical(alpha).rows(p)
    assert found.shape == (36, 8)
    np.testing.assert_allclose(found.numpy(), decomposed(p.numpy(), alpha), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("alpha", [0.3, 0.4, 0.99])
def test_the_first_rows_are_the_checkpoint_bit_for_bit(dtype, alpha):
    p = table(dtype=dtype)
    assert torch.equal(Hierarchical(alpha).rows(p).to(dtype)[:6], p)


def test_the_table_that_was_given_stays_as_it_is():
    p = table()
    Hierarchical().rows(p)
    assert torch.equal(p, table())


@pytest.mark.parametrize("alpha", [0.2, 0.4, 0.6])
def test_no_two_positions_are_the_same(alpha):
    rows = Hierarchical(alpha).rows(table())
    distance = torch.cdist(rows, rows) + torch.eye(36, dtype=torch.float64)
    assert distance.min() > 1e-3


@pytest.mark.parametrize("rows", [6, 7, 12, 13, 35, 36])
def test_fewer_rows_are_the_first_of_all(rows):
    assert torch.equal(Hierarchical(num_positions=rows).rows(table()), Hierarchical().rows(table())[:rows])


@pytest.mark.parametrize("rows", [5, 37])
def test_rows_that_cannot_be_decomposed_are_refused(rows):
    with pytest.raises(InvalidField, match=rf"num_positions={rows} is not allowed; .* 6 positions .* 6 to 36"):
        Hierarchical(num_positions=rows).rows(table())


# --- in a model that has no table ------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.1, 0.4, 0.9])
def test_mixtures_of_the_learned_rows_are_added_to_the_tokens(alpha):
    p = table()
    tokens = some_tokens([[0, 0, 1, 5, 6, 7], [35, 30, 11, 12, 0, 1]])
    found = Hierarchical(alpha).embedding(tokens, {"base_positions": p}) - tokens.states
    expected = decomposed(p.numpy(), alpha)[tokens.positions.numpy()]
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-13)


def test_both_forms_say_the_same():
    p, tokens = table(dtype=torch.float32), some_tokens([range(36)], dtype=torch.float32)
    found = Hierarchical().embedding(tokens, {"base_positions": p})
    assert torch.equal(found, tokens.states + Hierarchical().rows(p))


def test_as_many_rows_are_learned_as_the_model_was_trained_on():
    assert torch.equal(started(Hierarchical())["base_positions"], torch.zeros(SHAPE.training_length, SHAPE.hidden_size))
    assert started(Hierarchical(initial_std=0.02))["base_positions"].std() == pytest.approx(0.02, rel=0.1)
    with pytest.raises(InvalidField, match=rf"num_positions={SHAPE.training_length - 1} is not allowed"):
        started(Hierarchical(num_positions=SHAPE.training_length - 1))


@pytest.mark.parametrize("alpha", [0, 1, 0.5, -0.1, 1.5, float("nan"), "0.4", None, True])
def test_alpha_is_named(alpha):
    with pytest.raises(InvalidField, match=r"hierarchical: alpha=.* not 0\.5"):
        Hierarchical(alpha)


@pytest.mark.parametrize("rows", [0, 2.5, True, "9"])
def test_the_number_of_positions_is_named(rows):
    with pytest.raises(InvalidField, match="hierarchical: num_positions="):
        Hierarchical(num_positions=rows)


@pytest.mark.parametrize("std", [-0.1, "0.02", None])
def test_the_spread_at_the_start_is_named(std):
    with pytest.raises(InvalidField, match="hierarchical: initial_std="):
        Hierarchical(initial_std=std)
