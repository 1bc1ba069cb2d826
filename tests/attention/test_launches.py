"""How many kernels a decoding step launches: time that a small model, or a GPU, waits for."""

import pytest
import transformers

from benchmarks.comparison import Shape
from benchmarks.launches import calls, host_time, operators, per_layer, waits
from rope_patch.doctor.versions import older

pytestmark = pytest.mark.unpoisoned
TINY = Shape(64, 4, 2, 16)


BUDGETS = {  # kernels, operators with views, and calls of Python functions
    "rerope": (5, 12, 36),
    "leaky_rerope": (5, 12, 36),
    "self_extend": (5, 12, 36),
    "dca": (5, 11, 37),
    "logn": (1, 1, 28),
    "alibi": (0, 3, 30),
    "xpos": (3, 8, 32),
    "yarn:factor=4": (0, 0, 0),
}


MORE = (0, 1, 2) if older(transformers.__version__, "5.23") else (0, 0, 0)
"""How much more lies beyond a plain layer of an older Transformers, which views its states once less."""


@pytest.mark.parametrize("scheme", BUDGETS)
def test_a_layer_adds_little_to_what_plain_attention_does(scheme):
    found = tuple(count(TINY, scheme)[0] for count in (per_layer, operators, calls))
    budget = [most + more for most, more in zip(BUDGETS[scheme], MORE, strict=True)]
    assert all(number <= most for number, most in zip(found, budget, strict=True)), found


@pytest.mark.parametrize("scheme", ["rerope", "self_extend", "dca", "logn", "alibi", "xpos", "dynamic_ntk"])
def test_a_step_does_not_wait_for_the_device(scheme):
    assert waits(TINY, scheme)[0] == 0


def test_the_time_of_the_host_is_that_of_a_layer():
    """How long depends on the machine; the patched model takes no less than its operators."""
    beyond, plain = host_time(TINY, "rerope")
    assert 0 < beyond < 4 * plain
