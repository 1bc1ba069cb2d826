"""The bias as loops over pairs, and the attention of Transformers with the same weights."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.inkling import modeling_inkling
from transformers.models.inkling.configuration_inkling import InklingTextConfig

from rope_patch import Inkling, InvalidField, patch
from rope_patch.schemes.slots import ModelShape
from tests.definition import Definition, no_rotation
from tests.runs import tokens
from tests.schemes.pairs import SHAPE, at_start, make_pairs, random, trained

CASES = ["inkling:extent=6,rank=3,initial_scale=100", "inkling:extent=12,rank=2,floor=5,scale=0.5,initial_scale=100"]


def tau(m, floor, scale):
    return 1 + scale * np.log(np.maximum(1, (m + 1) / floor))


def by_profiles(rank, extent):
    def bias(head):
        own = head.learned["r_proj"].reshape(-1, rank, head.x.shape[1])[head.index]
        profiles = head.x @ own.T @ head.learned["rel_logits_proj"]
        distance = head.m - head.n
        near = (distance >= 0) & (distance < extent)
        return np.where(near, profiles[head.m, np.where(near, distance, 0)], 0.0)

    return bias


def scaled(bias, floor, scale):
    return lambda head: tau(head.m, floor, scale) * bias(head)


DEFINITIONS = {
    CASES[0]: Definition(distance=no_rotation, content_bias=by_profiles(3, 6)),
    CASES[1]: Definition(
        distance=no_rotation,
        content_bias=scaled(by_profiles(2, 12), 5, 0.5),
        query_scale=lambda m: tau(m, 5, 0.5),
    ),
    f"rope+{CASES[1]}": Definition(
        content_bias=scaled(by_profiles(2, 12), 5, 0.5), query_scale=lambda m: tau(m, 5, 0.5)
    ),
    f"{CASES[0]}+logn:training_length=8": Definition(
        distance=no_rotation,
        content_bias=by_profiles(3, 6),
        query_scale=lambda m: np.maximum(1, np.log(m + 1) / np.log(8)),
    ),
}

BLOCKS = [(range(9), range(9)), (range(5, 9), range(9)), (range(30, 31), range(40)), (range(4), range(0, 40, 7))]
"""Positions of queries and of keys."""


@pytest.mark.parametrize(("m", "n"), BLOCKS)
@pytest.mark.parametrize("scheme", [Inkling(4, 3), Inkling(1, 1), Inkling(50, 2), Inkling(8, 3, scale=0.7, floor=3)])
def test_every_pair_gets_the_mixture_of_its_query(scheme, m, n):
    weights, pairs = trained(scheme), make_pairs(m, n)
    found = scheme.content_bias(pairs, weights)
    projection, profiles = (weights[name].detach().numpy() for name in ("r_proj", "rel_logits_proj"))
    for b, h, i, j in np.ndindex(*found.shape):
        own = projection[h * scheme.rank : (h + 1) * scheme.rank] @ pairs.states[b, i].numpy()
        distance = m[i] - n[j]
        expected = own @ profiles[:, distance] if 0 <= distance < scheme.extent else 0.0
        expected *= tau(m[i], scheme.floor, scheme.scale) if scheme.floor else 1
        np.testing.assert_allclose(found[b, h, i, j].item(), expected, atol=1e-12)


# --- Transformers --------------------------------------------------------------------------------------------------


def their_config(**other):
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    fields = {**sizes, "head_dim": 6, "d_rel": 3, "rel_extent": 7, "layer_types": ["hybrid"], **other}
    return InklingTextConfig(**fields, attn_implementation="eager")


def their_attention(config):
    """A layer of theirs whose convolutions do nothing."""
    layer = modeling_inkling.InklingAttention(config, 0).double().eval()
    for index, (name, weight) in enumerate(layer.named_parameters()):
        size = 0.0 if "conv" in name else 0.3
        weight.data = ("norm" in name) + size * random(*weight.shape, seed=index)
    return layer


def causal(length):
    return torch.zeros(length, length, dtype=torch.double).masked_fill(torch.ones(length, length).triu(1) > 0, -1e9)


@pytest.mark.parametrize("floor", [None, 4])
@pytest.mark.parametrize(("heads", "kv_heads", "rank", "extent"), [(4, 2, 3, 7), (3, 1, 1, 30), (8, 8, 5, 1)])
def test_bias_and_queries_are_those_of_transformers(monkeypatch, floor, heads, kv_heads, rank, extent):
    config = their_config(
        **{"num_attention_heads": heads, "num_key_value_heads": kv_heads, "d_rel": rank, "rel_extent": extent},
        log_scaling_n_floor=floor,
        log_scaling_alpha=0.3,
    )
    layer, states, caught = their_attention(config), random(2, 11, 24), {}
    plain = modeling_inkling.eager_attention_forward

    def catch(module, query, key, value, mask, **kwargs):
        caught.update(query=query, key=key, bias=kwargs["position_bias"])
        return plain(module, query, key, value, mask, **kwargs)

    monkeypatch.setattr(modeling_inkling, "eager_attention_forward", catch)
    layer(states, causal(11))
    scheme = Inkling(extent, rank, scale=0.3, floor=floor)
    weights = {"r_proj": layer.r_proj.weight, "rel_logits_proj": layer.rel_logits_proj.proj}
    shape = ModelShape(heads, 6, 24, 1, 50, 16, 6)
    assert {name: value.shape for name, value in weights.items()} == {
        name: value.shape for name, value in scheme.parameters(shape, torch.Generator()).items()
    }
    pairs = dataclasses.replace(make_pairs(range(11), range(11), shape=shape), states=states)
    torch.testing.assert_close(scheme.content_bias(pairs, weights), caught["bias"], rtol=1e-6, atol=1e-7)
    unscaled = layer.q_norm(layer.q_proj(states).unflatten(-1, (heads, 6))).transpose(1, 2)
    scale = scheme.query_scale(torch.arange(11)[None], heads).transpose(0, 1)[..., None] if floor else 1
    torch.testing.assert_close(unscaled * scale, caught["query"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("floor", [None, 4])
def test_a_patched_model_attends_as_inkling_does(floor):
    """Qwen 3 without rotation is Inkling's attention without convolutions, if a norm takes over its scaling of 1/d."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    qwen = Qwen3Config(**sizes, head_dim=6, vocab_size=97, intermediate_size=16, max_position_embeddings=32)
    model, layer = Qwen3ForCausalLM(qwen).double().eval(), their_attention(their_config(log_scaling_n_floor=floor))
    patch(model, Inkling(extent=7, rank=3, floor=floor))
    ours = model.model.layers[0].self_attn
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "k_norm"):
            getattr(ours, name).weight.copy_(getattr(layer, name).weight)
        ours.q_norm.weight.copy_(layer.q_norm.weight / math.sqrt(6))
        ours.rope_patch.r_proj.copy_(layer.r_proj.weight)
        ours.rope_patch.rel_logits_proj.copy_(layer.rel_logits_proj.proj)
    met = []
    ours.register_forward_hook(lambda _, args, kwargs, found: met.append((kwargs, found[0])), with_kwargs=True)
    model(tokens(20, rows=2), use_cache=False)
    ((kwargs, found),) = met
    expected, _ = layer(kwargs["hidden_states"], causal(20))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


