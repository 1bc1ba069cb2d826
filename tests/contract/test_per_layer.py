"""Mixtures of layers equal the layers of wholly patched copies, by every route through a cache."""

import contextlib
import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, T5Config, T5ForConditionalGeneration

from rope_patch import (
    Compose,
    InvalidField,
    LogN,
    NoPE,
    NotExpressible,
    NothingToPatch,
    NTKScaling,
    PerLayer,
    ReRoPE,
    RopePatchError,
    SlotConflict,
    UnsupportedPositions,
    YaRN,
    describe,
    export_rope_parameters,
    from_pretrained,
    get_scheme,
    patch,
    repatch,
)
from rope_patch.models.find_stacks import read_stack
from rope_patch.schemes import scheme_from_dict
from tests.families import build
from tests.runs import (
    assert_close,
    assert_same_gradients,
    cached_logits,
    generated,
    gradients,
    greedy,
    left_padded,
    logits,
    tokens,
)

MIXTURES = {
    "llama": [
        "layers:[0-1=nope+logn:training_length=8;rest=rerope:window=6]",
        "layers:[::2=yarn:factor=4;rest=none]",
        "layers:[0=alibi;1=kerple:initial_scale=1;2=ssmax;3=fox:horizon=4,initial_std=0.1]",
        "layers:[:2=dynamic_ntk:factor=2;rest=self_extend:group_size=4,window=7]+logn:training_length=8",
        "layers:[full_attention=ntk:factor=4]",
        "hwfa:every=2,window=9",
        "rnope_swa:every=2,window=9",
    ],
    "gemma3": [
        "yarn_full:factor=4",
        "layers:[full_attention=yarn:factor=4;sliding_attention=ntk:factor=2]",
        "layers:[full_attention=rerope:window=6+logn:training_length=8;rest=none]",
        "layers:[0=rerope:window=6;1-3=pi:factor=4]",
    ],
    "smollm3": ["layers:[1::2=logn:training_length=8;rest=rerope:window=6]", "yarn_full:factor=4"],
    "cohere2": ["layers:[full_attention=logn:training_length=8;rest=yarn:factor=4]"],
    "baichuan_alibi": ["layers:[0=rerope:window=6;rest=none]"],
}
CASES = [(family, spec) for family, specs in MIXTURES.items() for spec in specs]
ONE_EACH = [(family, specs[0]) for family, specs in MIXTURES.items()]


def four_layers(family):
    return build(family, num_hidden_layers=4) if family in ("llama", "baichuan_alibi") else build(family)


def schemes_of(model, spec):
    stack = read_stack(model)
    resolved = get_scheme(spec).resolve(stack.checkpoint)
    return resolved.of_layers({layer.index: layer.kind for layer in stack.layers}, len(stack.layers))


def mixed_by_hand(model, spec):
    """Layer by layer the attention of a copy that is wholly under the layer's scheme, or of the model as it is."""
    mixed = copy.deepcopy(model)
    for index, scheme in schemes_of(model, spec).items():
        if scheme is None:
            continue
        whole = copy.deepcopy(model)
        # where `patch` would leave layers of this kind alone, they are named
        asked = scheme if model.config.model_type == "llama" else PerLayer({str(index): scheme, "rest": None})
        with contextlib.suppress(NothingToPatch):
            patch(whole, asked, mount="late", attention="oracle")
            mixed.model.layers[index].self_attn = whole.model.layers[index].self_attn
    return mixed


@pytest.mark.parametrize(("family", "spec"), CASES)
def test_layers_are_those_of_copies_under_their_schemes(family, spec):
    model, ids = four_layers(family), tokens(rows=2)
    expected = logits(mixed_by_hand(model, spec), ids)
    before = logits(model, ids)
    with patch(model, spec):
        found = logits(model, ids)
        assert_close(found, expected, 1e-4)
    assert (found - before).abs().max() > 1e-3
    assert torch.equal(logits(model, ids), before)


@pytest.mark.parametrize(("family", "spec"), CASES)
def test_cached_and_padded_texts_are_the_full_ones(family, spec):
    model, ids = four_layers(family), tokens(30)
    with patch(model, spec):
        expected = logits(model, ids)
        assert_close(cached_logits(model, ids, [9, 1, 13, 2, 5]), expected, 1e-4)
        batch, mask = left_padded([ids, tokens(22, seed=1), tokens(25, seed=2)])
        found = cached_logits(model, batch, [24, 1, 5], mask)
        for row, length in enumerate((30, 22, 25)):
            assert_close(found[row : row + 1, -length:], logits(model, batch[row : row + 1, -length:]), 1e-4)


