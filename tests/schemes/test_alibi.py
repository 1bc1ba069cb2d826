import numpy as np
import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from rope_patch import ALiBi, InvalidField, patch
from rope_patch.schemes.alibi import alibi_slopes
from tests.definition import Definition, no_rotation
from tests.schemes.pairs import at_start

CASES = ["alibi", "alibi:learned=true"]


def penalty(head, m, n):
    return -(2.0 ** (-8 * (head + 1) / 4)) * (m - n)


DEFINITIONS = {
    "alibi": Definition(distance=no_rotation, bias=penalty),
    "rope+alibi": Definition(bias=penalty),
    "rerope:window=6+alibi": Definition(distance=lambda m, n: np.minimum(m - n, 6), bias=penalty),
    "rope+alibi+alibi": Definition(bias=lambda head, m, n: 2 * penalty(head, m, n)),
    "alibi:slopes=[1.0,0.5,0.25,0.125]": Definition(
        distance=no_rotation, bias=lambda head, m, n: -[1.0, 0.5, 0.25, 0.125][head] * (m - n)
    ),
    "alibi:learned=true": Definition(
        distance=no_rotation, content_bias=lambda head: -head.learned["slopes"][head.index] * (head.m - head.n)
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


@pytest.mark.parametrize("slopes", [None, (1.0, 0.5, 0.25)])
def test_learned_slopes_start_where_fixed_ones_are_and_may_go_anywhere(slopes):
    distance = torch.arange(-3, 60)
    fixed, learned = ALiBi(slopes=slopes), ALiBi(slopes=slopes, learned=True)
    assert at_start(fixed) == {}
    weights = at_start(learned)
    assert learned.linear
    assert learned.shared == tuple(weights) == ("slopes",)
    torch.testing.assert_close(learned.bias(distance, 3, weights), fixed.bias(distance, 3).double())
    weights = {"slopes": torch.tensor([-2.0, 0.0, 2.0], requires_grad=True)}
    bias = learned.bias(distance, 3, weights)
    assert torch.equal(bias.detach(), torch.stack([2.0 * distance.abs(), 0.0 * distance, -2.0 * distance.abs()]))
    bias.sum().backward()
    assert torch.equal(weights["slopes"].grad, -distance.abs().sum().float().expand(3))


@pytest.mark.parametrize("heads", [4, 8, 12, 40])
def test_the_biases_of_bloom_and_mpt_differ_by_a_constant_in_each_row(heads):
    length = 9
    ours = ALiBi().bias(torch.arange(length)[:, None] - torch.arange(length), heads)
    bloom = build_alibi_tensor(torch.ones(1, length, dtype=torch.long), heads, torch.float32)
    # for head counts that are no power of two, MPT has other slopes, in another order
    theirs = [bloom] + ([build_mpt_alibi_tensor(heads, length)] if heads in (4, 8) else [])
    seen = torch.ones(length, length).tril().bool()
    for alibi in theirs:
        difference = (ours - alibi.view(heads, 1, length)).masked_fill(~seen, 0)
        expected = difference[..., :1].expand_as(difference).masked_fill(~seen, 0)
        torch.testing.assert_close(difference, expected, atol=1e-5, rtol=0)


def test_learned_must_be_said_plainly():
    with pytest.raises(InvalidField, match="learned"):
        ALiBi(learned=1)
