"""The sums of the paper's equation as loops over single tokens, and the constant gates that are ALiBi."""

import copy
import math

import numpy as np
import pytest
import torch
import transformers
from transformers import DynamicCache

from rope_patch import ALiBi, FoX, InvalidField, UnsupportedPositions, patch
from rope_patch.mounting.running_bias import running_sums
from rope_patch.schemes.slots import ModelShape
from tests.definition import Definition, no_rotation
from tests.families import build
from tests.releases import since
from tests.runs import assert_close, generated, greedy, left_padded, logits, positions_of, tokens
from tests.schemes.pairs import SHAPE, at_start, random, trained

CASES = ["fox:horizon=4,initial_std=0.1"]


def log_gate(x, weight, offset):
    return math.log(1 / (1 + math.exp(-(sum(a * b for a, b in zip(x, weight, strict=True)) + offset))))


def forgotten(head):
    """ln of the product of all gates after the key, up to the query's own, `(length, length)`."""
    weight, offset = head.learned["gate_weight"][head.index], head.learned["gate_offset"][head.index]
    gates = [log_gate(x, weight, offset) for x in head.x]
    return np.array([[sum(gates[n + 1 : m + 1]) for n in head.n[0]] for m in head.m[:, 0]])


DEFINITIONS = {
    "fox:horizon=4,initial_std=0.1": Definition(distance=no_rotation, content_bias=forgotten),
    "rope+fox:horizon=4,initial_std=0.1": Definition(content_bias=forgotten),
    "fox:horizon=4,initial_std=0.1+logn:training_length=8": Definition(
        distance=no_rotation,
        content_bias=forgotten,
        query_scale=lambda m: np.maximum(1, np.log(m + 1) / np.log(8)),
    ),
    "alibi+fox:horizon=4,initial_std=0.1": Definition(
        distance=no_rotation, bias=lambda head, m, n: -(4.0 ** -(head + 1)) * (m - n), content_bias=forgotten
    ),
    "rerope:window=6+fox:horizon=4,initial_std=0.1": Definition(
        distance=lambda m, n: np.minimum(m - n, 6), content_bias=forgotten
    ),
}


def biases(states, gate_weight, gate_offset):
    """c_m - c_n of all pairs, `(batch, heads, length, length)`."""
    added = FoX().running_bias(states, {"gate_weight": gate_weight, "gate_offset": gate_offset})
    sums = added.cumsum(dim=1).transpose(1, 2)
    return sums[..., :, None] - sums[..., None, :]


@pytest.mark.parametrize("shape", [SHAPE, ModelShape(5, 4, 7, 2, 50, 16, 4), ModelShape(1, 2, 3, 2, 50, 16, 2)])
def test_differences_of_the_sums_are_those_of_the_paper(shape):
    weights, states = trained(FoX(), shape), random(2, 9, shape.hidden_size, seed=4)
    found = biases(states, **weights).detach().numpy()
    weight, offset = (weights[name].tolist() for name in ("gate_weight", "gate_offset"))
    assert found.shape == (2, shape.num_heads, 9, 9)
    for b, h, m, n in np.ndindex(*found.shape):
        if m >= n:
            gates = [log_gate(states[b, i].tolist(), weight[h], offset[h]) for i in range(n + 1, m + 1)]
            np.testing.assert_allclose(found[b, h, m, n], sum(gates), atol=1e-12)


@pytest.mark.parametrize("start", [at_start, trained])
def test_gradients_are_those_of_finite_differences_and_leave_the_start(start):
    weights, states = start(FoX()), random(2, 5, SHAPE.hidden_size, seed=4).requires_grad_()
    assert torch.autograd.gradcheck(biases, (states, weights["gate_weight"], weights["gate_offset"]))
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    (biases(states, **weights).masked_fill(~seen, -torch.inf).softmax(-1) @ random(5, 3)).square().sum().backward()
    for weight in weights.values():
        assert weight.grad.abs().min() > 0


