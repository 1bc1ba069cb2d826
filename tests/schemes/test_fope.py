import math

import numpy as np
import pytest
import torch

from rope_patch import InvalidField, RoPE, get_scheme, patch
from rope_patch.models.find_stacks import read_stack
from rope_patch.typing import Frequencies, RotarySpec
from tests.definition import Definition
from tests.families import build

CASES = ["fope_cut", "fope_cut:training_length=7"]

LLAMA = RotarySpec(128, 10000.0, 4096)


def cut(length):
    def frequencies(theta, _):
        return np.array([f if 2 * math.pi / f <= length else 0.0 for f in theta])

    return frequencies


DEFINITIONS = {
    "fope_cut": Definition(frequencies=cut(32)),
    "fope_cut:training_length=7": Definition(frequencies=cut(7)),
    "pi:factor=2+fope_cut": Definition(frequencies=lambda theta, length: cut(32)(theta / 2, length)),
    "resonance+fope_cut": Definition(
        frequencies=lambda theta, length: cut(32)(2 * math.pi / np.round(2 * math.pi / theta), length)
    ),
}


def test_a_pair_turns_if_it_completes_a_turn_within_the_training_length():
    plain, found = RoPE().frequencies(LLAMA).inv_freq, get_scheme("fope_cut").frequencies(LLAMA).inv_freq
    turning = int((plain.double() >= 2 * math.pi / 4096).sum())
    assert turning == 46  # 10000^(-2 i/128) >= 2 pi / 4096 up to i = 45.02
    assert torch.equal(found[:turning], plain[:turning])
    assert not found[turning:].any()


def test_the_wavelength_of_the_training_length_itself_is_kept():
    found = get_scheme("resonance+fope_cut:training_length=69").frequencies(RotarySpec(16, 10000.0, 69)).inv_freq
    wavelengths = (2 * math.pi / found.double()).tolist()
    assert wavelengths == pytest.approx([6, 20, 63, *[math.inf] * 5], rel=1e-6)
    found = get_scheme("resonance+fope_cut:training_length=63").frequencies(RotarySpec(16, 10000.0, 32)).inv_freq
    assert int((found > 0).sum()) == 3


def test_what_stands_beside_it_is_cut_after_it_was_slowed():
    given, found = (get_scheme(spec).frequencies(LLAMA) for spec in ("yarn:factor=8", "yarn:factor=8+fope_cut"))
    np.testing.assert_allclose(found.inv_freq, cut(4096)(given.inv_freq.double().numpy(), None), rtol=1e-6)
    assert found.attention_scaling == given.attention_scaling


def test_each_row_of_a_batch_is_cut_by_itself():
    given = Frequencies(torch.tensor([[1.0, 0.2], [0.5, 0.1]]))
    found = get_scheme("fope_cut").refine(given, RotarySpec(4, 10000.0, 32)).inv_freq
    assert torch.equal(found, torch.tensor([[1.0, 0.2], [0.5, 0.0]]))


def test_alone_it_cuts_the_frequencies_of_the_checkpoint():
    model = build("llama_llama3")
    before = read_stack(model).rotary[0].inv_freq.double().numpy()
    with patch(model, "fope_cut"):
        np.testing.assert_allclose(read_stack(model).rotary[0].inv_freq, cut(32)(before, None), rtol=1e-6)
    assert cut(32)(before, None).any()
    assert not cut(32)(before, None).all()


def test_a_wrong_length_is_named():
    with pytest.raises(InvalidField, match="training_length=0 is not allowed"):
        get_scheme("fope_cut:training_length=0")
