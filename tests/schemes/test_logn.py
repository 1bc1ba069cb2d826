import numpy as np
import pytest
import torch

from rope_patch import LogN
from rope_patch.schemes import Checkpoint
from tests.definition import Definition

CASES = ["logn:training_length=8"]

DEFINITIONS = {
    "logn:training_length=8": Definition(query_scale=lambda m: np.maximum(1, np.log(m + 1) / np.log(8))),
    "logn:training_length=8,clip=False": Definition(query_scale=lambda m: np.log(m + 1) / np.log(8)),
    "logn": Definition(query_scale=lambda m: np.maximum(1, np.log(m + 1) / np.log(32))),
    "logn:training_length=8+logn:training_length=16": Definition(
        query_scale=lambda m: np.maximum(1, np.log(m + 1) / np.log(8)) * np.maximum(1, np.log(m + 1) / np.log(16))
    ),
    "ntk:factor=4+logn:training_length=8": Definition(
        frequencies=lambda theta, length: theta * (4 ** (16 / 14)) ** -(np.arange(8) / 8),
        query_scale=lambda m: np.maximum(1, np.log(m + 1) / np.log(8)),
    ),
}


@pytest.mark.parametrize("length", [2, 256, 4096])
def test_scale_is_one_up_to_the_training_length_and_two_at_its_square(length):
    scale = LogN(length).query_scale(torch.tensor([0, length - 1, length, length**2 - 1]), 4)[0]
    torch.testing.assert_close(scale[[0, 1, 3]], torch.tensor([1.0, 1.0, 2.0]))
    assert scale[2] > 1


def test_without_clip_the_first_tokens_are_scaled_down():
    positions = torch.arange(1000)
    expected = np.log(np.arange(1000) + 1) / np.log(256)
    np.testing.assert_allclose(LogN(256, clip=False).query_scale(positions, 4)[0], expected, rtol=1e-6)


def test_the_default_training_length_is_that_of_the_checkpoint():
    assert LogN().resolve(Checkpoint(256, 4, 256)) == LogN(256)
