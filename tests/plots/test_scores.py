from __future__ import annotations

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rope_patch import InvalidField, NTKScaling, ReRoPE, RoPE, UnsupportedModel, XPos, YaRN, patch, unpatch
from rope_patch.plots import layer_states, mean_scores, plot_scores_by_distance
from rope_patch.plots.scores import _mean_by_distance, _smoothed
from tests.families import build
from tests.runs import logits, tokens

from .look import check_look, words_of


def true_scores(model, input_ids, layer, monkeypatch):
    """Mean over batch, heads and pairs of what the model itself multiplies in attention, by distance."""
    eager = ALL_ATTENTION_FUNCTIONS["sdpa"]
    seen = []

    def record(module, query, key, value, *args, **kwargs):
        seen.append((query, key.repeat_interleave(query.shape[1] // key.shape[1], dim=1), kwargs["scaling"]))
        return eager(module, query, key, value, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", record)
    with torch.no_grad():
        model(input_ids)
    monkeypatch.undo()
    query, key, scaling = seen[layer]
    scores = query.double() @ key.double().transpose(-1, -2) * scaling
    length = scores.shape[-1]
    return torch.stack([scores.diagonal(-s, dim1=-2, dim2=-1).mean() for s in range(length)])


@pytest.mark.parametrize("family", ["llama", "llama_mha", "gpt_neox", "cohere", "glm", "qwen3"])
@pytest.mark.parametrize("layer", [0, 1])
def test_the_halves_add_up_to_the_mean_score_of_the_model(family, layer, monkeypatch):
    model = build(family)
    model.set_attn_implementation("sdpa")
    input_ids = tokens(40, 2)
    states = layer_states(model, input_ids, layer)
    scores = mean_scores(states)
    expected = true_scores(model, input_ids, layer, monkeypatch)
    torch.testing.assert_close(scores.high + scores.low + scores.rest, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(scores.total, expected, rtol=1e-4, atol=1e-6)
    partial = 2 * len(states.layout.first) < states.query.shape[-1]
    assert bool(scores.rest.abs().max() > 0) == partial


@pytest.mark.parametrize("scheme", [NTKScaling(factor=4), YaRN(factor=4), XPos()], ids=lambda scheme: scheme.name)
def test_under_a_scheme_they_are_what_the_patched_first_layer_scores(scheme, llama):
    """Queries and keys of layer 0 know nothing of positions, so the patched model has the same."""
    input_ids = tokens(40, 2)
    states = layer_states(llama, input_ids, 0)
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
    torch.testing.assert_close(mean_scores(states, scheme).total, expected, rtol=1e-9, atol=1e-12)


def test_without_a_scheme_it_is_the_frequencies_of_the_checkpoint(llama):
    states = layer_states(llama, tokens(20, 1), 1)
    torch.testing.assert_close(mean_scores(states).low, mean_scores(states, RoPE()).low, rtol=1e-12, atol=1e-15)


def test_the_slow_half_is_the_slow_half(llama):
    """At the raised base the slow pairs at k times the distance have turned as far as the slowest did before."""
    states = layer_states(llama, tokens(20, 1), 1)
    half = len(states.layout.first) // 2
    assert states.own.inv_freq[:half].min() > states.own.inv_freq[half:].max()
    scores = mean_scores(states)
    distance = torch.arange(20, dtype=torch.float64)[:, None]
    turn = torch.polar(torch.ones(20, half, dtype=torch.float64), distance * states.own.inv_freq[half:])
    torch.testing.assert_close(scores.low, (states.turned[:, half:] * turn).real.sum(-1))


def test_the_mean_by_distance_is_the_mean_by_distance():
    random = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 2, 3, 11, 4, dtype=torch.complex128, generator=random)
    found = _mean_by_distance(query, key)
    for s in range(11):
        expected = (query[:, :, s:] * key[:, :, : 11 - s].conj()).mean(dim=(0, 1, 2))
        torch.testing.assert_close(found[s], expected)


def test_smoothing_is_a_centred_mean():
    values = torch.tensor([0.0, 3.0, 6.0, 0.0], dtype=torch.float64)
    assert _smoothed(values, 3).tolist() == [1.5, 3.0, 3.0, 3.0]
    assert torch.equal(_smoothed(values, 1), values)


def test_the_model_is_left_as_it_was(llama):
    input_ids = tokens(12, 1)
    before = logits(llama, input_ids)
    layer_states(llama, input_ids, 1)
    assert torch.equal(logits(llama, input_ids), before)
    assert not any(module._forward_pre_hooks for module in llama.modules())
    with pytest.raises(InvalidField):
        layer_states(llama, torch.zeros(3, dtype=torch.long), 0)
    assert torch.equal(logits(llama, input_ids), before)


def test_a_patched_model_is_read_as_it_runs(llama):
    input_ids = tokens(64, 1)
    plain = [layer_states(llama, input_ids, layer).query for layer in (0, 1)]
    patch(llama, ReRoPE(window=4))
    patched = [layer_states(llama, input_ids, layer).query for layer in (0, 1)]
    unpatch(llama)
    assert torch.equal(plain[0], patched[0])
    assert not torch.allclose(plain[1], patched[1])


def test_a_model_under_other_frequencies_is_read_with_those(llama, monkeypatch):
    input_ids = tokens(40, 2)
    with patch(llama, YaRN(factor=4)):  # which scales the scores too
        states = layer_states(llama, input_ids, 1)
        assert states.own.attention_scaling > 1
        expected = true_scores(llama, input_ids, 1, monkeypatch)
        torch.testing.assert_close(mean_scores(states).total, expected, rtol=1e-4, atol=1e-6)


def test_the_picture(llama):
    states = layer_states(llama, tokens(160, 2), 1)
    figure = plot_scores_by_distance(states, NTKScaling(factor=4))
    check_look(figure)
    words = words_of(figure)
    assert "ntk factor=4" in words
    assert words.count("training length") == 3
    check_look(plot_scores_by_distance(layer_states(llama, tokens(20, 1), 0), YaRN(factor=2.0), smooth=1))


def test_wrong_input_is_named(llama):
    input_ids = tokens(12, 1)
    with pytest.raises(InvalidField, match="layer=2 is not allowed; LlamaForCausalLM has layers 0 to 1"):
        layer_states(llama, input_ids, 2)
    with pytest.raises(InvalidField, match="layer=-1 is not allowed; layer must be a whole number of at least 0"):
        layer_states(llama, input_ids, -1)
    with pytest.raises(InvalidField, match=r"input_ids of shape \(1, 1\) are not allowed"):
        layer_states(llama, input_ids[:, :1], 0)
    with pytest.raises(InvalidField, match=r"layer=1 is not allowed; .* rotates nothing"):
        layer_states(build("smollm3"), input_ids, 1)
    with pytest.raises(UnsupportedModel):
        layer_states(torch.nn.Linear(2, 2), input_ids, 0)
    states = layer_states(llama, input_ids, 0)
    with pytest.raises(InvalidField, match="rerope:window=4 fills segments and has no frequencies"):
        mean_scores(states, ReRoPE(4))
    with pytest.raises(InvalidField, match="smooth=4 is not allowed; it must be odd"):
        plot_scores_by_distance(states, NTKScaling(factor=2), smooth=4)
