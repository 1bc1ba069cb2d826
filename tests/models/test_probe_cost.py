"""What reading a model costs: each kind of layer is measured once, on a copy, without its weights; and what differs
is still found.
"""

import functools
import types

import peft
import pytest
import torch
from accelerate import cpu_offload, disk_offload
from accelerate.utils.offload import PrefixedDataset
from torch import nn
from transformers.models.cohere import modeling_cohere
from transformers.models.llama import modeling_llama

from rope_patch import UnsupportedModel, patch, unpatch
from rope_patch.models.find_stacks import read_stack, read_stacks
from rope_patch.models.module_state import ModuleState
from rope_patch.models.probe import measure_heads, measure_layout
from tests.families import RUN, build
from tests.models import t5_families
from tests.runs import logits, tokens
from tests.snapshots import snapshot
from tests.test_foreign import Int8

EIGHT = {"num_hidden_layers": 8}
LAYER_TYPES = {"layer_types": ["sliding_attention", "full_attention"] * 4}
KINDS = [
    ("llama", {}, 1),
    ("qwen3", {}, 1),
    ("baichuan", {}, 1),
    ("gemma3", LAYER_TYPES, 2),
    ("smollm3", {"no_rope_layers": [1, 1, 1, 0] * 2}, 2),
    ("deepseek_v3", {}, 1),
]
"""Family, changes of its config, and how many kinds of attention eight layers have."""


def attention_of(model):
    return [layer.module for stack in read_stacks(model) for layer in stack.layers]


@pytest.fixture
def measured(monkeypatch):
    """Lets the forwards of a class be counted, by the modules that they ran on."""

    def count(cls):
        ran, forward = [], cls.forward

        @functools.wraps(forward)
        def counting(self, *args, **kwargs):
            ran.append(self)
            return forward(self, *args, **kwargs)

        monkeypatch.setattr(cls, "forward", counting)
        return ran

    return count


@pytest.mark.parametrize("spec", ["yarn:factor=4", "rerope:window=6", "shaw"])
@pytest.mark.parametrize(("family", "changes", "kinds"), KINDS)
def test_each_kind_of_layer_is_run_once_and_no_layer_itself(measured, family, changes, kinds, spec):
    model = build(family, **{**EIGHT, **changes})
    ran = measured(type(attention_of(model)[0]))
    patch(model, spec)
    assert len(ran) == kinds
    assert not set(ran) & set(model.modules())
    unpatch(model)


def test_attention_of_t5_with_and_without_a_table_is_run_once(measured):
    model = t5_families.build(num_layers=6)
    ran = measured(type(attention_of(model)[0]))
    patch(model, "rerope", window=6)
    assert len(ran) == 2 * 2  # in the encoder and in the decoder
    assert not set(ran) & set(model.modules())


def test_packed_weights_are_of_one_kind_too(measured):
    model = build("llama", **EIGHT)
    for layer in model.model.layers:
        layer.self_attn.k_proj = Int8(layer.self_attn.k_proj)
    ran = measured(modeling_llama.LlamaAttention)
    patch(model, "rerope", window=6)
    assert len(ran) == 1


def test_layers_with_adapters_are_not_run_themselves(measured):
    model = build()
    ran = measured(modeling_llama.LlamaAttention)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    patch(adapted, "rerope", window=6)
    assert ran  # each of them: PEFT writes their paths into them
    assert not set(ran) & set(model.modules())


@pytest.mark.parametrize("family", RUN)
def test_no_weight_is_read(family):
    model = build(family)
    expected = [(layer.layout, layer.heads, layer.gets_positions, layer.normed) for layer in read_stack(model).layers]
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(torch.nan)
    assert [
        (layer.layout, layer.heads, layer.gets_positions, layer.normed) for layer in read_stack(model).layers
    ] == expected


