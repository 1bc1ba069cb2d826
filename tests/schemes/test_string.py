"""The positions of the paper and of the released code, pair by pair, and the encoder that looks both ways."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rope_patch import STRING, InvalidField, patch
from rope_patch.schemes import Checkpoint
from tests.definition import Definition
from tests.models.t5_definition import Meaning
from tests.models.t5_definition import defined_logits as t5_logits
from tests.models.t5_families import build as build_t5
from tests.runs import assert_close, logits, tokens
from tests.schemes.regions import rotated_distances

CASES = ["string:shift=9,window=3"]


def shifted(shift, window):
    return lambda m, n: np.where(m - n < shift, m - n, m - n - shift + window)


DEFINITIONS = {
    "string:shift=9,window=3": Definition(distance=shifted(9, 3)),
    "string": Definition(distance=shifted(10, 5)),
    "string:window=2": Definition(distance=shifted(10, 2)),
    "string:shift=1,window=0": Definition(distance=lambda m, n: np.maximum(m - n - 1, 0)),
    "string:shift=9,window=3,attention_factor=1.5": Definition(
        distance=shifted(9, 3), query_scale=lambda m: np.full(m.shape, 1.5**2)
    ),
    "string:shift=9,window=3+logn:training_length=8": Definition(
        distance=shifted(9, 3), query_scale=lambda m: np.maximum(1, np.log(m + 1) / np.log(8))
    ),
}


@pytest.mark.parametrize(("window", "far"), [(0, [5, 4, 3, 2, 1, 0]), (1, [6, 5, 4, 3, 2, 1])])
def test_published_example(window, far):
    # figure 5 of the paper: nine tokens, of which the last sees the distances 6, 7 and 8 no longer
    _, _, found = rotated_distances(STRING(3, window), 9)
    assert found[8].tolist() == [*far, 2, 1, 0]


@given(shift=st.integers(1, 80), window=st.integers(0, 80))
def test_distances_start_again_at_the_window_in_both_directions(shift, window):
    window = min(window, shift)
    m, n, found = rotated_distances(STRING(shift, window))
    distance = (m - n).abs()
    expected = torch.where(distance < shift, distance, distance - shift + window)
    assert torch.equal(found.abs(), expected.double())
    moved = expected != 0
    assert torch.equal(found.sign()[moved], (m - n).sign().double()[moved])


@pytest.mark.parametrize("fields", [{"shift": 64, "window": 5}, {"shift": 7, "window": 7}])
def test_a_shift_beyond_the_text_or_a_window_of_its_size_is_rope(llama, fields):
    expected = logits(llama, tokens())
    with patch(llama, "string", **fields):
        assert_close(logits(llama, tokens()), expected)


@pytest.mark.parametrize("attention", ["auto", "segmented", "oracle"])
def test_an_encoder_mirrors_it(attention):
    model, source, target = build_t5(), tokens(44, seed=7), tokens(44, seed=8)
    change = shifted(9, 3)
    meaning = Meaning(distance=lambda m, n: np.sign(m - n) * change(np.abs(m - n), 0))
    expected = torch.tensor(t5_logits(model, source, target, meaning))
    with patch(model, "string:shift=9,window=3", attention=attention), torch.no_grad():
        found = model(input_ids=source, decoder_input_ids=target, use_cache=False).logits
    assert_close(found[0].double(), expected, 1e-4)


def test_the_defaults_follow_the_longest_text_that_the_checkpoint_is_made_for():
    assert STRING().resolve(Checkpoint(8192, 32, 131072)) == STRING(43690, 128)
    assert STRING().resolve(Checkpoint(256, 4, 256)) == STRING(85, 42)
    assert STRING(window=0).resolve(Checkpoint(2, 4, 2)) == STRING(1, 0)


def test_scores_are_multiplied_by_the_square_of_the_attention_factor():
    scheme = STRING(9, 3, attention_factor=0.1 * np.log(2) + 1)
    assert scheme.slots == {"segments", "query_scale"}
    assert STRING(9, 3).slots == {"segments"}
    torch.testing.assert_close(scheme.query_scale(torch.arange(3), 4), torch.full((1, 3), 1.143433))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"shift": 0}, "shift=0"),
        ({"window": -1}, "window=-1"),
        ({"attention_factor": 0}, "attention_factor=0"),
        ({"shift": 4, "window": 5}, "window=5 is not allowed; window must be at most shift=4"),
    ],
)
def test_wrong_fields_are_named(fields, named):
    with pytest.raises(InvalidField, match=named):
        STRING(**fields)


def test_a_window_that_the_shift_of_the_checkpoint_cannot_hold_is_named():
    with pytest.raises(InvalidField, match="window=11 is not allowed; window must be at most shift=10"):
        STRING(window=11).resolve(Checkpoint(32, 4, 32))