@pytest.mark.parametrize("horizon", [1, 1.4427, 32.5, 4096, 1e6])
def test_weights_fall_by_e_over_the_horizon_whatever_the_text(horizon):
    found = FoX(horizon=horizon).running_bias(random(2, 3, SHAPE.hidden_size), at_start(FoX(horizon=horizon)))
    torch.testing.assert_close(found * horizon, torch.full_like(found, -1), rtol=2e-6, atol=0)


def test_the_default_horizon_is_the_training_length_and_the_published_gates_start_at_half():
    assert torch.equal(at_start(FoX())["gate_offset"], at_start(FoX(horizon=16))["gate_offset"])
    assert not at_start(FoX())["gate_weight"].any()
    published = at_start(FoX(horizon=1.4427, initial_std=0.02), ModelShape(40, 4, 500, 2, 50, 16, 4))
    assert published["gate_offset"].abs().max() < 1e-4
    assert abs(published["gate_weight"].std().item() - 0.02) < 1e-3


@pytest.mark.parametrize("family", ["llama", "llama_mha"])
def test_gates_that_do_not_read_the_text_are_alibi(family):
    model, expected = build(family), build(family)
    patch(model, FoX(horizon=8))
    patch(expected, ALiBi(slopes=(0.125,) * 4))
    assert_close(logits(model, tokens(rows=2)), logits(expected, tokens(rows=2)))


# --- sums of a whole text, as each way of scoring reads them -------------------------------------------------------


def loss_gradients(attention, dtype, ids, **inputs):
    """Logits and gradients of a model whose gates differ from token to token and from layer to layer."""
    model = build("llama").to(dtype)
    patch(model, "rerope:window=6+fox:horizon=4", attention=attention)
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            weight = layer.self_attn.rope_patch.gate_weight
            weight.copy_(0.2 * random(*weight.shape, seed=index))
    found = model(ids, use_cache=False, labels=ids.masked_fill(ids == 0, -100), **inputs)
    found.loss.backward()
    return found.logits.detach(), {name: parameter.grad.double() for name, parameter in model.named_parameters()}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("attention", ["segmented", "chunked"])
@pytest.mark.parametrize("kind", ["long", "padded", "packed"])
def test_long_texts_have_the_gradients_of_float64(attention, kind):
    rows = [tokens(size, seed=size) for size in ((1500,) if kind == "long" else (70, 400, 230))]
    ids, mask = left_padded(rows)
    inputs = {"attention_mask": mask, "position_ids": positions_of(mask)} if kind == "padded" else {}
    if kind == "packed":
        ids = torch.cat(rows, dim=1)
        inputs = {"position_ids": torch.cat([torch.arange(row.shape[1]) for row in rows])[None]}
    found, gradients = loss_gradients(attention, torch.float32, ids, **inputs)
    expected, exact = loss_gradients("oracle", torch.float64, ids, **inputs)
    assert (found - expected)[ids > 0].abs().max() < 1e-4
    for name, gradient in exact.items():
        assert (gradients[name] - gradient).norm() < 2e-4 * gradient.norm(), name


def test_what_is_kept_of_the_sums_is_cropped_copied_and_reordered_with_the_keys(llama):
    ids = tokens(20, rows=3)
    with patch(llama, CASES[0]), torch.no_grad():
        expected, cache = logits(llama, ids), DynamicCache(config=llama.config)
        llama(ids[:, :11], past_key_values=cache)
        llama(tokens(6, rows=3, seed=9), past_key_values=cache)
        cache.crop(-8)
        order = torch.tensor([2, 0, 1])
        for change, rows in (
            (lambda cache: None, ids),
            (lambda cache: cache.reorder_cache(order), ids[order]),
            (lambda cache: cache.batch_select_indices(order[:2]), ids[order[:2]]),
            (lambda cache: cache.batch_repeat_interleave(2), ids.repeat_interleave(2, dim=0)),
        ):
            branch = copy.deepcopy(cache)
            change(branch)
            wanted = logits(llama, rows)[:, 9:]
            assert_close(llama(rows[:, 9:], past_key_values=branch).logits, wanted)
        assert_close(llama(ids[:, 9:], past_key_values=cache).logits, expected[:, 9:])


