import numpy as np
import pytest
import torch

from rope_patch import InvalidField, Multiplicative
from tests.definition import Definition, no_rotation
from tests.schemes.entering import SHAPE, some_tokens, started

CASES = ["multiplicative:num_positions=700"]

DEFINITIONS = {
    "multiplicative:num_positions=700": Definition(
        distance=no_rotation, embedding=lambda text: text.x * text.learned["position_factors"][text.m]
    )
}


def test_each_token_is_multiplied_by_the_row_of_its_position():
    table = torch.randn(40, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tokens = some_tokens([[0, 0, 1, 2], [39, 17, 0, 1]])
    found = Multiplicative().embedding(tokens, {"position_factors": table}).numpy()
    x, p, m = tokens.states.numpy(), table.numpy(), tokens.positions.numpy()
    for row in range(2):
        for column in range(4):
            for j in range(8):
                assert found[row, column, j] == x[row, column, j] * p[m[row, column], j]


@pytest.mark.parametrize(("scheme", "rows"), [(Multiplicative(), SHAPE.training_length), (Multiplicative(7), 7)])
def test_the_factors_start_as_ones(scheme, rows):
    np.testing.assert_array_equal(started(scheme)["position_factors"].numpy(), np.ones((rows, SHAPE.hidden_size)))


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "9"])
def test_the_number_of_positions_is_named(value):
    with pytest.raises(InvalidField, match="multiplicative: num_positions="):
        Multiplicative(num_positions=value)
