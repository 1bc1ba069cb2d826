"""The formula of the paper, what it starts at, and what it counts."""

import dataclasses

import numpy as np
import pytest
import torch

from rope_patch import InvalidField, SSMax, UnsupportedModel, patch
from tests.definition import Definition
from tests.models.t5_families import build as build_t5
from tests.schemes.pairs import SHAPE, at_start

CASES = ["ssmax:initial_scale=0.43"]


def scaled(head):
    return head.learned["scale"][head.index] * np.log(head.m + 1)


DEFINITIONS = {
    "ssmax": Definition(head_scale=scaled),
    "ssmax:initial_scale=0.43": Definition(head_scale=scaled),
    "rerope:window=6+ssmax": Definition(distance=lambda m, n: np.minimum(m - n, 6), head_scale=scaled),
    "ssmax+logn:training_length=8": Definition(
        query_scale=lambda m: np.maximum(1, np.log(m + 1) / np.log(8)), head_scale=scaled
    ),
}


def test_a_trained_model_is_scaled_by_one_on_average():
    start = at_start(SSMax(), dataclasses.replace(SHAPE, training_length=1024))
    assert start["scale"].shape == (3,)
    assert start["scale"][0].item() == pytest.approx(0.168, abs=5e-4)  # the start of axolotl's first version
    scale = SSMax().query_scale(torch.arange(1024), 3, start)
    torch.testing.assert_close(scale.mean(dim=1), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("length", [1, 2])
def test_the_shortest_texts_have_a_start(length):
    start = at_start(SSMax(), dataclasses.replace(SHAPE, training_length=length))
    torch.testing.assert_close(start["scale"], torch.full((3,), 2 / np.log(2), dtype=torch.float64))


@pytest.mark.parametrize(("size", "plain", "scaled"), [(10, 0.94, 0.94), (100, 0.60, 0.995), (10**6, 1.5e-4, 0.999999)])
def test_the_largest_weight_stays_as_the_context_grows(size, plain, scaled):
    # figure 1 of the paper: all scores are -2 but one, which is 3, and s is 0.43
    scale = SSMax().query_scale(torch.tensor([size - 1]), 1, {"scale": torch.tensor([0.43])}).item()
    found = [1 / (1 + (size - 1) * np.exp(-5 * by)) for by in (1.0, scale)]
    assert found == pytest.approx([plain, scaled], rel=0.02)


@pytest.mark.parametrize("shape", [(), (5,), (2, 5)])
def test_every_head_has_a_scale_of_its_own(shape):
    positions, weights = torch.randint(0, 10**6, shape), {"scale": torch.tensor([0.1, 0.4, 0.2])}
    expected = np.multiply.outer([0.1, 0.4, 0.2], np.log(positions.numpy() + 1))
    np.testing.assert_allclose(SSMax().query_scale(positions, 3, weights), expected, rtol=1e-6)


def test_half_precision_weights_scale_in_full_precision():
    found = SSMax().query_scale(torch.arange(5), 3, {"scale": torch.full((3,), 0.25, dtype=torch.bfloat16)})
    np.testing.assert_allclose(found[0], 0.25 * np.log(np.arange(5) + 1), rtol=1e-6)


def test_models_that_look_ahead_are_refused():
    with pytest.raises(UnsupportedModel, match="both directions"):
        patch(build_t5(), "ssmax")


@pytest.mark.parametrize("value", [0, -1, "learned", True])
def test_a_wrong_start_is_named(value):
    with pytest.raises(InvalidField, match="initial_scale"):
        SSMax(initial_scale=value)
