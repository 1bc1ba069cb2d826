"""Saving and loading: the scheme travels with the model, and plain Transformers still loads it."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch import (
    AlreadyPatched,
    InvalidField,
    NotExpressible,
    NotPatched,
    describe,
    export_rope_parameters,
    get_scheme,
    native_scheme,
    patch,
    repatch,
    unpatch,
)
from rope_patch.export import is_expressible
from rope_patch.models.reading import read_stack
from tests.cases import ALL, ROUTES
from tests.families import FAMILIES, SHARED_TABLES, build, config_of, from_config
from tests.runs import LENGTH, assert_close, logits, tokens

EXPRESSIBLE = [spec for spec in ALL if is_expressible(get_scheme(spec), config_of("llama"))]


def fits(scheme, model):
    """Whether a scheme with one number per pair has as many as this model turns."""
    stack = read_stack(model)
    try:
        return scheme.frequencies(stack.rotary[-1].spec(stack.training_length)) is not None
    except InvalidField:
        return False


def assert_round_trip(model, spec, folder):
    plain = logits(model, tokens())
    with patch(model, spec):
        expected = logits(model, tokens())
        model.save_pretrained(folder)
    loaded = rope_patch.from_pretrained(folder, attn_implementation=model.config._attn_implementation)
    assert torch.equal(logits(loaded, tokens()), expected)
    unpatch(loaded)
    assert torch.equal(logits(loaded, tokens()), plain)


@pytest.mark.parametrize("spec", ALL)
def test_a_saved_model_comes_back_under_its_scheme(llama, spec, tmp_path):
    assert_round_trip(llama, spec, tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", ROUTES)
def test_every_family_comes_back_under_its_scheme(model, spec, tmp_path):
    assert_round_trip(model, spec, tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", ROUTES)
def test_plain_transformers_loads_a_saved_model_and_repatch_restores_it(model, spec, tmp_path):
    plain = logits(model, tokens())
    with patch(model, spec):
        expected = logits(model, tokens())
        model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=model.config._attn_implementation)
    assert not any("rope_patch" in str(module) for module in loaded.modules())
    found = logits(loaded, tokens())
    said_natively = loaded.config.rope_parameters != model.config.rope_parameters
    assert_close(found, expected if said_natively else plain)
    repatch(loaded)
    assert_close(logits(loaded, tokens()), expected)
    with pytest.raises(AlreadyPatched):
        repatch(loaded)


def test_repatch_of_a_model_without_a_record_is_refused(llama):
    with pytest.raises(NotPatched, match="no `rope_patch`"):
        repatch(llama)


def test_from_pretrained_of_a_plain_checkpoint_is_plain(llama, tmp_path):
    llama.save_pretrained(tmp_path)
    loaded = rope_patch.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, tokens()), logits(llama, tokens()))
    with pytest.raises(NotPatched):
        unpatch(loaded)


def test_a_model_saved_after_unpatch_says_nothing_of_the_scheme(llama, tmp_path):
    llama.save_pretrained(tmp_path / "before")
    with patch(llama, "yarn", factor=4):
        logits(llama, tokens())
    llama.save_pretrained(tmp_path / "after")
    before, after = ((tmp_path / name / "config.json").read_text() for name in ("before", "after"))
    assert json.loads(before) == json.loads(after)


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - SHARED_TABLES))
@pytest.mark.parametrize("spec", EXPRESSIBLE)
def test_exported_parameters_make_plain_transformers_compute_the_scheme(family, spec):
    scheme, config = get_scheme(spec), config_of(family)
    if not is_expressible(scheme, config):
        # Phi-3's config accepts no other type than default and longrope; one type speaks of whole heads alone
        reasons = r"Phi3Config does not accept|Phi3Config reads|takes its share of the whole head|its positions are no"
        with pytest.raises(NotExpressible, match=reasons):
            export_rope_parameters(scheme, config)
        return
    if not fits(scheme, build(family)):
        return
    ids = tokens(LENGTH)
    exported = from_config(config_of(family, rope_parameters=export_rope_parameters(scheme, config)))
    with patch(build(family), scheme) as handle:
        assert_close(logits(exported, ids), logits(handle.model, ids))
    assert config.to_dict() == config_of(family).to_dict()


@pytest.mark.parametrize("spec", [spec for spec in ALL if spec not in EXPRESSIBLE])
def test_what_cannot_be_exported_says_why(spec):
    scheme = get_scheme(spec)
    with pytest.raises(NotExpressible) as caught:
        export_rope_parameters(scheme, config_of("llama"))
    assert any(part.name in str(caught.value) for part in scheme.parts())


@pytest.mark.parametrize("spec", ALL)
def test_describe_names_every_part_of_the_scheme(llama, spec):
    with patch(llama, spec):
        table = describe(llama)
    for part in get_scheme(spec).parts():
        assert part.equation in table
        assert part.source.link in table
    assert "LlamaForCausalLM" in table
    assert "32 tokens" in table


@pytest.mark.parametrize("family", FAMILIES)
def test_describe_of_a_plain_model_shows_its_native_scheme(model):
    table = describe(model)
    assert "not patched" in table
    assert str(native_scheme(model)) in table


def test_describe_shows_the_position_map_and_the_layers_left_alone():
    with patch(build("smollm3"), "rerope", window=6) as handle:
        table = describe(handle.model)
    assert "(128, 96): 6" in table
    assert "layers 1, 3: layer without positions" in table
    with patch(build(), "window", window=6) as handle:
        assert "(128, 96): hidden" in describe(handle.model)


@pytest.mark.parametrize("family", sorted(SHARED_TABLES))
def test_parameters_that_would_also_scale_sliding_layers_are_not_expressible(family):
    with pytest.raises(NotExpressible, match="one entry of rope_parameters for full and sliding-window layers"):
        export_rope_parameters(get_scheme("yarn:factor=4"), config_of(family))
