"""How many kernels a decoding step launches: time that a small model, or a GPU, waits for."""

import pytest

from benchmarks.comparison import Shape
from benchmarks.launches import per_layer, waits

TINY = Shape(64, 4, 2, 16)


@pytest.mark.parametrize(
    ("scheme", "most"),
    [("rerope", 8), ("leaky_rerope", 8), ("self_extend", 8), ("dca", 8), ("logn", 2), ("alibi", 2)],
)
def test_a_layer_adds_few_kernels_to_those_of_plain_attention(scheme, most):
    assert per_layer(TINY, scheme)[0] <= most


@pytest.mark.parametrize(
    ("scheme", "most"),
    # whether cached positions go on; and for chunks, at which slot they begin
    [("rerope", 1), ("self_extend", 1), ("dca", 2), ("logn", 0), ("alibi", 1), ("xpos", 1), ("dynamic_ntk", 1)],
)
def test_a_step_waits_for_the_device_not_by_layers(scheme, most):
    assert waits(TINY, scheme)[0] <= most
