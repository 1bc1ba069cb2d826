"""Layers that are removed, moved, copied or added while a model is patched: what is left is right by its current
`layer_idx`, or an error says to unpatch first.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import DynamicCache, StaticCache, T5Config, T5ForConditionalGeneration

from rope_patch import PerLayer, UnsupportedModel, describe, from_pretrained, get_scheme, patch, unpatch
from tests.cases import ALL, CASES, ROUTES
from tests.families import build
from tests.runs import LENGTH, assert_close, cached_logits, generated, logits, tokens

NUMBERED = [spec for spec in ALL if get_scheme(spec).every_block]
KEPT = [CASES[name] for name in ("yarn", "rerope", "dynamic_ntk", "logn", "alibi", "cope", "fox", "rnn", "kerple")]


def deep(family: str = "llama", **changes) -> nn.Module:
    return build(family, num_hidden_layers=4, **changes)


def keep(model: nn.Module, *places: int) -> nn.Module:
    """Only these layers, in this order, numbered anew."""
    layers = model.model.layers
    model.model.layers = nn.ModuleList([layers[place] for place in places])
    model.config.num_hidden_layers = len(places)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[place] for place in places]
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    return model


def both(spec: str, *places: int, family: str = "llama") -> tuple[nn.Module, nn.Module]:
    """A model that was patched and cut, and one that was cut and patched, with the same weights."""
    one, other = deep(family), keep(deep(family), *places)
    patch(one, spec)
    keep(one, *places)
    patch(other, spec)
    other.load_state_dict(one.state_dict())
    return one, other


def assert_same(one: nn.Module, other: nn.Module) -> None:
    length = LENGTH if "dynamic" not in str(describe(one)) else 30
    ids = tokens(length, rows=2)
    assert torch.equal(logits(one, tokens()), logits(other, tokens()))
    assert torch.equal(
        cached_logits(one, ids, (20, 1, 1, length - 22)), cached_logits(other, ids, (20, 1, 1, length - 22))
    )
    assert torch.equal(generated(one, tokens(12), 6), generated(other, tokens(12), 6))
    assert torch.equal(generated(one, tokens(12), 4, num_beams=3), generated(other, tokens(12), 4, num_beams=3))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("spec", [spec for spec in ALL if spec not in NUMBERED])
def test_a_removed_layer(spec):
    one, other = both(spec, 0, 2, 3)
    assert_same(one, other)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("spec", KEPT)
@pytest.mark.parametrize("places", [(1, 2, 3), (3,), (3, 1, 0), (0, 1, 2)])
def test_other_cuts_and_orders(spec, places):
    assert_same(*both(spec, *places))


@pytest.mark.parametrize("family", ["mistral", "gemma3", "olmo2", "qwen3_5_text"])
@pytest.mark.parametrize("spec", ["yarn:factor=4", "rerope:window=6", CASES["fox"]])
def test_other_caches(family, spec):
    assert_same(*both(spec, 1, 3, family=family))


@pytest.mark.parametrize("spec", [spec for spec in KEPT if not spec.startswith(("rnn", "dynamic"))])
def test_a_static_cache(spec):
    one, other = both(spec, 0, 2, 3)
    found = []
    for model in (one, other):
        cache = StaticCache(config=model.config, max_cache_len=64)
        with torch.no_grad():
            found.append([model(ids, past_key_values=cache).logits for ids in (tokens(20), tokens(1), tokens(5))])
    for left, right in zip(*found, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("spec", KEPT)
def test_the_config_may_keep_its_number_of_layers(spec):
    one, other = both(spec, 0, 2, 3)
    one.config.num_hidden_layers = other.config.num_hidden_layers = 4
    assert_same(one, other)


@pytest.mark.parametrize("spec", [*ROUTES, CASES["cope"]])
def test_unpatch_restores_what_is_left(spec):
    model = deep()
    patch(model, spec)
    keep(model, 0, 2, 3)
    logits(model, tokens())
    unpatch(model)
    plain = keep(deep(), 0, 2, 3)
    assert_same(model, plain)
    patch(model, "rerope:window=6")
    patch(plain, "rerope:window=6")
    assert_same(model, plain)


@pytest.mark.parametrize("spec", [*ROUTES, CASES["cope"], CASES["kerple"]])
def test_a_cut_model_is_described_saved_and_loaded(spec, tmp_path):
    model = deep()
    patch(model, spec)
    keep(model, 0, 2, 3)
    assert str(describe(model))
    model.save_pretrained(tmp_path)
    assert_close(logits(from_pretrained(tmp_path), tokens()), logits(model, tokens()))


@pytest.mark.parametrize("scheme", [PerLayer({"0-1": "rerope:window=6", "rest": "logn:training_length=8"}), *NUMBERED])
@pytest.mark.parametrize("places", [(0, 2, 3), (0, 1, 2), (1, 0, 2, 3)])
def test_a_scheme_that_tells_layers_apart_by_number(scheme, places):
    model = deep()
    patch(model, scheme)
    logits(model, tokens())
    keep(model, *places)
    with pytest.raises(UnsupportedModel, match=r"layer . is not the one .* by their number; unpatch the model"):
        logits(model, tokens())
    unpatch(model)
    assert torch.equal(logits(model, tokens()), logits(keep(deep(), *places), tokens()))


@pytest.mark.parametrize("spec", [*ROUTES[1:], CASES["cope"], CASES["kerple"], CASES["floater"]])
def test_a_layer_that_came_later(spec):
    """A new one, or a copy of one that is there, as in depth up-scaling."""
    for make in (lambda model: deep().model.layers[0], lambda model: copy.deepcopy(model.model.layers[1])):
        model = deep()
        patch(model, spec)
        logits(model, tokens())
        model.model.layers.append(make(model))
        model.model.layers[4].self_attn.layer_idx = 4
        model.config.num_hidden_layers = 5
        with pytest.raises(UnsupportedModel, match=r"LlamaModel: layer 4 \(LlamaDecoderLayer\) came after the patch"):
            logits(model, tokens())
        with pytest.raises(UnsupportedModel, match="unpatch the model, change its layers, and patch it again"):
            generated(model, tokens())
        del model.model.layers[4]
        model.config.num_hidden_layers = 4
        logits(model, tokens())


@pytest.mark.parametrize("spec", [*ROUTES[1:], CASES["cope"], CASES["kerple"]])
def test_a_copy_outlives_the_patch_as_an_error(spec):
    model = deep()
    patch(model, spec)
    layer = copy.deepcopy(model.model.layers[1])
    assert sum(1 for _ in layer.modules()) < 20  # the stack was not copied with it
    unpatch(model)
    model.model.layers.append(layer)
    layer.self_attn.layer_idx = 4
    model.config.num_hidden_layers = 5
    with pytest.raises(UnsupportedModel, match=r"copied from .*layers.1.self_attn.*unpatch the model, copy its layers"):
        logits(model, tokens())
    with pytest.raises(UnsupportedModel, match=r"layers.4.self_attn: this layer was copied from a layer"):
        patch(model, spec)


def test_copied_layers_under_other_tables_alone():
    """A model of copied layers reads the tables of the scheme, and nothing of it is left after unpatch."""
    model, plain = deep(), deep()
    patch(model, "yarn:factor=4")
    for each in (model, plain):
        each.model.layers.append(copy.deepcopy(each.model.layers[0]))
        keep(each, 0, 1, 2, 3, 4)
    with patch(plain, "yarn:factor=4"):
        assert_same(model, plain)
    unpatch(model)
    assert_same(model, plain)
    patch(model, "abf:base=50000")
    patch(plain, "abf:base=50000")
    assert_same(model, plain)


@pytest.mark.parametrize("wrap", ["checkpoint", "compile"])
def test_wrapped_blocks_are_the_same_layers(wrap):
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args, **kwargs):
            return self.inner(*args, **kwargs)

    model = deep()
    patch(model, PerLayer({"0": "rerope:window=6", "rest": "kerple"}))
    expected = logits(model, tokens())
    for place, block in enumerate(model.model.layers):
        model.model.layers[place] = Wrapper(block) if wrap == "checkpoint" else torch.compile(block, backend="eager")
    assert_close(logits(model, tokens()), expected)


@pytest.mark.parametrize("spec", ["alibi", "rerope:window=6", CASES["shaw"]])
def test_a_decoder_of_t5(spec):
    def made() -> nn.Module:
        torch.manual_seed(0)
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_heads": 4}
        return T5ForConditionalGeneration(
            T5Config(vocab_size=97, num_layers=4, **sizes, decoder_start_token_id=0)
        ).eval()

    def cut(model: nn.Module) -> nn.Module:
        for stack in (model.encoder, model.decoder):
            del stack.block[2]
            for index, block in enumerate(stack.block):
                for inner in block.modules():
                    if getattr(inner, "layer_idx", None) is not None:
                        inner.layer_idx = index
        model.config.num_layers = model.config.num_decoder_layers = 3
        return model

    one, other = made(), cut(made())
    patch(one, spec)
    cut(one)
    patch(other, spec)
    other.load_state_dict(one.state_dict())
    for model in (one, other):
        model.generation_config.eos_token_id = None
    assert torch.equal(generated(one, tokens(), 8), generated(other, tokens(), 8))


def test_dropped_caches_do_not_grow():
    model = deep()
    patch(model, CASES["fox"])
    keep(model, 0, 2, 3)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(8), past_key_values=cache)
        model(tokens(8), past_key_values=cache)
    assert {layer.get_seq_length() for layer in cache.layers} <= {0, 16}
