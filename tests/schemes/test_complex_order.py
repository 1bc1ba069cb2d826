import cmath
import dataclasses

import numpy as np
import pytest
import torch

from rope_patch import ComplexOrder, InvalidField, UnsupportedPositions
from tests.definition import Definition, no_rotation
from tests.schemes.entering import SHAPE, some_tokens, started, trained

CASES = ["complex_order"]


def waves(tokens, weights, shared_words):
    """r e^(i (omega k + phi)) in complex arithmetic, one number at a time."""
    omega, phi = (weights[name].detach().double().numpy() for name in ("frequencies", "phases"))
    x = tokens.states.double().numpy()
    found = np.empty_like(x)
    for row, column in np.ndindex(x.shape[:2]):
        k = int(tokens.positions[row % len(tokens.positions), column])
        word = 0 if shared_words else int(tokens.ids[row, column])
        for j in range(x.shape[2] // 2):
            amplitude, phase = cmath.polar(complex(x[row, column, 2 * j], x[row, column, 2 * j + 1]))
            wave = cmath.rect(amplitude, omega[word, j] * k + phase + phi[word, j])
            found[row, column, 2 * j : 2 * j + 2] = wave.real, wave.imag
    return found


def turned(text):
    """The word vector as complex numbers, each turned by the word's own frequency and phase."""
    omega, phi = (text.learned[name][text.ids] for name in ("frequencies", "phases"))
    z = (text.x[:, 0::2] + 1j * text.x[:, 1::2]) * np.exp(1j * (omega * text.m[:, None] + phi))
    return np.stack([z.real, z.imag], axis=-1).reshape(text.x.shape)


DEFINITIONS = {"complex_order": Definition(distance=no_rotation, embedding=turned)}


@pytest.mark.parametrize("shared_words", [False, True])
@pytest.mark.parametrize("positions", [[[0, 1, 2, 3]], [[0, 0, 1, 2], [7, 300, 0, 1]]])
def test_every_word_is_a_wave(shared_words, positions):
    scheme, tokens = ComplexOrder(shared_words), some_tokens(positions)
    weights = trained(scheme)
    found = scheme.embedding(tokens, weights).detach().numpy()
    np.testing.assert_allclose(found, waves(tokens, weights, shared_words), rtol=0, atol=1e-12)


@pytest.mark.parametrize("base", [10000.0, 50])
def test_frequencies_start_as_released(base):
    d = SHAPE.hidden_size
    # get_sinusoid_encoding_table of the released Transformer, whose neighbours 2j and 2j+1 turn alike
    table = np.array([1 / np.power(base, 2 * (dim // 2) / d) for dim in range(d)])
    found = started(ComplexOrder(base=base))
    assert found["frequencies"].shape == found["phases"].shape == (SHAPE.vocab_size, d // 2)
    for which in (slice(0, None, 2), slice(1, None, 2)):
        np.testing.assert_allclose(found["frequencies"].numpy(), np.tile(table[which], (23, 1)), rtol=1e-7)
    assert not found["phases"].any()


def test_shared_words_have_one_frequency_per_pair():
    assert {value.shape for value in started(ComplexOrder(shared_words=True)).values()} == {(1, 4)}


@pytest.mark.parametrize("shared_words", [False, True])
def test_the_first_word_starts_as_its_vector(shared_words):
    scheme, tokens = ComplexOrder(shared_words), some_tokens([[0, 0, 0], [0, 1, 2]])
    found = scheme.embedding(tokens, started(scheme))
    assert torch.equal(found[0], tokens.states[0])
    assert not torch.isclose(found[1, 1:], tokens.states[1, 1:]).all(-1).any()


def test_lengths_stay_and_a_shift_is_one_rotation_per_word():
    scheme, tokens = ComplexOrder(), some_tokens([[0, 3, 1, 9, 14]])
    weights = trained(scheme)
    here, later, farther = (
        torch.view_as_complex(scheme.embedding(moved, weights).unflatten(-1, (-1, 2)).detach())
        for moved in (dataclasses.replace(tokens, positions=tokens.positions + shift) for shift in (0, 6, 12))
    )
    torch.testing.assert_close(here.abs(), later.abs(), rtol=1e-12, atol=0)
    torch.testing.assert_close(later / here, farther / later, rtol=1e-10, atol=0)


def test_vectors_without_words_need_shared_frequencies():
    vectors = dataclasses.replace(some_tokens([[0, 1, 2]]), ids=None)
    with pytest.raises(UnsupportedPositions, match=r"complex_order: .* shared_words=True needs no ids"):
        ComplexOrder().embedding(vectors, started(ComplexOrder()))
    shared = ComplexOrder(shared_words=True)
    assert shared.embedding(vectors, started(shared)).shape == vectors.states.shape


def test_dimensions_that_do_not_pair_are_refused():
    with pytest.raises(InvalidField, match="7 dimensions cannot form complex numbers"):
        started(ComplexOrder(), dataclasses.replace(SHAPE, hidden_size=7))


@pytest.mark.parametrize(
    ("field", "value"), [("base", 0), ("base", "10"), ("start", "ones"), ("shared_words", 1), ("shared_words", None)]
)
def test_fields_are_named(field, value):
    with pytest.raises(InvalidField, match=f"complex_order: {field}="):
        ComplexOrder(**{field: value})
