import math

import numpy as np
import pytest

from rope_patch import get_scheme
from rope_patch.typing import RotarySpec
from tests.definition import Definition

CASES = ["mrrope:factor=4", "mrrope:factor=4,form=uni", "mrrope:factor=4,beta_fast=3,beta_slow=0.5"]

LLAMA2 = RotarySpec(128, 10000.0, 4096)
LLAMA3 = RotarySpec(128, 500000.0, 8192)


def by_radices(theta, length, factor, form, fast=32, slow=1):
    """Equations 13 to 16: theta_i over the product of the radix factors lambda of all pairs before it."""
    turns = length * theta / (2 * math.pi)
    low = max((i for i in range(len(theta)) if turns[i] > fast), default=0)
    high = min((i for i in range(len(theta)) if turns[i] < slow), default=len(theta) - 1)
    n, found, product = high - low, [], 1.0
    for i, frequency in enumerate(theta):
        found.append(frequency / product)
        if low <= i < high:
            product *= factor ** (1 / n if form == "uni" else 2 * (1 + i - low) / ((1 + n) * n))
    return np.array(found)


SHARPER = 0.1 * math.log(4) + 1
DEFINITIONS = {
    CASES[0]: Definition(frequencies=lambda theta, _: by_radices(theta, 32, 4, "pro"), temperature=SHARPER),
    CASES[1]: Definition(frequencies=lambda theta, _: by_radices(theta, 32, 4, "uni"), temperature=SHARPER),
    CASES[2]: Definition(frequencies=lambda theta, _: by_radices(theta, 32, 4, "pro", 3, 0.5), temperature=SHARPER),
}


@pytest.mark.parametrize("rotary", [LLAMA2, LLAMA3, RotarySpec(64, 10000.0, 256), RotarySpec(8, 100.0, 10**5)])
@pytest.mark.parametrize("form", ["pro", "uni"])
@pytest.mark.parametrize("factor", [1, 4, 32.5])
def test_the_frequencies_are_those_of_mixed_radices(rotary, form, factor):
    found = get_scheme("mrrope", factor=factor, form=form).frequencies(rotary)
    theta = rotary.base ** (-np.arange(0, rotary.dim, 2) / rotary.dim)
    expected = by_radices(theta, rotary.training_length, factor, form)
    np.testing.assert_allclose(found.inv_freq, expected, rtol=1e-6)
    assert found.attention_scaling == pytest.approx(0.1 * math.log(factor) + 1)


def test_the_band_is_that_of_yarn_and_the_ends_are_kept_and_interpolated():
    theta = 10000.0 ** (-np.arange(64) / 64)
    for form in ("pro", "uni"):
        slowed = theta / get_scheme("mrrope", factor=8, form=form).frequencies(LLAMA2).inv_freq.numpy()
        # 4096 theta / 2 pi is 32.9 for pair 20 and 28.5 for pair 21; 1.004 for pair 45 and 0.87 for pair 46
        np.testing.assert_allclose(slowed[:21], 1, rtol=1e-6)
        assert 1.001 < slowed[21] < slowed[45] < 7.999
        np.testing.assert_allclose(slowed[46:], 8, rtol=1e-6)


def test_radices_grow_in_one_form_and_are_equal_in_the_other():
    found = {form: get_scheme("mrrope", factor=8, form=form).frequencies(LLAMA2).inv_freq for form in ("pro", "uni")}
    steps = {form: np.diff(np.log(inv_freq.double().numpy()))[20:46] for form, inv_freq in found.items()}
    np.testing.assert_allclose(steps["uni"], steps["uni"][0], rtol=1e-4)
    assert (np.diff(steps["pro"]) < 0).all()
