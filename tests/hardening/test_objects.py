"""What Python, torch and accelerate do with models and schemes: copies, pickles, other dtypes, other devices."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules

from rope_patch import PatchHandle, RopePatchError, UnsupportedModel, errors, get_scheme, patch, unpatch
from rope_patch.attention import behind_cache
from rope_patch.attention.executors import chunked
from rope_patch.patching import find_handle
from tests.cases import ALL, CASES, COMPOSITIONS
from tests.families import build
from tests.hardening.scale import cases
from tests.hardening.situations import assert_same_weights, weights_of
from tests.models import absolute_families, t5_families
from tests.runs import assert_close, generated, gradients, logits, tokens

pytestmark = pytest.mark.usefixtures("trained_parameters")

ROUTES = [
    *(CASES[name] for name in ("yarn", "rerope", "alibi", "dynamic_ntk", "shaw", "t5", "kerple", "learned", "rnn")),
    "floater:width=16,blocks=true",
    "deberta:max_distance=12,absolute_layers=1,num_positions=700",
    *COMPOSITIONS[:1],
]
"""One of each way to be mounted, with and without learned parameters, of each layer and of all."""

routes = pytest.mark.parametrize("spec", ROUTES)
some_routes = pytest.mark.parametrize("spec", ROUTES[:: cases(usual=3, hard=1)])


@pytest.fixture
def text():
    return tokens(40)


# --- schemes and errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ALL)
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda scheme: pickle.loads(pickle.dumps(scheme))])
def test_a_copied_scheme_is_equal(spec, again):
    scheme = get_scheme(spec)
    other = again(scheme)
    assert other == scheme
    assert hash(other) == hash(scheme)
    assert str(other) == str(scheme)
    assert len({scheme, other}) == 1
    assert other.slots == scheme.slots


@pytest.mark.parametrize("spec", ALL)
def test_a_scheme_cannot_be_changed(spec):
    scheme = get_scheme(spec)
    for part in scheme.parts():
        with pytest.raises(AttributeError):
            part.name_of_nothing = 1


@pytest.mark.parametrize(
    "kind", [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RopePatchError)]
)
def test_errors_cross_processes(kind):
    error = kind("what is wrong")
    other = pickle.loads(pickle.dumps(error))
    assert type(other) is kind
    assert str(other) == str(error) == "what is wrong"


# --- copies of models ----------------------------------------------------------------------------------------------


@routes
@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copied_model_is_one_of_its_own(llama, text, spec, again):
    plain, before = logits(llama, text), weights_of(llama)
    handle = patch(llama, spec)
    twin = again(llama)
    expected = logits(llama, text)
    assert torch.equal(logits(twin, text), expected)
    assert find_handle(twin) is not handle
    assert find_handle(twin).model is twin
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    assert torch.equal(logits(llama, text), expected)
    unpatch(llama)
    assert torch.equal(logits(llama, text), plain)
    assert_same_weights(llama, before)
    changed = logits(twin, text)
    unpatch(twin)
    assert not torch.equal(logits(twin, text), changed)
    assert find_handle(twin) is None


@some_routes
def test_a_shallow_copy_shares_the_scheme(llama, text, spec):
    patch(llama, spec)
    expected = logits(llama, text)
    twin = copy.copy(llama)
    assert torch.equal(logits(twin, text), expected)
    plain = logits(build(), text)
    unpatch(llama)
    assert torch.equal(logits(llama, text), plain)
    assert torch.equal(logits(twin, text), plain)


@some_routes
def test_a_handle_travels_with_its_model(llama, spec, text):
    handle = patch(llama, spec)
    expected = logits(llama, text)
    other: PatchHandle = pickle.loads(pickle.dumps(handle))
    assert torch.equal(logits(other.model, text), expected)
    assert other.scheme == handle.scheme
    other.remove()
    assert torch.equal(logits(llama, text), expected)
    assert torch.equal(logits(other.model, text), logits(build(), text))


@routes
def test_a_state_dict_of_a_patched_model_fits_a_patched_model(llama, spec, text, tmp_path):
    patch(llama, spec)
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter.mul_(1.1)
    torch.save(llama.state_dict(), tmp_path / "weights.pt")
    other = build()
    patch(other, spec)
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert torch.equal(logits(other, text), logits(llama, text))
    ours = [name for name in llama.state_dict() if ".rope_patch." in name]
    assert bool(ours) == get_scheme(spec).learns
    plain = build()
    missing, unexpected = plain.load_state_dict(llama.state_dict(), strict=False)
    assert not missing
    assert sorted(unexpected) == sorted(ours)


# --- dtypes and devices --------------------------------------------------------------------------------------------


@some_routes
@pytest.mark.parametrize("there", ["half", "bfloat16", "double"])
def test_a_dtype_and_back(llama, spec, text, there):
    patch(llama, spec)
    getattr(llama, there)()
    found = logits(llama, text)
    assert found.isfinite().all()
    other = build()
    getattr(other, there)()
    patch(other, spec)
    scale = float(found.abs().max())
    assert_close(found.float(), logits(other, text).float(), 0.02 * scale if there != "double" else 1e-4 * scale)
    llama.float()
    unpatch(llama)
    plain = build()
    getattr(plain, there)()
    plain.float()
    for name, parameter in plain.named_parameters():
        assert torch.equal(llama.get_parameter(name), parameter)
    # tables that were set aside were never rounded
    assert_close(logits(llama, text), logits(plain, text), 0.02 * scale)


@routes
def test_a_model_without_weights_is_restored_without_weights(llama, spec):
    shapes = {name: tensor.shape for name, tensor in llama.state_dict().items()}
    patch(llama, spec)
    llama.to("meta")
    assert all(tensor.is_meta for tensor in llama.state_dict().values())
    unpatch(llama)
    assert {name: tensor.shape for name, tensor in llama.state_dict().items()} == shapes
    assert all(tensor.is_meta for tensor in [*llama.parameters(), *llama.buffers()])


def offloaded(model, how, folder):
    if how == "cpu":
        return cpu_offload(model, torch.device("cpu"))
    if how == "disk":
        return disk_offload(model, folder, torch.device("cpu"))
    places = {"model.embed_tokens": "disk", "model.layers.0": "cpu", "model.layers.1": "disk"}
    others = {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    if hasattr(model.model, "rope_patch"):
        others["model.rope_patch"] = "cpu"
    return dispatch_model(model, {**places, **others}, main_device="cpu", offload_dir=folder, force_hooks=True)


@some_routes
@pytest.mark.parametrize("how", ["cpu", "disk", "map"])
@pytest.mark.parametrize("first", ["patch", "offload"])
def test_offloaded_weights_are_fetched(llama, spec, text, tmp_path, how, first):
    with patch(llama, spec):
        expected = logits(llama, text)
    plain = logits(llama, text)
    if first == "patch":
        patch(llama, spec)
        offloaded(llama, how, tmp_path)
    else:
        offloaded(llama, how, tmp_path)
        patch(llama, spec)
    assert torch.equal(logits(llama, text), expected)
    assert generated(llama, text, 3).shape == (1, 3)
    unpatch(llama)
    assert torch.equal(logits(llama, text), plain)
    if how == "cpu":
        remove_hook_from_submodules(llama)


def test_offloaded_layers_have_biases_of_their_own(text, monkeypatch):
    """What one layer fetched may be freed before the next layer fetches its own, at the same place in memory."""
    monkeypatch.setattr(chunked, "SCORES_PER_BLOCK", 300)
    monkeypatch.setattr(behind_cache, "SMALL", 16)
    model = build(num_hidden_layers=8)
    patch(model, "t5:per_layer=true+logn")
    expected = logits(model, text)
    cpu_offload(model, torch.device("cpu"))
    for _ in range(5):
        assert torch.equal(logits(model, text), expected)


@pytest.mark.parametrize("spec", ["t5:interpolation=2", "rerope:window=6", "shaw"])
@pytest.mark.parametrize("first", ["patch", "offload"])
def test_an_offloaded_encoder_and_decoder(spec, first):
    model = t5_families.build()

    @torch.no_grad()
    def said():
        return model(input_ids=tokens(20), decoder_input_ids=tokens(12, seed=1), use_cache=False).logits

    plain = said()
    with patch(model, spec):
        expected = said()
    if first == "patch":
        patch(model, spec)
    cpu_offload(model, torch.device("cpu"))
    if first == "offload":
        patch(model, spec)
    assert torch.equal(said(), expected)
    unpatch(model)
    assert torch.equal(said(), plain)


def test_a_table_without_weights_is_restored_without_weights():
    model = absolute_families.build("bert")
    shape = absolute_families.table_of(model).weight.shape
    patch(model, "learned:extend=20")
    model.to("meta")
    unpatch(model)
    table = absolute_families.table_of(model)
    assert table.weight.is_meta
    assert table.weight.shape == shape


def test_a_table_that_was_offloaded_meanwhile_is_asked_back_first():
    model = absolute_families.build("bert")
    text = absolute_families.tokens(8)
    plain = absolute_families.outputs(model, text)
    patch(model, "learned:num_positions=20")
    changed = absolute_families.outputs(model, text)
    cpu_offload(model, torch.device("cpu"))
    with pytest.raises(UnsupportedModel, match="remove_hook_from_submodules"):
        unpatch(model)
    assert torch.equal(absolute_families.outputs(model, text), changed)
    remove_hook_from_submodules(model)
    unpatch(model)
    assert torch.equal(absolute_families.outputs(model, text), plain)


@some_routes
def test_training_mode_and_frozen_weights_are_left_as_they_are(llama, spec, text):
    llama.train().requires_grad_(False)
    llama.model.layers[0].mlp.gate_proj.weight.requires_grad_(True)
    with patch(llama, spec):
        assert llama.training
        assert "model.layers.0.mlp.gate_proj.weight" in gradients(llama, text)
    wanted = [name for name, parameter in llama.named_parameters() if parameter.requires_grad]
    assert wanted == ["model.layers.0.mlp.gate_proj.weight"]
    assert llama.training
