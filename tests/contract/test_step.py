"""A decoded token is looked at by one layer, and layers that see the same repeat its plan bit for bit."""

import gc
import weakref

import pytest
import torch
from transformers import DynamicCache

from rope_patch import CachedKeys, patch
from rope_patch.attention import decode
from rope_patch.mounting.step import Step
from tests.families import build
from tests.runs import assert_close, cached_logits, left_padded, tokens

SPECS = ["rerope:window=6", "dca:chunk_size=9,local_window=2", "alibi", "xpos:scale_base=8", "dynamic_ntk:factor=2"]
SPECS += ["rerope:window=6+logn:training_length=8", "dynamic_ntk:factor=2+dca:chunk_size=9,local_window=2"]
SIZES = [40, 1, 1, 1]


@pytest.fixture
def plans(monkeypatch):
    """One entry for each plan that is made."""
    made, attend = [], decode.attend
    monkeypatch.setattr(decode, "attend", lambda *args: made.append(1) or attend(*args))
    return made


def decoded(model, lengths):
    batch, mask = left_padded([tokens(length, seed=length) for length in lengths])
    return cached_logits(model, batch, SIZES, mask if len(lengths) > 1 else None)


@pytest.mark.parametrize("lengths", [(43,), (43, 30)], ids=str)
@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_layers_repeat_the_plan_of_the_first_bit_for_bit(spec, lengths, plans, monkeypatch):
    model = build("llama")
    with patch(model, spec):
        found = decoded(model, lengths)
        assert len(plans) == 3
        monkeypatch.setattr(Step, "followed_by", lambda *_: None)
        assert torch.equal(found, decoded(model, lengths))
    assert len(plans) == 3 + 3 * model.config.num_hidden_layers


@pytest.mark.parametrize("spec", ["fox", "t5:per_layer=true"])
@torch.no_grad()
def test_a_layer_with_sums_or_biases_of_its_own_makes_its_own_plan(spec, plans):
    model = build("llama")
    with patch(model, spec):
        decoded(model, (43,))
    assert len(plans) == 3 * model.config.num_hidden_layers


@pytest.mark.parametrize("spec", ["rerope:window=6", "alibi"])
@torch.no_grad()
def test_a_layer_that_keeps_other_keys_looks_for_itself(spec):
    found = []
    for attention in ("auto", "oracle"):
        model, cache = build("llama"), DynamicCache()
        with patch(model, spec, attention=attention):
            model(tokens(20), past_key_values=cache)
            second = cache.layers[1].keys
            positions = second.positions.clone()
            positions[:, :10] -= 3
            cache.layers[1].keys = CachedKeys.of(second.plain(), positions)
            found.append(model(tokens(1), past_key_values=cache).logits)
    assert_close(*found)


@torch.no_grad()
def test_a_model_does_not_keep_the_cache_of_its_last_forward():
    model, cache = build("llama"), DynamicCache()
    with patch(model, "rerope:window=6"):
        for length in (20, 1):
            model(tokens(length), past_key_values=cache)
        kept = [weakref.ref(cache), *(weakref.ref(layer.values) for layer in cache.layers)]
        del cache
        gc.collect()
        assert not any(reference() is not None for reference in kept)
