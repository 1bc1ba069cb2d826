"""How many kernels a decoding step launches: time that a small model, or a GPU, waits for."""

import pytest

from benchmarks.comparison import Shape
from benchmarks.launches import per_layer, waits

pytestmark = pytest.mark.unpoisoned
TINY = Shape(64, 4, 2, 16)


@pytest.mark.parametrize(
    ("scheme", "most"),
    [("rerope", 8), ("leaky_rerope", 8), ("self_extend", 8), ("dca", 8), ("logn", 2), ("alibi", 2)],
)
def test_a_layer_adds_few_kernels_to_those_of_plain_attention(scheme, most):
    assert per_layer(TINY, scheme)[0] <= most


@pytest.mark.parametrize("scheme", ["rerope", "self_extend", "dca", "logn", "alibi", "xpos", "dynamic_ntk"])
def test_a_step_does_not_wait_for_the_device(scheme):
    assert waits(TINY, scheme)[0] == 0