@pytest.mark.parametrize(("taken", "told"), [("keys", "9 keys, but sums of 12"), ("sums", "12 keys, but sums of 9")])
def test_keys_and_sums_that_do_not_match_are_refused(llama, taken, told):
    ids = tokens(12)
    with patch(llama, CASES[0]), torch.no_grad():
        cache = DynamicCache(config=llama.config)
        llama(ids[:, :10], past_key_values=cache)
        number = llama.config.num_hidden_layers
        for layer in cache.layers[:number] if taken == "keys" else cache.layers[number:]:
            layer.keys, layer.values = layer.keys[:, :, 3:], layer.values[:, :, 3:]
        with pytest.raises(UnsupportedPositions, match=f"the cache has {told} tokens"):
            llama(ids[:, 10:], past_key_values=cache)


def test_a_long_text_is_summed_in_float64():
    added = -torch.rand(2, 5000, 3, generator=torch.Generator().manual_seed(0))
    found = running_sums(added, None)
    np.testing.assert_allclose(found.numpy(), np.cumsum(added.double().numpy(), axis=1).swapaxes(1, 2), rtol=1e-13)


@pytest.mark.parametrize("step", [1, 3])
def test_pads_between_prompt_and_answer_forget_nothing(llama, step):
    prompts, answers = [tokens(14, seed=1), tokens(9, seed=2)], tokens(3, rows=2, seed=3)
    ids = torch.cat(
        [torch.stack([torch.nn.functional.pad(one[0], (0, 14 - one.shape[1])) for one in prompts]), answers], 1
    )
    positions = positions_of(mask := (ids > 0).long())
    with patch(llama, CASES[0]), torch.no_grad():
        expected = [logits(llama, torch.cat([one, answers[i, None]], 1))[:, -3:] for i, one in enumerate(prompts)]
        cache, found = DynamicCache(config=llama.config), []
        for stop in (14, *range(14 + step, 18, step)):
            part = slice(cache.get_seq_length(), stop)
            given = {"attention_mask": mask[:, :stop], "position_ids": positions[:, part]}
            found.append(llama(ids[:, part], past_key_values=cache, **given).logits)
    assert_close(torch.cat(found[1:], dim=1), torch.cat(expected))


@pytest.mark.parametrize("drafts", [{"prompt_lookup_num_tokens": 4}, {"assistant_early_exit": 1}])
def test_rejected_drafts_leave_no_sums(llama, drafts):
    ids = tokens(14).repeat(1, 2)
    with patch(llama, CASES[0]):
        assert torch.equal(generated(llama, ids, 12, **drafts), greedy(llama, ids, 12))


@pytest.mark.parametrize(
    "drafts",
    [
        {"prompt_lookup_num_tokens": 4},
        pytest.param(
            {"assistant_early_exit": 1},
            marks=since(transformers, "5.19", "cannot crop the sliding layers of a draft that it has not run"),
        ),
    ],
)
def test_rejected_drafts_leave_no_sums_behind_a_sliding_window(drafts):
    model, ids = build("gemma3"), tokens(14).repeat(1, 2)
    assert model.config.sliding_window < ids.shape[1]
    with patch(model, f"layers:[0-3=rope+{CASES[0]}]"):  # `patch` leaves local layers alone unless you name them
        assert torch.equal(generated(model, ids, 12, **drafts), greedy(model, ids, 12))


def test_half_precision_is_computed_with_in_float32():
    weights = {name: value.detach().bfloat16() for name, value in trained(FoX()).items()}
    states = random(2, 9, SHAPE.hidden_size).bfloat16()
    found = FoX().running_bias(states, weights)
    assert found.dtype == torch.float32
    assert torch.equal(found, FoX().running_bias(states.float(), {k: v.float() for k, v in weights.items()}))


@pytest.mark.parametrize("fields", [{"horizon": 0.5}, {"horizon": math.inf}, {"initial_std": -1}])
def test_wrong_fields_are_named(fields):
    with pytest.raises(InvalidField, match=next(iter(fields))):
        FoX(**fields)