def test_cached_keys_of_static_layers_are_final_and_pads_make_no_mask_of_all_pairs():
    model, masks = four_layers("llama"), {}
    batch, mask = left_padded([tokens(30), tokens(22, seed=1)])
    patch(model, "layers:[::2=yarn:factor=4;rest=rerope:window=6]")

    def watch(module, _, kwargs):
        masks[module.layer_idx] = kwargs["attention_mask"]

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(watch, with_kwargs=True)
    cache = DynamicCache(config=model.config)
    model(batch, attention_mask=mask, past_key_values=cache)
    assert {tuple(given.shape) for given in masks.values()} == {(2, 30, 1, 1)}
    whole, rotated = four_layers("llama"), DynamicCache()
    patch(whole, "yarn:factor=4")
    whole(batch, attention_mask=mask, past_key_values=rotated)
    assert torch.equal(cache.layers[0].keys[0], rotated.layers[0].keys[0])
    assert torch.equal(cache.layers[0].keys[1, :, 8:], rotated.layers[0].keys[1, :, 8:])


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize(("family", "spec"), ONE_EACH)
def test_generation_is_greedy(family, spec, cache):
    model, ids = four_layers(family), tokens(12)
    with patch(model, spec):
        assert torch.equal(generated(model, ids, cache_implementation=cache), greedy(model, ids))


@pytest.mark.parametrize("spec", MIXTURES["llama"][:3])
def test_gradients_are_those_of_the_oracle(spec):
    found, expected = (build("llama", num_hidden_layers=4) for _ in range(2))
    patch(found, spec)
    patch(expected, spec, mount="late", attention="oracle")
    assert_same_gradients(gradients(found, tokens(rows=2)), gradients(expected, tokens(rows=2)))


@pytest.mark.parametrize(("family", "spec"), CASES)
def test_a_mixture_is_saved_and_loaded(family, spec, tmp_path):
    model, ids = four_layers(family), tokens()
    patch(model, spec)
    expected, asked = logits(model, ids), model.config.rope_patch["scheme"]
    assert scheme_from_dict(asked) == get_scheme(spec)
    assert get_scheme(str(get_scheme(spec))) == get_scheme(spec)
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, ids), expected)
    if family != "baichuan_alibi":
        plain = AutoModelForCausalLM.from_pretrained(tmp_path)
        repatch(plain)
        assert torch.equal(logits(plain, ids), expected)


def test_a_cache_belongs_to_all_layers_of_one_mixture():
    model, ids = build("llama", num_hidden_layers=4), tokens(9)
    cache = DynamicCache(config=model.config)
    with patch(model, MIXTURES["llama"][0]):
        model(ids, past_key_values=cache)
        model(ids, past_key_values=cache)
    for other in (MIXTURES["llama"][1], "nope+logn:training_length=8"):
        with patch(model, other), pytest.raises(UnsupportedPositions, match="layers:"):
            model(ids, past_key_values=cache)


def test_an_encoder_and_a_decoder_have_layers_of_their_own():
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 3, "vocab_size": 97}
    model = T5ForConditionalGeneration(
        T5Config(**sizes, n_positions=32, decoder_start_token_id=0, pad_token_id=0)
    ).eval()
    ids = tokens(20)
    with torch.no_grad():
        before = model(input_ids=ids, labels=ids).logits
        expected = None
        for mount, attention in (("late", "oracle"), ("auto", "auto")):
            with patch(model, "layers:[1=rerope:window=6;rest=none]", mount=mount, attention=attention) as handle:
                assert len(handle.mounted) == 2
                found = model(input_ids=ids, labels=ids).logits
                assert_close(found, found if expected is None else expected, 1e-4)
                expected = found
        assert (expected - before).abs().max() > 1e-3
        # layers that are left alone keep the biases that the first of them computes for all
        with patch(model, "layers:[1=t5:num_buckets=32,max_distance=128;rest=none]"):
            assert_close(model(input_ids=ids, labels=ids).logits, before, 1e-5)


def test_a_mixture_is_exported_where_entries_are_by_layer_type():
    model = four_layers("gemma3")
    config = copy.deepcopy(model.config)
    nested = export_rope_parameters(get_scheme("layers:[full_attention=yarn:factor=4;rest=ntk:factor=2]"), config)
    assert nested["full_attention"] == export_rope_parameters(YaRN(4), config)["full_attention"]
    assert nested["sliding_attention"]["rope_theta"] == pytest.approx(
        config.rope_parameters["sliding_attention"]["rope_theta"] * 2 ** (16 / 14)
    )
    only = export_rope_parameters(get_scheme("yarn_full:factor=4"), config)
    assert only == export_rope_parameters(YaRN(4), config)
    with pytest.raises(NotExpressible, match="layers of the type sliding_attention, which differ"):
        export_rope_parameters(PerLayer({"0": YaRN(4), "rest": None}), config)
    llama = build("llama").config
    assert export_rope_parameters(get_scheme("yarn_full:factor=4"), llama) == export_rope_parameters(YaRN(4), llama)
    with pytest.raises(NotExpressible, match="one entry of rope_parameters for all layers"):
        export_rope_parameters(PerLayer({"0": NTKScaling(4), "rest": None}), llama)
    # the config itself keeps what can be exported, so that plain Transformers computes the same
    ids = tokens()
    with patch(model, "layers:[full_attention=yarn:factor=4;rest=ntk:factor=2]"):
        assert model.config.rope_parameters == nested
        alike = AutoModelForCausalLM.from_config(model.config)
        alike.load_state_dict(model.state_dict())
        assert_close(logits(alike.eval(), ids), logits(model, ids))


