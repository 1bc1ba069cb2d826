"""On a CPU in half precision: gradients under the fast paths are those of the definition, as `tests/test_cuda.py` asks.

Texts are long enough for tiles. `tests/attention/test_fused.py` has the Triton kernel in half precision.
"""

import pytest
import torch

from rope_patch import patch
from tests.families import build
from tests.precision import TOLERANCES, assert_near, in_one, relative_error
from tests.runs import gradients, tokens

pytestmark = pytest.mark.usefixtures("trained_parameters")

LENGTH = 640
FOX, SSMAX = "fox:horizon=4,initial_std=0.1", "ssmax:initial_scale=0.43"

dtypes = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


def slopes(scheme, dtype, attention, exact=False):
    """All gradients of a model whose weights have this dtype; computed in float64 if `exact`."""
    model = build("llama").to(getattr(torch, dtype))
    patch(model, scheme, attention=attention)
    return in_one(gradients(model.double() if exact else model, tokens(LENGTH)))


@dtypes
@pytest.mark.parametrize("attention", ["auto", "chunked"])
@pytest.mark.parametrize("scheme", [FOX, SSMAX, "rope+alibi", "kerple", "rerope:window=128"])
def test_gradients_are_those_of_the_definition(scheme, dtype, attention):
    found, defined = (slopes(scheme, dtype, each) for each in (attention, "oracle"))
    assert_near(found, defined, TOLERANCES[dtype], lambda: slopes(scheme, dtype, "oracle", exact=True))


@dtypes
@pytest.mark.parametrize(("scheme", "is_sharp"), [(FOX, False), (SSMAX, True)])
def test_what_float64_would_change_is_more_than_the_tolerance_only_where_attention_is_sharp(scheme, is_sharp, dtype):
    """Scalable-Softmax with random scales multiplies scores by up to six: rounded states alone move its gradients."""
    defined, exact = slopes(scheme, dtype, "oracle"), slopes(scheme, dtype, "oracle", exact=True)
    assert (relative_error(defined, exact) > TOLERANCES[dtype]) == is_sharp


@dtypes
def test_a_gradient_of_running_sums_without_the_part_of_queries_is_seen(dtype, monkeypatch):
    """Rounded outputs leave something of it in each row, which every earlier gate inherits; so it did on an H100."""
    from rope_patch.attention.bias import KeyTerm

    gradient = KeyTerm.gradient

    def of_keys_alone(self, tile, inner, into):
        of_queries = inner.sum(dim=-1)
        gradient(self, tile, inner, into)
        into[..., tile.k0 + tile.distance :][..., : of_queries.shape[-1]] -= of_queries[..., : tile.q1 - tile.q0]

    monkeypatch.setattr(KeyTerm, "gradient", of_keys_alone)
    with pytest.raises(AssertionError, match="relative error"):
        test_gradients_are_those_of_the_definition(FOX, dtype, "auto")
