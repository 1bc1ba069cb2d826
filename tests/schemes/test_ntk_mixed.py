import math

import numpy as np
import pytest
import torch

from rope_patch import NTKMixed, RoPE
from rope_patch.typing import RotarySpec
from tests.definition import Definition

CASES = ["ntk_mixed:factor=4"]

LLAMA = RotarySpec(64, 10000.0, 2048)


def mixed(exponent):
    def frequencies(theta, length):
        a = math.log(4) / len(theta) ** exponent
        return np.array([f * math.exp(-a * (i + 1) ** exponent) for i, f in enumerate(theta)])

    return frequencies


DEFINITIONS = {
    "ntk_mixed:factor=4": Definition(frequencies=mixed(0.625)),
    "ntk_mixed:factor=4,exponent=0.75": Definition(frequencies=mixed(0.75)),
}


@pytest.mark.parametrize("exponent", [0.625, 0.75])
def test_the_slowest_pair_is_divided_by_the_factor(exponent):
    plain, scaled = (scheme.frequencies(LLAMA).inv_freq for scheme in (RoPE(), NTKMixed(8, exponent)))
    torch.testing.assert_close(plain[-1] / scaled[-1], torch.tensor(8.0))
    assert ((plain / scaled).diff() > 0).all()
