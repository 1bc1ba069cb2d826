"""Wavelengths in whole tokens, alone and on top of other schemes."""

import math

import numpy as np
import pytest
import torch

from rope_patch import NotExpressible, UnsupportedModel, export_rope_parameters, get_scheme, patch, plan_mounts
from rope_patch.models.find_stacks import read_stack
from rope_patch.typing import Frequencies, RotarySpec
from tests.definition import Definition
from tests.families import build
from tests.runs import logits, tokens
from tests.schemes.test_yarn import yarn

CASES = ["resonance"]

LLAMA = RotarySpec(128, 10000.0, 4096)


def whole(theta):
    return 2 * math.pi / np.round(2 * math.pi / theta)


DEFINITIONS = {
    "resonance": Definition(frequencies=lambda theta, length: whole(theta)),
    "yarn:factor=4+resonance": Definition(
        frequencies=lambda theta, length: whole(yarn(theta, length)), temperature=0.1 * math.log(4) + 1
    ),
    "dynamic_ntk:factor=2,length=64+resonance": Definition(
        frequencies=lambda theta, length: whole((10000 * 3 ** (8 / 7)) ** (-np.arange(8) / 8))
    ),
}


def refined(*inv_freq):
    return get_scheme("resonance").refine(Frequencies(torch.tensor(inv_freq)), LLAMA).inv_freq


@pytest.mark.parametrize("spec", ["resonance", "yarn:factor=16+resonance", "ntk:factor=8+resonance"])
def test_every_wavelength_is_the_nearest_whole_number(spec):
    found = get_scheme(spec).frequencies(LLAMA).inv_freq
    given = get_scheme(spec.removesuffix("+resonance").replace("resonance", "rope")).frequencies(LLAMA).inv_freq
    assert found.dtype == torch.float32
    wavelengths, before = (2 * np.pi / x.double().numpy() for x in (found, given))
    np.testing.assert_allclose(wavelengths, np.round(wavelengths), rtol=1e-7)
    assert (np.abs(wavelengths - before) <= 0.5 + 1e-7 * before).all()
    assert np.round(wavelengths[0]) == 6


def test_a_pair_meets_the_same_angles_again():
    inv_freq = get_scheme("resonance").frequencies(LLAMA).inv_freq.double()
    for wavelength, theta in zip((2 * math.pi / inv_freq).round().long(), inv_freq, strict=True):
        positions = torch.arange(20)
        first, later = ((positions + turn * wavelength) * theta for turn in (0, 3))
        torch.testing.assert_close(first.cos(), later.cos(), atol=1e-5, rtol=0)


def test_what_stands_still_stays_and_nothing_turns_faster_than_once_a_token():
    np.testing.assert_allclose(refined(0.0, 40.0, 4.1 * math.pi, 1.9 * math.pi), [0, *[2 * math.pi] * 3], rtol=1e-6)


def test_rows_of_a_batch_and_the_temperature_are_kept():
    given = Frequencies(torch.tensor([[1.0, 0.1], [0.5, 0.05]]), torch.tensor([[1.0], [1.1]]), torch.ones(2))
    found = get_scheme("resonance").refine(given, LLAMA)
    np.testing.assert_allclose(found.inv_freq, 2 * np.pi / np.array([[6, 63], [13, 126]]), rtol=1e-6)
    assert found.attention_scaling is given.attention_scaling
    assert found.decay is given.decay


def test_a_rounded_frequency_passes_its_gradient_on():
    inv_freq = torch.tensor([1.0, 0.1], requires_grad=True)
    found = get_scheme("resonance").refine(Frequencies(inv_freq), LLAMA).inv_freq
    assert torch.equal(found.detach(), refined(1.0, 0.1))
    found.backward(torch.tensor([2.0, 3.0]))
    assert inv_freq.grad.tolist() == [2, 3]


@pytest.mark.parametrize("spec", ["resonance", "resonance+logn:training_length=8"])
@pytest.mark.parametrize("family", ["llama_yarn", "llama_llama3", "gemma3_yarn"])
def test_alone_it_rounds_the_frequencies_of_the_checkpoint(model, family, spec):
    tables = [tables for tables in read_stack(model).rotary if tables.layer_type in (None, "full_attention")]
    before, scaling = tables[0].inv_freq.double().numpy(), tables[0].attention_scaling
    native, config = logits(model, tokens()), model.config.rope_parameters
    with patch(model, spec) as handle:
        assert handle.plan.rotary
        np.testing.assert_allclose(tables[0].inv_freq, whole(before), rtol=1e-6)
        assert tables[0].attention_scaling == scaling
        assert model.config.rope_parameters == config
        assert (logits(model, tokens()) - native).abs().max() > 1e-2
    assert torch.equal(logits(model, tokens()), native)


@pytest.mark.parametrize("family", ["llama_dynamic", "llama_longrope"])
def test_alone_it_follows_a_checkpoint_that_follows_the_length(model, family):
    plan, native = plan_mounts(get_scheme("resonance"), read_stack(model)), read_stack(model).native
    rotary, lengths = RotarySpec(16, 10000.0, 32), torch.tensor([20, 100])
    given = native.frequencies(rotary, lengths).inv_freq.double().numpy()
    np.testing.assert_allclose(plan.scheme.frequencies(rotary, lengths).inv_freq, whole(given), rtol=1e-6)
    assert plan.late == (0, 1)


def test_layers_of_different_types_are_not_taken_for_one_another():
    model = build("gemma3_yarn", sliding_window=132)  # wider than the training length: its layers are not left alone
    with pytest.raises(UnsupportedModel, match=r"different rope_parameters.*refine"):
        patch(model, "resonance")
    patch(model, "yarn:factor=4+resonance")


def test_another_scheme_beside_it_replaces_the_one_of_the_checkpoint():
    beside = build("llama_llama3")
    patch(beside, "pi:factor=2+resonance")
    found = read_stack(beside).rotary[0].inv_freq
    np.testing.assert_allclose(found, whole(10000 ** (-np.arange(8) / 8) / 2), rtol=1e-6)


@pytest.mark.parametrize("spec", ["resonance", "yarn:factor=4+resonance", "pi:factor=4+fope_cut"])
def test_transformers_has_no_words_for_it(llama, spec):
    with pytest.raises(NotExpressible, match=r"(resonance|fope_cut) fills frequencies"):
        export_rope_parameters(get_scheme(spec), llama.config)
    native = llama.config.rope_parameters
    with patch(llama, spec):
        assert llama.config.rope_parameters == native