# --- parameters ----------------------------------------------------------------------------------------------------


def test_it_starts_as_published_times_the_initial_scale():
    shape = ModelShape(40, 4, 500, 2, 50, 16, 4)
    published, small = (at_start(Inkling(initial_scale=scale), shape) for scale in (1.0, 0.01))
    assert all(abs(weight.std().item() - 0.02) < 1e-3 for weight in published.values())
    torch.testing.assert_close(small["rel_logits_proj"], 0.01 * published["rel_logits_proj"])
    assert torch.equal(small["r_proj"], published["r_proj"])


@pytest.mark.parametrize("start", [at_start, trained])
def test_gradients_are_those_of_finite_differences_and_leave_the_start(start):
    scheme, pairs = Inkling(4, 2, floor=3), make_pairs(range(6), range(6))
    weights, states = start(scheme), random(2, 6, SHAPE.hidden_size).requires_grad_()

    def bias(states, projection, profiles):
        learned = {"r_proj": projection, "rel_logits_proj": profiles}
        return scheme.content_bias(dataclasses.replace(pairs, states=states), learned)

    assert torch.autograd.gradcheck(bias, (states, weights["r_proj"], weights["rel_logits_proj"]))
    bias(states, *weights.values()).square().sum().backward()
    for weight in weights.values():
        assert weight.grad.abs().min() > 0


def test_half_precision_is_computed_with_in_float32():
    scheme, pairs = Inkling(4, 2, floor=3), make_pairs(range(9), range(9))
    pairs = dataclasses.replace(pairs, scores=pairs.scores.float(), states=pairs.states.bfloat16())
    narrow = {name: weight.detach().bfloat16() for name, weight in trained(scheme).items()}
    found = scheme.content_bias(pairs, narrow)
    assert found.dtype == torch.float32
    assert torch.equal(found, scheme.content_bias(pairs, {name: weight.float() for name, weight in narrow.items()}))


def test_without_a_floor_positions_are_relative():
    assert Inkling().methods == {"content_bias"}
    assert not Inkling().absolute
    assert Inkling(floor=4).absolute


@pytest.mark.parametrize(
    "fields", [{"extent": 0}, {"rank": 2.5}, {"scale": -0.1}, {"floor": 0}, {"floor": 2.5}, {"initial_scale": 0}]
)
def test_wrong_fields_are_named(fields):
    with pytest.raises(InvalidField, match=next(iter(fields))):
        Inkling(**fields)