def test_a_description_goes_by_layers():
    model = four_layers("gemma3")
    with patch(model, "layers:[full_attention=alibi+logn;0=ntk:factor=2;rest=none]") as handle:
        lines = describe(model).splitlines()
        words = [" ".join(line.split()) for line in lines]
        assert any(line.startswith("layers 1, 3 alibi:symmetric=False,learned=False+logn:") for line in words)
        assert any(line.startswith("layer 0 ntk:factor=2") for line in words)
        assert "left alone layer 2: selected as none" in words
        assert sum("replaced by the bias" in line for line in lines) == 1
        assert handle.plan.late == (0, 1, 3)


def test_a_composition_reaches_every_layer():
    both = Compose(PerLayer({"0": ReRoPE(6), "rest": None}), LogN(8))
    assert both.of_layers({0: "full_attention", 1: "full_attention"}, 2) == {0: Compose(ReRoPE(6), LogN(8)), 1: LogN(8)}
    with pytest.raises(SlotConflict, match="segments"):
        patch(build("llama"), PerLayer({"0": ReRoPE(6), "rest": None}), ReRoPE(7))
    with pytest.raises(SlotConflict, match="slopes"):
        patch(build("llama"), "layers:[0=alibi:learned=True;1=alibi:learned=True,symmetric=True]")
    assert get_scheme(str(both)) == both


def test_layers_that_do_not_attend_need_no_scheme():
    hybrid = {3: "full_attention", 7: "full_attention"}  # of eight layers
    assert PerLayer({"3::4": LogN(8)}).of_layers(hybrid, 8) == dict.fromkeys(hybrid, LogN(8))
    assert PerLayer({"0-3": NoPE(), "-1:": LogN(8)}).of_layers(hybrid, 8) == {3: NoPE(), 7: LogN(8)}
    with pytest.raises(InvalidField, match="'0-2' selects no attention layer; those are 3, 7"):
        PerLayer({"0-2": NoPE(), "rest": None}).of_layers(hybrid, 8)


WRONG = {
    "layers:[1::2=nope]": "layer 0 is not selected",
    "layers:[0=nope;0-1=logn]": "layer 0 is selected by '0' and '0-1'",
    "layers:[0-9=nope]": "'0-9' names layer 2; the stack has 2",
    "layers:[7:=nope;rest=none]": "'7:' selects no attention layer",
    "layers:[sliding=nope;rest=none]": "no layer of this model has the type 'sliding'",
    "layers:[0=nope;0=logn]": "selector '0' twice",
    "layers:[a b=nope]": "'a b' is not a selector",
    "layers:[::0=nope;rest=none]": "'::0' is not a selector",
    "layers:[rest=none]": "which changes nothing",
    "layers:[0]": "selector=scheme",
    "layers:0=nope": "layers has no field '0'",
    "layers": "needs layers",
    "layers:[0=rerope]": "rerope needs window",
    "layers:[0=hwfa;rest=none]": "itself a scheme by layer",
    "layers:[0=sinusoidal;rest=none]": "adds positions to the input",
    "hwfa:every=1": "every=1",
    "hwfa:ever=4": "hwfa has no field 'ever'",
    "yarn_full:foo=4": "yarn has no field 'foo'",
    "layres:[0=nope]": "did you mean 'layers'",
}


@pytest.mark.parametrize("spec", WRONG)
def test_what_is_wrong_with_a_mixture_is_named(spec):
    model, ids = build("llama"), tokens()
    before = logits(model, ids)
    with pytest.raises(RopePatchError, match="^" + ".*" + WRONG[spec].replace("(", r"\(").replace("*", r"\*")):
        patch(model, spec)
    assert torch.equal(logits(model, ids), before)


@pytest.mark.parametrize("given", [{}, {"0": 3}, {"0": []}, {True: NoPE()}, [NoPE()], {"0": NoPE(), 0: LogN()}])
def test_what_is_no_mixture_is_refused(given):
    with pytest.raises(InvalidField):
        PerLayer(given)


def test_yarn_changes_nothing_where_full_layers_do_not_rotate():
    with pytest.raises(NothingToPatch, match="layer without positions"):
        patch(build("cohere2"), "yarn_full:factor=4")


def test_a_target_reaches_into_layers():
    model = four_layers("gemma3")
    with patch(model, "layers:[full_attention=yarn:target=128;rest=none]") as handle:
        assert handle.scheme == PerLayer({"full_attention": YaRN(4.0), "rest": None})
