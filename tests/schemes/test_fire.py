"""The formula of the paper for single pairs, and its claim about long texts."""

import numpy as np
import pytest
import torch

from rope_patch import FIRE, InvalidField
from rope_patch.schemes.slots import ModelShape
from tests.definition import Definition, no_rotation
from tests.schemes.pairs import at_start, make_pairs, trained

CASES = ["fire:width=8,initial_scale=1,threshold=8"]


def expected(m, n, threshold, w):
    def psi(x):
        return np.log(abs(w["log_scale"] * x) + 1)

    seen = psi(m - n) / (psi(max(m, abs(w["threshold_factor"] * threshold))) + 1e-6)
    hidden = np.maximum(w["input_weight"] * seen + w["input_offset"], 0)
    return w["output_weight"] @ hidden + w["output_offset"]


def interpolated(threshold):
    def bias(head):
        w = head.learned

        def psi(x):
            return np.log(abs(w["log_scale"] * x) + 1)

        seen = psi(head.m - head.n) / (psi(np.maximum(head.m, abs(w["threshold_factor"] * threshold))) + 1e-6)
        hidden = np.maximum(seen[..., None] * w["input_weight"] + w["input_offset"], 0)
        return hidden @ w["output_weight"][head.index] + w["output_offset"][head.index]

    return bias


DEFINITIONS = {
    "fire:width=8,initial_scale=1": Definition(distance=no_rotation, content_bias=interpolated(512)),
    "fire:width=8,threshold=9,initial_scale=1": Definition(distance=no_rotation, content_bias=interpolated(9)),
}


@pytest.mark.parametrize("threshold", [4.0, 512.0])
@pytest.mark.parametrize(("m", "n"), [(range(9), range(9)), (range(5, 9), range(9)), (range(0, 3000, 500), range(9))])
def test_every_pair_gets_what_the_paper_says(threshold, m, n):
    scheme, pairs = FIRE(width=6, threshold=threshold), make_pairs(m, n)
    weights = trained(scheme)
    plain = {name: weight.detach().numpy() for name, weight in weights.items()}
    found = scheme.content_bias(pairs, weights).detach().numpy()
    assert found.shape == (1, 3, len(m), len(n))
    for i, j in np.ndindex(len(m), len(n)):
        np.testing.assert_allclose(found[0, :, i, j], expected(m[i], n[j], threshold, plain), atol=1e-12)


def test_far_beyond_the_threshold_it_sees_nothing_new():
    scheme = FIRE(threshold=8.0)
    weights = at_start(scheme)
    weights["input_weight"] = torch.ones(32, dtype=torch.float64)
    weights["input_offset"] = torch.zeros(32, dtype=torch.float64)
    ends = [scheme.content_bias(make_pairs(range(m, m + 1), range(1)), weights) for m in (8, 100, 10**6)]
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_and_the_first_query(dtype):
    weights = {name: weight.detach().to(dtype) for name, weight in at_start(FIRE()).items()}
    weights["threshold_factor"] = torch.zeros(1, dtype=dtype)
    found = FIRE().content_bias(make_pairs(range(5), range(5)), weights)
    assert found.dtype == torch.float64
    assert found.isfinite().all()


def test_it_starts_as_layers_do_with_the_last_one_scaled():
    shape = ModelShape(1000, 4, 12, 2, 50, 16, 4)
    published, small = at_start(FIRE(initial_scale=1.0), shape), at_start(FIRE(), shape)
    assert published["log_scale"].item() == pytest.approx(0.1)
    assert published["threshold_factor"].item() == 1
    assert 0.9 < published["input_weight"].abs().max() <= 1
    assert 0.99 < published["output_weight"].abs().max() * 32**0.5 <= 1
    for name, weight in small.items():
        torch.testing.assert_close(weight, published[name] * (0.01 if name.startswith("output") else 1))


def test_one_network_for_all_layers_is_fire_s():
    assert set(FIRE(per_layer=False).shared) == at_start(FIRE()).keys()
    assert FIRE().shared == ()


@pytest.mark.parametrize("fields", [{"width": 0}, {"threshold": 0}, {"initial_scale": 0}, {"per_layer": 1}])
def test_wrong_fields_are_named(fields):
    with pytest.raises(InvalidField, match=next(iter(fields))):
        FIRE(**fields)
