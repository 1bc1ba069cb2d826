import math

import numpy as np
import pytest
import torch

from rope_patch import InvalidField, PowerScaling, RoPE, TruncatedBasis, get_scheme
from rope_patch.typing import RotarySpec
from tests.definition import Definition

CASES = ["giraffe:cutoff_length=32", "giraffe_power:power=0.5"]


def truncated(cutoff):
    def frequencies(theta, length):
        turn = 2 * math.pi / cutoff
        return np.array([f if f >= turn else turn / 16 if f >= turn / 8 else 0.0 for f in theta])

    return frequencies


def slowed(theta, power):
    pairs = len(theta)
    return np.array([f * (1 - i / pairs) ** power for i, f in enumerate(theta)])


DEFINITIONS = {f"giraffe:cutoff_length={t}": Definition(frequencies=truncated(t)) for t in (32, 7)} | {
    "giraffe_power:power=0.5": Definition(frequencies=lambda theta, length: slowed(theta, 0.5)),
    "pi:factor=4+giraffe_power:power=2.0": Definition(frequencies=lambda theta, length: slowed(theta / 4, 2)),
}


def test_all_three_parts_of_the_basis_are_there():
    spec = RotarySpec(64, 10000.0, 2048)
    plain, cut = (scheme.frequencies(spec).inv_freq for scheme in (RoPE(), TruncatedBasis(2048)))
    kept, small, none = cut == plain, cut == torch.tensor(2 * math.pi / 2048 / 16), cut == 0
    assert kept.any()
    assert small.any()
    assert none.any()
    assert (kept | small | none).all()


@pytest.mark.parametrize("power", [0.1, 1.0, 3.0])
def test_power_scaling_leaves_the_fastest_pair_and_slows_the_slowest_most(power):
    spec = RotarySpec(64, 10000.0, 2048)
    plain, found = (scheme.frequencies(spec).inv_freq.double() for scheme in (RoPE(), PowerScaling(power)))
    shares = found / plain
    assert shares[0] == 1
    assert (shares.diff() < 0).all()
    np.testing.assert_allclose(shares[[16, 31]], [0.5**power, (1 / 32) ** power], rtol=1e-6)


def test_a_power_of_zero_or_below_is_named():
    with pytest.raises(InvalidField, match="power=0 is not allowed; power must be a number above 0"):
        get_scheme("giraffe_power:power=0")
