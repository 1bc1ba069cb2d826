import math

import numpy as np
import pytest
import torch

from rope_patch import InvalidField, get_scheme, patch
from rope_patch.models.find_stacks import read_stack
from rope_patch.typing import Frequencies, RotarySpec
from tests.definition import Definition
from tests.families import build
from tests.schemes.test_yarn import yarn

CASES = ["clip", "clip:pairs=3"]

LLAMA = RotarySpec(128, 10000.0, 4096)


def clipped(theta, n):
    share = np.ones(len(theta))
    share[len(theta) - n :] = 0.5 * (1 + np.cos(np.linspace(0, math.pi, n)))
    return theta * share


def beyond(theta, length=32):
    return clipped(theta, sum(2 * math.pi / f > length for f in theta))


DEFINITIONS = {
    "clip": Definition(frequencies=lambda theta, length: beyond(theta)),
    "clip:pairs=3": Definition(frequencies=lambda theta, length: clipped(theta, 3)),
    "yarn:factor=4+clip:pairs=2": Definition(
        frequencies=lambda theta, length: clipped(yarn(theta, length), 2), temperature=0.1 * math.log(4) + 1
    ),
}


@pytest.mark.parametrize("n", [1, 2, 20, 64])
def test_it_is_the_released_mask(n):
    plain, found = (get_scheme(spec).frequencies(LLAMA).inv_freq for spec in ("rope", f"clip:pairs={n}"))
    np.testing.assert_allclose(found, clipped(plain.numpy(), n), rtol=1e-5, atol=1e-12)
    assert found[64 - n] == plain[64 - n]
    assert found[-1] == (0 if n > 1 else plain[-1])


def test_by_default_pairs_are_clipped_whose_wavelength_is_beyond_the_training_length():
    found = get_scheme("clip").frequencies(LLAMA).inv_freq
    assert torch.equal(found, get_scheme("clip:pairs=18").frequencies(LLAMA).inv_freq)  # 46 turn: see test_fope
    short = get_scheme("clip").frequencies(RotarySpec(128, 10000.0, 10**6))
    assert torch.equal(short.inv_freq, get_scheme("rope").frequencies(LLAMA).inv_freq)


def test_each_row_has_its_own_number_of_slow_pairs():
    given = torch.tensor([[1.0, 0.1, 0.001, 0.0005], [1.0, 0.001, 0.0009, 0.0008]])
    found = get_scheme("clip").refine(Frequencies(given), LLAMA).inv_freq
    np.testing.assert_allclose(found, [beyond(row, 4096) for row in given.numpy()], rtol=1e-5, atol=1e-12)


def test_alone_it_clips_the_frequencies_of_the_checkpoint():
    model = build("llama_yarn")
    tables = read_stack(model).rotary[0]
    before, scaling = tables.inv_freq.double().numpy(), tables.attention_scaling
    with patch(model, "clip:pairs=3"):
        np.testing.assert_allclose(tables.inv_freq, clipped(before, 3), rtol=1e-6, atol=1e-12)
        assert tables.attention_scaling == scaling


def test_more_pairs_than_there_are_is_an_error():
    with pytest.raises(InvalidField, match=r"clip: pairs=65 is not allowed; this checkpoint has 64 pairs"):
        get_scheme("clip:pairs=65").frequencies(LLAMA)
