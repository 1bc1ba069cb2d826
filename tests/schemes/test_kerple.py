"""Both kernels by their formulas, within the bounds of the released code."""

import numpy as np
import pytest
import torch

from rope_patch import KERPLE, ALiBi, InvalidField
from tests.definition import Definition, no_rotation
from tests.schemes.pairs import SHAPE, at_start

CASES = ["kerple:initial_scale=1"]

DISTANCES = torch.tensor([[-40, -1, 0], [1, 7, 5000]])
SCALE, CURVE = [0.3, 1.5, -1.0], [0.7, 0.002, 2.5]


def kernel(variant):
    def bias(head):
        r1, r2 = (max(head.learned[name][head.index], 0.01) for name in ("kernel_scale", "kernel_shape"))
        far = np.abs(head.m - head.n)
        return -r1 * np.log(1 + r2 * far) if variant == "log" else -r1 * far ** min(r2, 2.0)

    return bias


DEFINITIONS = {
    "kerple:initial_scale=1": Definition(distance=no_rotation, content_bias=kernel("log")),
    "kerple:variant=power,initial_scale=1": Definition(distance=no_rotation, content_bias=kernel("power")),
}


@pytest.mark.parametrize("variant", ["log", "power"])
@pytest.mark.parametrize("initial_scale", [1.0, 0.01])
def test_the_bias_is_the_kernel_of_the_paper(variant, initial_scale):
    weights = {"kernel_scale": torch.tensor(SCALE).double(), "kernel_shape": torch.tensor(CURVE).double()}
    found = KERPLE(variant, initial_scale).bias(DISTANCES, 3, weights)
    assert found.shape == (3, 2, 3)
    far = np.abs(DISTANCES.numpy())
    for head in range(3):
        r1, r2 = max(SCALE[head], 0.01 * initial_scale), max(CURVE[head], 0.01)
        expected = -r1 * np.log(1 + r2 * far) if variant == "log" else -r1 * far ** min(r2, 2.0)
        np.testing.assert_allclose(found[head], expected, rtol=1e-6)


def test_a_power_of_one_is_alibi():
    slopes = torch.tensor([0.5, 0.25, 0.125])
    found = KERPLE("power").bias(DISTANCES, 3, {"kernel_scale": slopes, "kernel_shape": torch.ones(3)})
    torch.testing.assert_close(found, ALiBi(slopes=tuple(slopes.tolist())).bias(DISTANCES, 3))


@pytest.mark.parametrize(("variant", "most"), [("log", (2, 1)), ("power", (1, 2))])
def test_it_starts_as_published_times_the_initial_scale(variant, most):
    big = SHAPE.__class__(1000, 4, 12, 2, 50, 16, 4)
    published, small = (at_start(KERPLE(variant, scale), big) for scale in (1.0, 0.01))
    for name, upper in zip(("kernel_scale", "kernel_shape"), most, strict=True):
        assert 0 <= published[name].min() < 0.01 * upper
        assert 0.99 * upper < published[name].max() <= upper
    torch.testing.assert_close(small["kernel_scale"], 0.01 * published["kernel_scale"])
    torch.testing.assert_close(small["kernel_shape"], published["kernel_shape"])


@pytest.mark.parametrize("variant", ["log", "power"])
def test_no_bound_holds_a_parameter_for_good(variant):
    weights = {
        name: torch.full((1,), value, requires_grad=True)
        for name, value in {"kernel_scale": -1.0, "kernel_shape": -1.0}.items()
    }
    KERPLE(variant).bias(torch.arange(9), 1, weights).sum().backward()
    for weight in weights.values():
        assert weight.grad.isfinite().all()
        assert weight.grad.all()


@pytest.mark.parametrize("fields", [{"variant": "exp"}, {"initial_scale": 0}, {"per_layer": 1}])
def test_wrong_fields_are_named(fields):
    with pytest.raises(InvalidField, match=next(iter(fields))):
        KERPLE(**fields)
