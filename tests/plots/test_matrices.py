from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from rope_patch import (
    ALiBi,
    DualChunkAttention,
    InvalidField,
    ReRoPE,
    RoPE,
    Sandwich,
    SlidingWindow,
    T5Bias,
    get_scheme,
)
from rope_patch.description import rotated_distance
from rope_patch.plots import bias_matrices, plot_biases, plot_position_maps, rotated_distances
from rope_patch.plots.position_maps import segment_schemes
from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.slots import Checkpoint

from .look import check_look, words_of


@dataclass(frozen=True)
class Needy(Scheme):
    """A bias that cannot do without a learned table."""

    name = "needy"
    equation = "table"
    source = Source("none", 2024, "")

    def bias(self, distance, num_heads, weights):
        return weights["table"] + distance


def test_alibi_by_its_formula():
    matrices = bias_matrices(ALiBi(), num_heads=4, length=9)
    assert matrices.shape == (4, 9, 9)
    for h, slope in enumerate((1 / 4, 1 / 16, 1 / 64, 1 / 256)):
        for m in range(9):
            for n in range(9):
                value = float(matrices[h, m, n])
                assert math.isnan(value) if n > m else value == -slope * (m - n)


def test_sandwich_by_its_formula():
    matrices = bias_matrices(Sandwich(embedding_dim=8), num_heads=2, length=40)
    for h in (0, 1):
        cosines = sum(math.cos((33 - 4) * 10000 ** (-2 * i / 8)) for i in range(4))
        assert float(matrices[h, 33, 4]) == pytest.approx((cosines - 4) * 2 / (8 * (h + 1)), rel=1e-5)


def test_compositions_and_learned_biases_as_they_start():
    assert torch.equal(
        bias_matrices(get_scheme("rope+alibi"), 2, 5, bidirectional=True),
        bias_matrices(ALiBi(), 2, 5, bidirectional=True),
    )
    kerple = bias_matrices(get_scheme("kerple"), 2, 5)
    assert torch.equal(kerple.nan_to_num(), bias_matrices(get_scheme("kerple"), 2, 5).nan_to_num())
    assert (kerple[:, 4, 0] < kerple[:, 4, 3]).all()


def test_t5_by_its_table_in_both_directions():
    table = torch.arange(64.0).view(32, 2)
    scheme = T5Bias(num_buckets=32, max_distance=128, bidirectional=True)
    matrices = bias_matrices(scheme, 2, 12, {"relative_attention_bias": table}, bidirectional=True)
    assert not matrices.isnan().any()
    for m, n in ((5, 5), (7, 2), (2, 7)):  # near distances have a bucket each, later keys behind the earlier ones
        bucket = abs(m - n) + 16 * (n > m)
        assert matrices[:, m, n].tolist() == table[bucket].tolist()
    causal = bias_matrices(scheme, 2, 12, {"relative_attention_bias": table})
    assert causal[0, 2, 7].isnan()
    assert causal[0, 7, 2] == matrices[0, 7, 2]


SEGMENTS = (
    "rope",
    "rerope:window=5",
    "leaky_rerope:window=5,factor=3",
    "self_extend:group_size=3,window=7",
    "self_extend:group_size=3,window=7,shift=fractional",
    "dca:chunk_size=9,local_window=3",
    "dca:chunk_size=9,local_window=3,constants=paper",
    "lm_infinite:local_window=6,n_global=2",
    "window:window=6",
    "rerope:window=5+logn",
)


@pytest.mark.parametrize("spec", SEGMENTS)
def test_every_pair_is_what_describe_says_of_it(spec):
    scheme = get_scheme(spec)
    positions = torch.arange(30)
    found = rotated_distances(scheme, positions[:, None], positions)
    for m in range(30):
        for n in range(m + 1):
            said = rotated_distance(scheme, m, n)
            value = float(found[m, n])
            assert (said == "hidden") == math.isnan(value)
            assert said == "hidden" or float(said) == pytest.approx(value, rel=1e-5)


