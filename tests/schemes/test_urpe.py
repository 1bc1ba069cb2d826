"""The Toeplitz matrix of the paper; buckets as the released code sorts them."""

import math

import numpy as np
import pytest
import torch

from rope_patch import URPE, InvalidField
from rope_patch.schemes.slots import Checkpoint
from tests.definition import Definition, no_rotation
from tests.schemes.pairs import at_start, trained
from tests.schemes.test_alibi import penalty
from tests.schemes.test_sinusoidal import with_sinusoids

CASES = ["urpe:max_distance=12"]

DISTANCE = torch.arange(9)[:, None] - torch.arange(9)


def factors(head):
    return head.learned["distance_factors"][np.clip(head.m - head.n, -12, 12) + 12, head.index]


DEFINITIONS = {
    "urpe:max_distance=12": Definition(weight_factor=factors),
    "sinusoidal+alibi+urpe:max_distance=12": Definition(
        distance=no_rotation, embedding=with_sinusoids, bias=penalty, weight_factor=factors
    ),
}


def test_the_factors_are_a_toeplitz_matrix_for_each_head():
    scheme = URPE(max_distance=3)
    weights = trained(scheme)
    found = scheme.weight_factor(DISTANCE, 3, weights)
    assert found.shape == (3, 9, 9)
    for h in range(3):
        for m in range(9):
            for n in range(9):
                assert found[h, m, n] == weights["distance_factors"][max(-3, min(3, m - n)) + 3, h]


@pytest.mark.parametrize("scheme", [URPE(), URPE(num_buckets=8), URPE(max_distance=4)])
def test_all_factors_start_at_one(scheme):
    assert (scheme.weight_factor(DISTANCE, 3, at_start(scheme)) == 1).all()


def released_bucket(relative, buckets, farthest):
    """With the sign of n - m, in float64."""
    single = buckets // 4
    size = abs(relative)
    if size >= single:
        steps = math.log(size / single) / math.log(farthest / single) * (buckets // 2 - single)
        size = min(single + int(steps), buckets // 2 - 1)
    return math.copysign(size, relative)


def test_buckets_part_the_distances_as_the_released_code_does():
    scheme = URPE(num_buckets=64)
    weights = {"distance_factors": torch.arange(64.0)[:, None]}
    distances = torch.arange(-300, 301)
    found = scheme.weight_factor(distances, 1, weights)[0].tolist()
    expected = [released_bucket(-d, 64, 128) for d in distances.tolist()]
    pairs = set(zip(found, expected, strict=True))
    assert len(pairs) == len(set(found)) == len(set(expected)) == 63


def test_by_default_every_distance_of_the_training_length_has_its_own():
    scheme = URPE().resolve(Checkpoint(training_length=16, num_heads=3, max_length=16))
    assert scheme == URPE(max_distance=15)
    assert at_start(URPE())["distance_factors"].shape == at_start(scheme)["distance_factors"].shape == (31, 3)
    assert URPE().shared == ("distance_factors",)
    assert URPE(per_layer=True).shared == ()
    assert URPE().slots == {"values"}


@pytest.mark.parametrize(
    "fields", [{"max_distance": 0}, {"num_buckets": 3}, {"per_layer": 0}, {"max_distance": 16, "num_buckets": 64}]
)
def test_wrong_fields_are_named(fields):
    with pytest.raises(InvalidField, match=next(iter(fields))):
        URPE(**fields)
