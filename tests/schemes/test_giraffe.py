import math

import numpy as np
import torch

from rope_patch import RoPE, TruncatedBasis
from rope_patch.typing import RotarySpec
from tests.definition import Definition

CASES = ["giraffe:cutoff_length=32"]


def truncated(cutoff):
    def frequencies(theta, length):
        turn = 2 * math.pi / cutoff
        return np.array([f if f >= turn else turn / 16 if f >= turn / 8 else 0.0 for f in theta])

    return frequencies


DEFINITIONS = {f"giraffe:cutoff_length={t}": Definition(frequencies=truncated(t)) for t in (32, 7)}


def test_all_three_parts_of_the_basis_are_there():
    spec = RotarySpec(64, 10000.0, 2048)
    plain, cut = (scheme.frequencies(spec).inv_freq for scheme in (RoPE(), TruncatedBasis(2048)))
    kept, small, none = cut == plain, cut == torch.tensor(2 * math.pi / 2048 / 16), cut == 0
    assert kept.any()
    assert small.any()
    assert none.any()
    assert (kept | small | none).all()
