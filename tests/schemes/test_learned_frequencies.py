"""Frequencies that each layer trains: where they start, where gradients go, and that no layer reads another's."""

import copy

import numpy as np
import pytest
import torch

from rope_patch import InvalidField, NotExpressible, export_rope_parameters, get_scheme, patch, plan_mounts
from rope_patch.attention import behind_cache
from rope_patch.attention.executors import chunked
from rope_patch.models.find_stacks import read_stack
from rope_patch.schemes.slots import ModelShape
from rope_patch.typing import RotarySpec
from tests.definition import Definition, defined_logits, learned_arrays
from tests.families import SCALED, build
from tests.runs import assert_close, assert_same_gradients, cached_logits, gradients, logits, tokens
from tests.schemes.test_longrope import LONG, SHORT, SPELLED
from tests.schemes.test_rope import DEFINITIONS

LONGROPE = f"{SPELLED},learned=true"
SPECS = [*(spec for spec in DEFINITIONS if "learned_rope" in spec), f"{LONGROPE},length=64", LONGROPE]
KEPT = Definition(learned_frequencies=lambda theta, learned: theta * np.exp(learned["log_speed"]))

each = pytest.mark.parametrize("spec", SPECS)


@pytest.fixture
def small_blocks(monkeypatch):
    """Let tiny texts take the ways that are meant for long ones."""
    monkeypatch.setattr(chunked, "SCORES_PER_BLOCK", 300)
    monkeypatch.setattr(behind_cache, "SMALL", 16)


def learned(model):
    return {name: value for name, value in model.named_parameters() if ".rope_patch." in name}


