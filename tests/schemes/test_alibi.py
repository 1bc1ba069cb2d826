import pytest
import torch

from rope_patch import ALiBi, InvalidField, patch
from rope_patch.schemes.alibi import alibi_slopes
from tests.definition import Definition


def penalty(head, m, n):
    return -(2.0 ** (-8 * (head + 1) / 4)) * (m - n)


DEFINITIONS = {
    "alibi": Definition(distance=lambda m, n: 0 * (m - n), bias=penalty),
    "rope+alibi": Definition(bias=penalty),
    "rope+alibi+alibi": Definition(bias=lambda head, m, n: 2 * penalty(head, m, n)),
    "alibi:slopes=[1.0,0.5,0.25,0.125]": Definition(
        distance=lambda m, n: 0 * (m - n), bias=lambda head, m, n: -[1.0, 0.5, 0.25, 0.125][head] * (m - n)
    ),
}

PUBLISHED = {
    2: [0.0625, 0.00390625],
    8: [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625],
    # the authors' get_slopes(12): the eight of 8 heads, then every second one of 16 heads
    12: [
        *[0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625],
        *[0.7071067811865476, 0.35355339059327384, 0.17677669529663692, 0.08838834764831849],
    ],
}


@pytest.mark.parametrize("heads", PUBLISHED)
def test_slopes_are_the_published_ones(heads):
    assert alibi_slopes(heads) == pytest.approx(PUBLISHED[heads], rel=1e-12)


@pytest.mark.parametrize("heads", [1, 3, 6, 7, 40, 112])
def test_every_head_count_gets_one_slope_each(heads):
    slopes = alibi_slopes(heads)
    assert len(slopes) == len(set(slopes)) == heads
    assert all(0 < slope < 1 for slope in slopes)


def test_bias_is_relative_and_exact_in_float32_at_large_distances():
    distance = torch.tensor([[0, 1, 100_001]])
    bias = ALiBi().bias(distance, 8)
    assert bias.dtype == torch.float32
    assert bias.shape == (8, 1, 3)
    assert torch.equal(bias[0, 0], torch.tensor([0.0, -0.5, -50000.5]))


def test_slopes_that_do_not_fit_the_heads_are_refused(llama):
    with pytest.raises(InvalidField, match=r"slopes has 2 values; this checkpoint has 4 heads"):
        patch(llama, ALiBi(slopes=(1.0, 0.5)))


@pytest.mark.parametrize("slopes", [(), (True,), ("a",), (float("nan"),), (0.5, 0.0), 3, "0.5"])
def test_slopes_must_be_numbers(slopes):
    with pytest.raises(InvalidField, match="alibi: slopes="):
        ALiBi(slopes=slopes)