def test_position_maps_by_their_formulas():
    positions = torch.arange(50)
    m, n = positions[:, None], positions
    past = m >= n
    distance = (m - n).double()
    found = rotated_distances(ReRoPE(8), m, n)
    assert torch.equal(found[past], distance.clamp(max=8)[past])
    leaky = rotated_distances(get_scheme("leaky_rerope:window=8,factor=4"), m, n)
    expected = torch.where(distance < 8, distance, 8 + (distance - 8) / 4)
    torch.testing.assert_close(leaky[past], expected[past], rtol=1e-6, atol=1e-6)
    window = rotated_distances(SlidingWindow(8), m, n)
    assert torch.equal(window.isnan()[past], (distance >= 8)[past])
    assert torch.equal(rotated_distances(RoPE(), m, n), distance)
    grouped = rotated_distances(get_scheme("self_extend:group_size=4,window=8"), m, n)
    assert grouped[49, 3] == 49 // 4 + 8 - 2 - 0


@pytest.mark.parametrize("training_length", [2, 16, 64, 100])
@pytest.mark.parametrize("times", [1, 2, 4, 8])
def test_the_settings_that_are_drawn_keep_to_the_training_length(training_length, times):
    length = training_length * times
    positions = torch.arange(length)
    for scheme in segment_schemes(training_length, length)[1:]:
        resolved = scheme.resolve(Checkpoint(training_length, 1, length))
        distances = rotated_distances(resolved, positions[:, None], positions)
        seen = distances[(positions[:, None] >= positions) & ~distances.isnan()]
        assert seen.min() >= 0
        assert seen.max() <= training_length, str(scheme)


def test_pictures_can_be_read():
    figure = plot_position_maps()
    check_look(figure)
    words = words_of(figure)
    for name in ("rope", "rerope", "leaky_rerope", "self_extend", "dca", "lm_infinite", "window", "L = 64"):
        assert name in words
    check_look(plot_position_maps([DualChunkAttention()], training_length=10, length=25))
    check_look(plot_position_maps([ReRoPE(4), RoPE()], training_length=16))
    figure = plot_biases([ALiBi(), Sandwich()], num_heads=3, length=20)
    check_look(figure)
    assert "head 1: \N{MINUS SIGN}1.19 to 0" in words_of(figure)
    t5 = {"t5": {"relative_attention_bias": torch.randn(32, 2, generator=torch.Generator().manual_seed(0))}}
    check_look(plot_biases([T5Bias()], 2, 20, t5, bidirectional=["t5"]))


def test_hidden_pairs_are_blank():
    figure = plot_position_maps([SlidingWindow(4)], training_length=8, length=16)
    image = figure.axes[0].images[0].get_array()
    assert image.mask[10, 2]  # beyond the window
    assert image.mask[2, 10]  # after the query
    assert not image.mask[10, 9]


WRONG = {
    "rope fills frequencies and has no bias; allowed: alibi, t5": lambda: bias_matrices(RoPE(), 2, 8),
    "num_heads=0 is not allowed": lambda: bias_matrices(ALiBi(), 0, 8),
    "length='8' is not allowed": lambda: bias_matrices(ALiBi(), 2, "8"),
    "learned parameter 'table'": lambda: bias_matrices(Needy(), 2, 8),
    "weights of t5": lambda: bias_matrices(T5Bias(), 3, 8, {"relative_attention_bias": torch.zeros(32, 2)}),
    "schemes: 0 were given": lambda: plot_biases([]),
    "num_heads=2.5 is not allowed": lambda: plot_biases([ALiBi()], num_heads=2.5),
    "num_heads: 9 were given; one to 8": lambda: plot_biases([ALiBi()], num_heads=9),
    "training_length=1 is not allowed": lambda: plot_position_maps(training_length=1),
    "schemes: 13 were given; one to 12": lambda: plot_position_maps([RoPE()] * 13),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_input_is_named(message):
    with pytest.raises(InvalidField) as error:
        WRONG[message]()
    assert message in str(error.value)
