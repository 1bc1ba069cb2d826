"""Models on the meta device: they are patched before their weights come, and are then what they would have been."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from rope_patch import UnsupportedModel, native_scheme, patch, unpatch
from rope_patch.models.module_state import Refilling
from tests.cases import CASES
from tests.families import FAMILIES as ALL
from tests.families import build, config_of
from tests.runs import logits, tokens

SPECS = ["pi:factor=4", "yarn:factor=4", CASES["ntk"], "rerope:window=6", "alibi+logn", "dynamic_ntk:factor=4"]
COMMON = ["llama", "qwen3", "cohere", "gpt_neox", "phi3", "smollm3", "llama4_text", "llama_yarn", "llama_dynamic"]
FAMILIES = [family for family in [*COMMON, "baichuan", "baichuan_alibi"] if family in ALL]
"""Families without other buffers that no checkpoint brings, as Gemma's scale of its embeddings."""


def empty(family="llama", **changes):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(family, **changes)).eval()


def waits_for_weights(model):
    return any(isinstance(hook, Refilling) for hook in model.model.rotary_emb._forward_pre_hooks.values())


def tensors(model):
    return [*model.parameters(), *model.buffers()]


def assign(model, state):
    model.load_state_dict(state, assign=True)


def fill(model, state):
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in tensors(model):
            tensor.fill_(-7)  # new memory may hold anything
    model.load_state_dict(state)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("load", [assign, fill])
def test_a_scheme_may_come_before_the_weights(family, spec, load):
    loaded, model = build(family), empty(family)
    plain = logits(loaded, tokens())
    patch(model, spec)
    load(model, loaded.state_dict())
    with patch(loaded, spec):
        expected = logits(loaded, tokens())
    assert torch.equal(logits(model, tokens()), expected)
    assert torch.equal(logits(model, tokens()), expected)
    unpatch(model)
    assert torch.equal(logits(model, tokens()), plain)
    assert not any(tensor.is_meta for tensor in tensors(model))


@pytest.mark.parametrize("spec", ["yarn:factor=4", "rerope:window=6"])
@pytest.mark.parametrize("load", [assign, fill])
def test_weights_may_come_while_it_is_patched_and_be_used_after(spec, load):
    loaded, model = build(), empty()
    with patch(model, spec):
        load(model, loaded.state_dict())
    assert torch.equal(logits(model, tokens()), logits(loaded, tokens()))
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "llama_yarn"])
def test_a_model_that_stays_without_weights_is_restored_without_them(family, spec):
    model = empty(family)
    before, said = {id(tensor) for tensor in tensors(model)}, copy.deepcopy(vars(model.config))
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    patch(model, spec)
    assert all(weight.is_meta for weight in model.parameters())
    unpatch(model)
    assert all(tensor.is_meta for tensor in tensors(model))
    assert {id(tensor) for tensor in tensors(model)} == before
    assert vars(model.config) == said
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_default_device_does_not_matter():
    loaded = build()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of("llama")).eval()
        patch(model, "yarn", factor=4)
    assign(model, loaded.state_dict())
    with patch(loaded, "yarn", factor=4):
        assert torch.equal(logits(model, tokens()), logits(loaded, tokens()))


@pytest.mark.parametrize("spec", ["yarn:factor=4", "rerope:window=6", "shaw"])
def test_weights_without_tables_are_enough(spec):
    loaded, model = build(), empty()
    assign(model, loaded.state_dict())
    assert model.model.rotary_emb.inv_freq.is_meta
    with patch(loaded, spec), patch(model, spec):
        assert torch.equal(logits(model, tokens()), logits(loaded, tokens()))
    assert model.model.rotary_emb.inv_freq.is_meta


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision(dtype):
    loaded, model = build().to(dtype), empty(dtype=dtype)
    patch(model, "yarn", factor=4)
    assign(model, loaded.state_dict())
    model.to(dtype)  # with its tables, as the other
    with patch(loaded, "yarn", factor=4):
        assert torch.equal(logits(model, tokens()), logits(loaded, tokens()))


@pytest.mark.parametrize("load", [assign, fill])
def test_a_copy_is_a_model_of_its_own(load):
    loaded, model = build(), empty()
    patch(model, "yarn", factor=4)
    twin = copy.deepcopy(model)
    load(twin, loaded.state_dict())
    with patch(loaded, "yarn", factor=4):
        assert torch.equal(logits(twin, tokens()), logits(loaded, tokens()))
    assert waits_for_weights(model)
    assert not waits_for_weights(twin)
    assert all(weight.is_meta for weight in model.parameters())


@pytest.mark.parametrize("load", [assign, fill])
def test_its_first_forward_may_be_compiled_to_one_graph(load):
    loaded, model = build(num_hidden_layers=1), empty(num_hidden_layers=1)
    patch(model, "yarn", factor=4)
    load(model, loaded.state_dict())
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with patch(loaded, "yarn", factor=4):
        expected = logits(loaded, tokens())
    assert torch.equal(logits(compiled, tokens()), expected)
    assert torch.equal(logits(model, tokens()), expected)


def test_native_scheme_of_a_model_without_weights():
    assert native_scheme(empty()) == native_scheme(build())


# --- what is refused ------------------------------------------------------------------------------------------------


def refused(model, spec, said):
    before = {id(tensor) for tensor in tensors(model)}
    with pytest.raises(UnsupportedModel, match=said) as caught:
        patch(model, spec)
    assert "\n" not in str(caught.value)
    assert "meta" in str(caught.value)
    assert {id(tensor) for tensor in tensors(model)} == before


def test_what_learns_wants_to_know_where_it_will_stand():
    refused(empty(), "shaw", "has no weights yet .*load them before")


def test_tables_that_do_not_follow_from_the_config():
    model = empty()
    del model.model.rotary_emb.config
    refused(model, "yarn:factor=4", "LlamaRotaryEmbedding: its frequencies have no values yet .*load the model before")
    model = empty()
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq[:-1]
    refused(model, "yarn:factor=4", "LlamaRotaryEmbedding: its frequencies have no values yet .*other shapes")


def test_a_layer_that_cannot_be_tried_without_its_weights():
    model = empty()
    model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda module, args, states: states)
    refused(model, "rerope:window=6", "Linear has hooks.*load them before")