def only_frequencies(model):
    """The same model with all but its frequencies frozen, so that queries of the first layer want no gradient."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".rope_patch." in name)
    return model


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "glm4_moe_lite", *SCALED])
def test_it_starts_at_the_frequencies_of_the_checkpoint_bit_for_bit(family):
    model = build(family)
    ids = tokens()
    expected = logits(model, ids)
    pairs = read_stack(model).layers[0].spec.dim // 2
    with patch(model, "learned_rope") as handle:
        assert handle.plan.late
        assert not handle.plan.rotary
        assert {tuple(value.shape) for value in learned(model).values()} == {(pairs,)}
        assert torch.equal(logits(model, ids), expected)


@pytest.mark.parametrize("spec", ["yarn:factor=4", "dynamic_ntk:factor=2", "rerope:window=6"])
def test_beside_a_scheme_it_starts_at_its_frequencies(llama, spec):
    with patch(llama, spec, mount="late"):
        expected = logits(llama, tokens())
    with patch(llama, f"{spec}+learned_rope"):
        assert torch.equal(logits(llama, tokens()), expected)


@each
def test_they_stay_in_float32_and_train_in_every_layer(llama, spec):
    patch(llama.bfloat16(), spec)
    found = gradients(llama, tokens(), tokens(20))
    for name, value in learned(llama).items():
        assert value.dtype == torch.float32
        assert found[name].any()


@pytest.mark.one_in(3)
@each
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("mode", ["auto", "chunked", "segmented"])
@pytest.mark.usefixtures("small_blocks", "trained_parameters")
def test_gradients_equal_those_of_the_oracle(spec, frozen, mode):
    found = []
    for attention in ("oracle", mode):
        model = build()
        patch(model, spec, attention=attention)
        model = only_frequencies(model) if frozen else model
        found.append(gradients(model, tokens(rows=2), tokens(20)))
    assert found[0].keys() >= learned(model).keys()
    assert_same_gradients(found[1], found[0])


@pytest.mark.parametrize("pair", [0, 2, 5])
@pytest.mark.usefixtures("trained_parameters")
def test_a_gradient_is_the_slope_of_the_definition(llama, pair):
    """The definition computes in float64 throughout."""
    patch(llama, "learned_rope")
    ids, name = tokens(), "model.layers.0.self_attn.rope_patch.log_speed"

    def loss(step):
        arrays = learned_arrays(llama)
        arrays[name] = arrays[name] + step * (np.arange(8) == pair)
        found = defined_logits(build(), ids, KEPT, arrays)
        return torch.nn.functional.cross_entropy(found[0, :-1], ids[0, 1:])

    slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
    found = gradients(llama, ids)[name][pair]
    assert abs(slope) > 1e-4
    np.testing.assert_allclose(found, slope, rtol=2e-3)


@each
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.usefixtures("trained_parameters")
def test_gradient_checkpointing_gives_the_same_gradients(llama, spec, use_reentrant):
    patch(llama.train(), spec)
    texts = tokens(rows=2), tokens(27, seed=1)
    expected = gradients(llama, *texts)
    llama.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert_same_gradients(gradients(llama, *texts), expected)


@each
@pytest.mark.usefixtures("trained_parameters")
def test_a_single_token_after_a_cache_trains_them_too(llama, spec):
    patch(llama, spec)
    ids, slopes = tokens(), []
    for model in (only_frequencies(llama), copy.deepcopy(llama)):
        model.zero_grad()
        if model is llama:
            with torch.no_grad():
                cache = model(ids[:, :-1], use_cache=True).past_key_values
            model(ids[:, -1:], past_key_values=cache).logits.square().sum().backward()
        else:
            model(ids, use_cache=False).logits[:, -1].square().sum().backward()
        slopes.append({name: value.grad for name, value in learned(model).items() if ".1." in name})
    assert_same_gradients(*slopes)  # of the last layer: earlier tokens pass it by


@each
@pytest.mark.usefixtures("trained_parameters")
def test_a_step_of_training_is_seen_at_once(llama, spec):
    patch(llama, spec)
    before = logits(llama, tokens())
    with torch.no_grad():
        for value in learned(llama).values():
            value += 0.1
    after = logits(llama, tokens())
    assert (after - before).abs().max() > 1e-2
    if not get_scheme(spec).length_dependent:
        assert_close(cached_logits(llama, tokens(), [9, 1, 13, 2, 15]), after, 1e-4)


@pytest.mark.parametrize("rows", [[20, 40], [40]])
@pytest.mark.usefixtures("trained_parameters")
def test_a_text_trains_the_list_of_its_length(llama, rows):
    patch(llama, LONGROPE)
    found = gradients(llama, *(tokens(length) for length in rows))
    assert all(bool(found[name].any()) == (len(rows) == 2) for name in learned(llama) if name.endswith("short_factor"))
    assert all(found[name].any() for name in learned(llama) if name.endswith("long_factor"))


@pytest.mark.parametrize(("length", "name", "factors"), [(32, "short_factor", SHORT), (33, "long_factor", LONG)])
def test_factors_start_at_the_given_lists_and_only_those_that_are_used(length, name, factors):
    shape = ModelShape(4, 16, 64, 2, 97, 32, 16)
    found = get_scheme(f"{LONGROPE},length={length}").parameters(shape, torch.Generator())
    assert {key: tuple(value.tolist()) for key, value in found.items()} == {name: factors}
    both = get_scheme(LONGROPE).parameters(shape, torch.Generator())
    assert {key: tuple(value.tolist()) for key, value in both.items()} == {"short_factor": SHORT, "long_factor": LONG}


def test_equal_lists_may_part_in_training():
    scheme = get_scheme("longrope", short_factor=SHORT, long_factor=SHORT)
    assert not scheme.length_dependent
    assert get_scheme("longrope", short_factor=SHORT, long_factor=SHORT, learned=True).length_dependent


def test_without_learned_weights_they_are_as_they_start():
    rotary = RotarySpec(16, 10000.0, 32)
    for spec, plain in (("learned_rope", "rope"), (f"{LONGROPE},length=64", f"{SPELLED},length=64")):
        expected, found = (get_scheme(name).frequencies(rotary).inv_freq for name in (plain, spec))
        assert torch.equal(found, expected)


@each
def test_they_are_not_mounted_where_all_layers_read_one_table(llama, spec):
    plan = plan_mounts(get_scheme(spec), read_stack(llama))
    assert plan.late == (0, 1)
    assert not plan.rotary
    with pytest.raises(NotExpressible):
        export_rope_parameters(get_scheme(spec), llama.config)


def test_lists_of_the_wrong_length_are_named(llama):
    with pytest.raises(InvalidField, match="short_factor has 1 numbers; this checkpoint has 8 pairs"):
        patch(llama, "longrope:short_factor=[1],long_factor=[2],learned=true")
    with pytest.raises(InvalidField, match="learned=1 is not allowed"):
        get_scheme("longrope", short_factor=SHORT, long_factor=LONG, learned=1)


@pytest.mark.parametrize("spec", [SPECS[0], *(pytest.param(spec, marks=pytest.mark.nightly) for spec in SPECS[2:])])
@pytest.mark.usefixtures("trained_parameters")
def test_a_compiled_model_decodes_and_trains_as_an_eager_one(spec):
    llama = build(num_hidden_layers=1)
    patch(llama, spec)
    texts = tokens(rows=2), tokens(rows=2, seed=1)
    steps, expected = cached_logits(llama, tokens(), [37, 1, 1, 1]), gradients(llama, *texts)
    assert_close(cached_logits(torch.compile(llama, fullgraph=True, backend="eager"), tokens(), [37, 1, 1, 1]), steps)
    found = gradients(torch.compile(llama, backend="aot_eager"), *texts)
    assert_same_gradients({name.removeprefix("_orig_mod."): value for name, value in found.items()}, expected)