@pytest.mark.parametrize("spec", ["yarn:factor=4", "rerope:window=6", "shaw"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_no_offloaded_weight_is_fetched(monkeypatch, tmp_path, family, where, spec):
    model, fetched, get = build(family), [], PrefixedDataset.__getitem__
    offload = functools.partial(disk_offload, offload_dir=tmp_path) if where == "disk" else cpu_offload
    offload(model, execution_device=torch.device("cpu"))

    def fetching(self, key):
        fetched.append(self.prefix + key)
        return get(self, key)

    monkeypatch.setattr(PrefixedDataset, "__getitem__", fetching)
    patch(model, spec)
    assert not fetched
    logits(model, tokens())
    assert fetched


@pytest.mark.parametrize("family", RUN)
def test_what_copies_tell_is_what_each_layer_does_itself(family):
    model = build(family)
    before = snapshot(model)
    stack = read_stack(model)
    for layer in stack.layers:
        if layer.rotary is None:
            assert layer.heads == measure_heads(layer.module)
        else:
            state = ModuleState(layer.rotary.module)
            itself = measure_layout(layer.name, layer.module, layer.rotary)
            state.restore()
            assert (layer.layout, layer.normed, layer.heads) == itself
    assert snapshot(model) == before


# --- layers that differ ---------------------------------------------------------------------------------------------


def attend(self, hidden_states, position_embeddings, attention_mask, turn):
    """Llama's attention with a rotation of ours, but for its last projection."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    states = (proj(hidden_states).view(shape).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
    query, key, value = states
    query, key = turn(query, key, *position_embeddings)
    function = modeling_llama.ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
    return function(self, query, key, value, attention_mask, scaling=self.scaling)


def neighbours(query, key, cos, sin):
    """Cohere's rotation by Llama's tables."""
    cos, sin = (table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1) for table in (cos, sin))
    return modeling_cohere.apply_rotary_pos_emb(query, key, cos, sin)


class Neighbours(modeling_llama.LlamaAttention):
    """Turns neighbours, as Cohere does."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        return attend(self, hidden_states, position_embeddings, attention_mask, neighbours)


class ByIndex(modeling_llama.LlamaAttention):
    """Turns neighbours in layer 2, known by its index alone."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        turn = neighbours if self.layer_idx == 2 else modeling_llama.apply_rotary_pos_emb
        return attend(self, hidden_states, position_embeddings, attention_mask, turn)


class Switched(modeling_llama.LlamaAttention):
    """Turns neighbours where a setting, a buffer or a weight of one number asks for it."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        turn = neighbours if bool(self.switch) else modeling_llama.apply_rotary_pos_emb
        return attend(self, hidden_states, position_embeddings, attention_mask, turn)


def by_class(layers):
    layers[2].self_attn.__class__ = Neighbours


def by_forward(layers):
    layers[2].self_attn.forward = types.MethodType(Neighbours.forward, layers[2].self_attn)


def by_index(layers):
    for layer in layers:
        layer.self_attn.__class__ = ByIndex


def by_switch(make):
    def change(layers):
        for index, layer in enumerate(layers):
            layer.self_attn.__class__ = Switched
            make(layer.self_attn, index == 2)

    return change


def by_buffer(module, on):
    module.register_buffer("switch", torch.tensor([on]))


def by_weight(module, on):
    module.switch = nn.Parameter(torch.tensor([float(on)]))


CHANGES = {
    "its class": by_class,
    "its forward": by_forward,
    "its index": by_index,
    "a setting": by_switch(lambda module, on: setattr(module, "switch", on)),
    "a buffer": by_switch(by_buffer),
    "a weight of one number": by_switch(by_weight),
    "a list": by_switch(lambda module, on: setattr(module, "switch", [1] if on else [])),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_layer_of_another_layout_is_found(what):
    model = build("llama", num_hidden_layers=4)
    CHANGES[what](model.model.layers)
    partners = [layer.layout.second[0] for layer in read_stack(model).layers]  # of the first dimension of a head
    assert partners == [8, 8, 1, 8]


class NormedAfter(modeling_llama.LlamaAttention):
    """Norms what it has turned, by weights that are all one as yet."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        def turn(query, key, cos, sin):
            query, key = modeling_llama.apply_rotary_pos_emb(query, key, cos, sin)
            return self.norm(query), self.norm(key)

        return attend(self, hidden_states, position_embeddings, attention_mask, turn)


class ScaledAfter(modeling_llama.LlamaAttention):
    """Weighs the dimensions of what it has turned."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        def turn(query, key, cos, sin):
            query, key = modeling_llama.apply_rotary_pos_emb(query, key, cos, sin)
            return self.norm.weight * query, self.norm.weight * key

        return attend(self, hidden_states, position_embeddings, attention_mask, turn)


@pytest.mark.parametrize(("cls", "said"), [(NormedAfter, "a norm"), (ScaledAfter, "a scale")])
def test_weights_after_the_rotation_of_one_layer_are_found(cls, said):
    model = build("llama", num_hidden_layers=4)
    module = model.model.layers[2].self_attn
    module.__class__, module.norm = cls, nn.RMSNorm(module.head_dim)
    if cls is ScaledAfter:
        nn.init.normal_(module.norm.weight)
    with pytest.raises(UnsupportedModel, match=rf"layers\.2\.self_attn.*{said}"):
        patch(model, "rerope", window=6)


def test_a_hook_of_one_layer_is_run(measured):
    model, seen = build("llama", num_hidden_layers=4), []
    projection = model.model.layers[2].self_attn.q_proj
    projection.register_forward_hook(lambda module, args, states: seen.append(module))
    ran = measured(modeling_llama.LlamaAttention)
    read_stack(model)
    assert seen == [projection]
    assert [module in set(model.modules()) for module in ran] == [False, True]


class Silent(modeling_llama.LlamaDecoderLayer):
    """Gives its attention no positions."""

    def forward(self, hidden_states, position_ids=None, **kwargs):
        return super().forward(hidden_states, position_ids=None, **kwargs)


def test_a_block_that_tells_no_positions_is_found():
    model = build("llama", num_hidden_layers=4)
    model.model.layers[2].__class__ = Silent
    assert [layer.gets_positions for layer in read_stack(model).layers] == [True, True, False, True]
