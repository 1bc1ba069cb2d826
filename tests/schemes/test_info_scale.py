"""InfoScale by its formula in float64, and beside log-n."""

import numpy as np
import pytest
import torch

from rope_patch import InfoScale, InvalidField, LogN
from rope_patch.schemes import Checkpoint
from tests.definition import Definition

CASES = ["info_scale:training_length=8", "info_scale:training_length=8,head_dim=4"]


def scale(length, dim):
    return lambda m: np.maximum(1, np.sqrt((1 - (m + 1.0) ** (-2 / dim)) / (1 - length ** (-2 / dim))))


DEFINITIONS = {
    "info_scale:training_length=8": Definition(query_scale=scale(8.0, 16)),
    "info_scale:training_length=8,head_dim=4": Definition(query_scale=scale(8.0, 4)),
    "info_scale": Definition(query_scale=scale(32.0, 16)),
    "rerope:window=6+info_scale:training_length=8": Definition(
        distance=lambda m, n: np.minimum(m - n, 6), query_scale=scale(8.0, 16)
    ),
}


@pytest.mark.parametrize("dim", [1, 2, 64, 128])
def test_it_is_exact_far_beyond_the_training_length(dim):
    positions = torch.tensor([0, 4094, 4095, 4096, 65535, 2**24])
    found = InfoScale(4096, dim).query_scale(positions, 4)[0]
    np.testing.assert_allclose(found, scale(4096.0, dim)(positions.numpy()), rtol=1e-5)
    assert found[:3].tolist() == [1, 1, 1]


def test_with_many_dimensions_it_is_the_root_of_logn():
    positions = torch.tensor([100, 5000, 100_000])
    root = LogN(256).query_scale(positions, 1).sqrt()
    torch.testing.assert_close(InfoScale(256, 10**6).query_scale(positions, 1), root, rtol=1e-4, atol=0)
    assert (InfoScale(256, 64).query_scale(positions, 1)[0, 1:] < root[0, 1:]).all()


def test_a_head_that_does_not_rotate_needs_its_size():
    checkpoint = Checkpoint(32, 4, 32)
    with pytest.raises(InvalidField, match="set head_dim"):
        InfoScale().resolve(checkpoint)
    assert InfoScale(head_dim=8).resolve(checkpoint) == InfoScale(32, 8)
