"""The numbers that are drawn, against the formulas of the papers and against what models do."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rope_patch import (
    ALiBi,
    InvalidField,
    NTKScaling,
    ReRoPE,
    RoPE,
    Sandwich,
    T5Bias,
    UnsupportedModel,
    XPos,
    YaRN,
    get_scheme,
    patch,
    unpatch,
)
from rope_patch.description import rotated_distance
from rope_patch.schemes.slots import Checkpoint
from rope_patch.schemes.tools.sinusoids import sinusoidal_rows
from rope_patch.typing import RotarySpec
from tests.families import build
from tests.runs import logits, tokens
from tools import pictures
from tools import position_matrices as matrices
from tools import scores_by_distance as scores

bias_matrices, rotated_distances = matrices.bias_matrices, matrices.rotated_distances
layer_states, mean_by_distance, mean_scores = scores.layer_states, scores.mean_by_distance, scores.mean_scores
SPEC = RotarySpec(16, 10000.0, 256)
SIZES = [(2, 10000.0), (8, 100.0), (64, 500000.0)]


def theta(i, dim, base):
    return base ** (-2 * i / dim)


@pytest.mark.parametrize(("dim", "base"), SIZES)
def test_the_inner_product_is_the_mean_of_cosines_and_that_of_the_vectors(dim, base):
    distance = torch.tensor([0, 1, 7, 300])
    found = pictures.mean_inner_products(distance, dim, base)
    expected = [sum(math.cos(theta(i, dim, base) * s) for i in range(dim // 2)) / (dim // 2) for s in (0, 1, 7, 300)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=3e-5)
    rows = sinusoidal_rows(torch.tensor([5, 5 + 7]), dim, base)
    assert float(rows[0] @ rows[1]) / (dim / 2) == pytest.approx(float(found[2]), abs=1e-6)
    assert found[0] == 1


@pytest.mark.parametrize(("dim", "base"), SIZES)
def test_the_decay_bound_is_that_of_the_paper(dim, base):
    for distance in (0, 1, 7, 300):
        sums, running = [], 0
        for i in range(dim // 2):
            running += complex(math.cos(distance * theta(i, dim, base)), math.sin(distance * theta(i, dim, base)))
            sums.append(abs(running))
        found = float(pictures.decay_bounds(torch.tensor(distance), dim, base))
        assert found == pytest.approx(sum(sums) / len(sums), rel=2e-5)
    assert float(pictures.decay_bounds(torch.tensor(0), dim, base)) == (dim / 2 + 1) / 2


def test_the_bound_bounds_what_rotation_makes_of_a_product():
    """Summation by parts: |sum_i h_i e^(i s theta_i)| <= max |h_(i+1) - h_i| sum_i |S_(i+1)|, with h_(d/2) = 0."""
    random = torch.Generator().manual_seed(0)
    h = torch.view_as_complex(torch.randn(8, 2, dtype=torch.float64, generator=random))
    steps = torch.cat([h[1:], torch.zeros(1, dtype=h.dtype)]) - h
    for distance in (0, 3, 50, 2000):
        turns = torch.tensor(
            [complex(math.cos(a), math.sin(a)) for a in (distance * theta(i, 16, 1e4) for i in range(8))]
        )
        bound = steps.abs().max() * 8 * pictures.decay_bounds(torch.tensor(distance), 16)
        assert (h * turns).sum().abs() <= bound * (1 + 1e-6)


def test_wavelengths_of_rope_and_of_schemes():
    plain = pictures.wavelengths_of("rope", SPEC)
    expected = [2 * math.pi / theta(i, 16, 10000.0) for i in range(8)]
    torch.testing.assert_close(plain, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)
    torch.testing.assert_close(pictures.wavelengths_of("pi:factor=4", SPEC), 4 * plain, rtol=1e-6, atol=0)
    raised = pictures.wavelengths_of(NTKScaling(factor=4), SPEC)
    assert float(raised[0]) == pytest.approx(float(plain[0]))
    assert float(raised[-1]) == pytest.approx(4 * float(plain[-1]), rel=1e-5)
    assert pictures.wavelengths_of("nope", SPEC).isinf().all()
    assert torch.equal(pictures.wavelengths_of("dynamic_ntk", SPEC), plain)
    torch.testing.assert_close(pictures.wavelengths_of("dynamic_ntk", SPEC, 1024), raised, rtol=1e-5, atol=0)


def test_alibi_by_its_formula():
    found = bias_matrices(ALiBi(), num_heads=4, length=9)
    for h, slope in enumerate((1 / 4, 1 / 16, 1 / 64, 1 / 256)):
        for m in range(9):
            for n in range(9):
                value = float(found[h, m, n])
                assert math.isnan(value) if n > m else value == -slope * (m - n)


def test_sandwich_by_its_formula():
    found = bias_matrices(Sandwich(embedding_dim=8), num_heads=2, length=40)
    for h in (0, 1):
        cosines = sum(math.cos((33 - 4) * 10000 ** (-2 * i / 8)) for i in range(4))
        assert float(found[h, 33, 4]) == pytest.approx((cosines - 4) * 2 / (8 * (h + 1)), rel=1e-5)


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
    found = bias_matrices(scheme, 2, 12, {"relative_attention_bias": table}, bidirectional=True)
    assert not found.isnan().any()
    for m, n in ((5, 5), (7, 2), (2, 7)):  # near distances have a bucket each, later keys behind the earlier ones
        assert found[:, m, n].tolist() == table[abs(m - n) + 16 * (n > m)].tolist()
    causal = bias_matrices(scheme, 2, 12, {"relative_attention_bias": table})
    assert causal[0, 2, 7].isnan()
    assert causal[0, 7, 2] == found[0, 7, 2]


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
def test_every_pair_is_as_describe_shows_it(spec):
    scheme, positions = get_scheme(spec), torch.arange(30)
    found = rotated_distances(scheme, positions[:, None], positions)
    for m in range(30):
        for n in range(m + 1):
            shown, value = rotated_distance(scheme, m, n), float(found[m, n])
            assert (shown == "hidden") == math.isnan(value)
            assert shown == "hidden" or float(shown) == pytest.approx(value, rel=1e-5)


def test_position_maps_by_their_formulas():
    m, n = torch.arange(50)[:, None], torch.arange(50)
    past, distance = m >= n, (m - n).double()
    assert torch.equal(rotated_distances(ReRoPE(8), m, n)[past], distance.clamp(max=8)[past])
    leaky = rotated_distances(get_scheme("leaky_rerope:window=8,factor=4"), m, n)
    expected = torch.where(distance < 8, distance, 8 + (distance - 8) / 4)
    torch.testing.assert_close(leaky[past], expected[past], rtol=1e-6, atol=1e-6)
    window = rotated_distances(get_scheme("window:window=8"), m, n)
    assert torch.equal(window.isnan()[past], (distance >= 8)[past])
    grouped = rotated_distances(get_scheme("self_extend:group_size=4,window=8"), m, n)
    assert grouped[49, 3] == 49 // 4 + 8 - 2 - 0


@pytest.mark.parametrize("training_length", [16, 64, 100])
@pytest.mark.parametrize("times", [1, 2, 4, 8])
def test_the_settings_that_are_drawn_keep_to_the_training_length(training_length, times):
    length = training_length * times
    positions = torch.arange(length)
    rope, *others = pictures.mapping_schemes(training_length, length)
    assert rope == RoPE()
    assert {scheme.name for scheme in others} >= {"rerope", "leaky_rerope", "self_extend", "dca", "lm_infinite"}
    for scheme in others:
        resolved = scheme.resolve(Checkpoint(training_length, 1, length))
        distances = rotated_distances(resolved, positions[:, None], positions)
        seen = distances[(positions[:, None] >= positions) & ~distances.isnan()]
        if scheme.name == "lampe" and training_length == 16:
            continue  # the last tokens of a step of l / M keep their true distances, a large part of so short an L
        assert seen.min() >= 0
        assert seen.max() <= training_length, str(scheme)


# --- scores of a model -----------------------------------------------------------------------------------------------


def true_scores(model, input_ids, layer, monkeypatch):
    """Mean over batch, heads and pairs of what the model itself multiplies in attention, by distance."""
    eager, seen = ALL_ATTENTION_FUNCTIONS["sdpa"], []

    def record(module, query, key, value, *args, **kwargs):
        seen.append((query, key.repeat_interleave(query.shape[1] // key.shape[1], dim=1), kwargs["scaling"]))
        return eager(module, query, key, value, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", record)
    with torch.no_grad():
        model(input_ids)
    monkeypatch.undo()
    query, key, scaling = seen[layer]
    scores = query.double() @ key.double().transpose(-1, -2) * scaling
    return torch.stack([scores.diagonal(-s, dim1=-2, dim2=-1).mean() for s in range(scores.shape[-1])])


@pytest.mark.parametrize("family", ["llama", "llama_mha", "gpt_neox", "cohere", "glm", "qwen3"])
@pytest.mark.parametrize("layer", [0, 1])
def test_the_parts_add_up_to_the_mean_score_of_the_model(family, layer, monkeypatch):
    model = build(family)
    model.set_attn_implementation("sdpa")
    input_ids = tokens(40, 2)
    states = layer_states(model, input_ids, layer)
    expected = true_scores(model, input_ids, layer, monkeypatch)
    found = mean_scores(states)
    torch.testing.assert_close(found["all"], expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found["fast"] + found["slow"] + states.rest, found["all"])
    partial = 2 * len(states.layout.first) < states.query.shape[-1]
    assert bool(states.rest.abs().max() > 0) == partial


@pytest.mark.parametrize("scheme", [NTKScaling(factor=4), YaRN(factor=4), XPos()], ids=lambda scheme: scheme.name)
def test_under_a_scheme_they_are_what_the_patched_first_layer_scores(scheme, llama):
    """Queries and keys of layer 0 know nothing of positions, so the patched model has the same."""
    states = layer_states(llama, tokens(40, 2), 0)
    found = scheme.frequencies(states.rotary)
    positions = torch.arange(40, dtype=torch.float64)
    turned = []
    for x, sign in ((states.query, -1), (states.key, 1)):
        angles = positions[:, None] * found.inv_freq.double()
        faded = torch.exp(sign * positions[:, None] * found.decay.double()) if found.decay is not None else 1.0
        cos, sin = (angles.cos() * found.attention_scaling * faded, angles.sin() * found.attention_scaling * faded)
        turned.append(states.layout.rotate(x.double(), cos[None, None], sin[None, None]))
    matrix = turned[0] @ turned[1].transpose(-1, -2) * states.scaling
    expected = torch.stack([matrix.diagonal(-s, dim1=-2, dim2=-1).mean() for s in range(40)])
    torch.testing.assert_close(mean_scores(states, scheme)["all"], expected, rtol=1e-9, atol=1e-12)


def test_the_slow_half_is_the_slow_half(llama):
    states = layer_states(llama, tokens(20, 1), 1)
    half = len(states.layout.first) // 2
    assert states.own.inv_freq[:half].min() > states.own.inv_freq[half:].max()
    distance = torch.arange(20, dtype=torch.float64)[:, None]
    turn = torch.polar(torch.ones(20, half, dtype=torch.float64), distance * states.own.inv_freq[half:])
    slow = mean_scores(states)["slow"]
    torch.testing.assert_close(slow, (states.unrotated[:, half:] * turn).real.sum(-1))
    torch.testing.assert_close(slow, mean_scores(states, RoPE())["slow"], rtol=1e-12, atol=1e-15)


def test_the_mean_by_distance_is_the_mean_by_distance():
    random = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 2, 3, 11, 4, dtype=torch.complex128, generator=random)
    found = mean_by_distance(query, key)
    for s in range(11):
        expected = (query[:, :, s:] * key[:, :, : 11 - s].conj()).mean(dim=(0, 1, 2))
        torch.testing.assert_close(found[s], expected)


def test_the_model_is_left_as_it_was(llama):
    input_ids = tokens(12, 1)
    before = logits(llama, input_ids)
    layer_states(llama, input_ids, 1)
    assert torch.equal(logits(llama, input_ids), before)
    assert not any(module._forward_pre_hooks for module in llama.modules())
    with pytest.raises(InvalidField):
        layer_states(llama, torch.zeros(3, dtype=torch.long), 0)
    assert torch.equal(logits(llama, input_ids), before)


def test_a_patched_model_is_read_as_it_runs(llama, monkeypatch):
    input_ids = tokens(64, 1)
    plain = [layer_states(llama, input_ids, layer).query for layer in (0, 1)]
    patch(llama, ReRoPE(window=4))
    patched = [layer_states(llama, input_ids, layer).query for layer in (0, 1)]
    unpatch(llama)
    assert torch.equal(plain[0], patched[0])
    assert not torch.allclose(plain[1], patched[1])
    with patch(llama, YaRN(factor=4)):  # which scales the scores too
        states = layer_states(llama, input_ids, 1)
        assert states.own.attention_scaling > 1
        expected = true_scores(llama, input_ids, 1, monkeypatch)
        torch.testing.assert_close(mean_scores(states)["all"], expected, rtol=1e-4, atol=1e-6)


def test_what_cannot_be_read_is_named(llama):
    input_ids = tokens(12, 1)
    with pytest.raises(InvalidField, match="layer=2 is not allowed; LlamaForCausalLM has layers 0 to 1"):
        layer_states(llama, input_ids, 2)
    with pytest.raises(InvalidField, match=r"layer=1 is not allowed; .* rotates nothing"):
        layer_states(build("smollm3"), input_ids, 1)
    with pytest.raises(UnsupportedModel):
        layer_states(torch.nn.Linear(2, 2), input_ids, 0)
    with pytest.raises(InvalidField, match="rerope:window=4 fills segments and has no frequencies"):
        mean_scores(layer_states(llama, input_ids, 0), ReRoPE(4))
    with pytest.raises(InvalidField, match="rope fills frequencies and has no bias"):
        bias_matrices(RoPE(), 2, 8)
    with pytest.raises(InvalidField, match=r"the weights of t5.* are for 2 heads"):
        bias_matrices(T5Bias(), 3, 8, {"relative_attention_bias": torch.zeros(32, 2)})
