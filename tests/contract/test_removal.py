"""What a patch changed is taken back bit for bit, and nothing else was touched."""

import copy
import gc

import pytest
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rope_patch import NotPatched, naming, patch, unpatch
from rope_patch.mounting.registration import IMPLEMENTATION
from tests.cases import ALL, REPRESENTATIVE, ROUTES
from tests.families import FOLLOWING, RUN, SCALED, TRAINING_LENGTH, build, config_of, from_config
from tests.runs import generated, logits, tokens
from tests.snapshots import snapshot

llama_and_scaled = pytest.mark.parametrize("family", ["llama", *SCALED])


def use(model: nn.Module) -> None:
    """Run a patched model in the ways that leave traces, if any does."""
    logits(model, tokens(2 * TRAINING_LENGTH))
    logits(model, tokens(rows=2))
    generated(model, tokens(8), 2)
    model(tokens(), labels=tokens()).loss.backward()
    model.zero_grad()


def assert_restored(model: nn.Module, *schemes: str, **options: str) -> None:
    before, config = snapshot(model), model.config
    handle = patch(model, *schemes, **options)
    use(model)
    assert unpatch(model) is handle
    assert model.config is config
    assert snapshot(model) == before
    with pytest.raises(NotPatched):
        handle.remove()


@pytest.mark.parametrize("spec", ALL)
@pytest.mark.parametrize("mount", ["auto", "late"])
def test_removal_restores_llama_bit_for_bit(llama, spec, mount):
    assert_restored(llama, spec, mount=mount)


@pytest.mark.parametrize("family", RUN)
@pytest.mark.parametrize("spec", REPRESENTATIVE)
def test_removal_restores_every_family_bit_for_bit(model, spec):
    assert_restored(model, spec)


@pytest.mark.parametrize("family", FOLLOWING)
@pytest.mark.parametrize("spec", REPRESENTATIVE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_removal_restores_what_a_long_text_before_has_left(model, spec, dtype):
    assert_restored(model.to(dtype), spec)
    logits(model, tokens(3 * TRAINING_LENGTH))
    assert_restored(model, spec)


@llama_and_scaled
@pytest.mark.parametrize("spec", ROUTES)
def test_the_context_manager_restores(model, spec):
    before = snapshot(model)
    with patch(model, spec) as handle:
        assert handle.model is model
        assert snapshot(model) != before
    assert snapshot(model) == before
    with pytest.raises(ZeroDivisionError), patch(model, spec):
        raise ZeroDivisionError
    assert snapshot(model) == before


def test_leaving_the_context_after_unpatch_is_harmless(llama):
    with patch(llama, "rerope:window=6"):
        unpatch(llama)


@llama_and_scaled
@pytest.mark.parametrize("spec", ROUTES)
def test_a_model_of_the_same_config_object_is_untouched(family, spec):
    config = config_of(family)
    one, other = from_config(config), from_config(config)
    before, said = snapshot(other), config.to_dict()
    with patch(one, spec):
        after = snapshot(other)
        assert config.to_dict() == said
        assert all(after[key] == before[key] for key in ("state_dict", "modules", "classes", "logits"))
        third = from_config(config)
        assert torch.equal(logits(third, tokens()), logits(other, tokens()))


def test_two_models_carry_two_schemes(llama):
    other = build()
    with patch(build(), "rerope:window=6") as alone:
        first = logits(alone.model, tokens())
    with patch(build(), "yarn:factor=4+alibi") as alone:
        second = logits(alone.model, tokens())
    with patch(llama, "rerope:window=6"), patch(other, "yarn:factor=4+alibi"):
        assert torch.equal(logits(llama, tokens()), first)
        assert torch.equal(logits(other, tokens()), second)


def test_the_attention_registry_is_clean_after_the_last_patch(llama):
    other = build()
    gc.collect()
    functions = dict(ALL_ATTENTION_FUNCTIONS)
    one, two = patch(llama, "rerope:window=6"), patch(other, "alibi")
    assert dict(ALL_ATTENTION_FUNCTIONS) != functions
    one.remove()
    logits(other, tokens())
    two.remove()
    assert dict(ALL_ATTENTION_FUNCTIONS) == functions


def test_a_patched_model_that_is_thrown_away_leaves_no_function_behind():
    patch(build(), "rerope:window=6")
    gc.collect()
    assert ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION] is naming.attention


@llama_and_scaled
@pytest.mark.parametrize("spec", ROUTES)
def test_a_copy_of_a_patched_model_is_a_model_of_its_own(model, spec):
    plain = logits(model, tokens())
    patch(model, spec)
    patched = logits(model, tokens())
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin, tokens()), patched)
    unpatch(model)
    assert torch.equal(logits(model, tokens()), plain)
    assert torch.equal(logits(twin, tokens()), patched)
    unpatch(twin)
    assert torch.equal(logits(twin, tokens()), plain)


@llama_and_scaled
@pytest.mark.parametrize("spec", ROUTES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_removal_after_a_change_of_dtype_gives_the_model_of_that_dtype(model, family, spec, dtype):
    patch(model, spec)
    model.to(dtype)
    logits(model, tokens())
    unpatch(model)
    assert torch.equal(logits(model, tokens()), logits(build(family).to(dtype), tokens()))


@pytest.mark.parametrize("spec", ROUTES)
def test_what_the_user_changed_meanwhile_outlives_the_patch(llama, spec):
    patch(llama, spec)
    llama.set_attn_implementation("eager")
    llama.config.use_cache = False
    unpatch(llama)
    assert llama.config._attn_implementation == "eager"
    assert llama.config.use_cache is False
    assert not hasattr(llama.config, "rope_patch")
