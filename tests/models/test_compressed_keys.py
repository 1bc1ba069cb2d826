"""DeepSeek V4: two thetas, a window beside compressed keys, and rotary modules inside layers that make these keys."""

import copy
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rope_patch import (
    NotExpressible,
    NothingToPatch,
    PerLayer,
    RopePatchWarning,
    UnsupportedModel,
    describe,
    explain,
    export_rope_parameters,
    from_pretrained,
    get_scheme,
    native_scheme,
    patch,
    unpatch,
)
from tests.families import from_config
from tests.runs import (
    assert_close,
    assert_same_gradients,
    cached_logits,
    generated,
    gradients,
    left_padded,
    logits,
    positions_of,
    tokens,
)
from tests.snapshots import snapshot

L = 32
THETA, COMPRESSED = 10000.0, 160000.0
RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
WIDTH = 8  # of 16 dimensions
CONFIG = {
    **{"model_type": "deepseek_v4", "vocab_size": 97, "hidden_size": 64, "moe_intermediate_size": 32},
    **{"num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16, "q_lora_rank": 24, "hc_mult": 2},
    **{"n_routed_experts": 4, "num_experts_per_tok": 4, "max_position_embeddings": L, "sliding_window": 16},
    **{"o_groups": 2, "o_lora_rank": 16, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 4},
    **{"partial_rotary_factor": WIDTH / 16, "compress_rates": RATES, "initializer_range": 0.2, "pad_token_id": 0},
    **{"bos_token_id": None, "eos_token_id": None, "num_hash_layers": 1},
    "layer_types": ["sliding_attention", *RATES, "compressed_sparse_attention"],
}

ENTRIES = {
    "pi:factor=4": {"rope_type": "linear", "factor": 4.0},
    "ntk:factor=4": {"rope_type": "default", "rope_theta": COMPRESSED * 4 ** (WIDTH / (WIDTH - 2))},
    "abf:base=500000": {"rope_type": "default", "rope_theta": 500000.0},
    "yarn:factor=4": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": L},
    "ntk_by_parts:factor=4": {
        **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": L, "attention_factor": 1.0},
    },
    "llama3:factor=4": {
        **{"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": L},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
    "longrope:factor=4,long_factor=[1,2,3,4],short_factor=[1,2,3,4]": {
        **{"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": L},
        **{"short_factor": [1.0, 2.0, 3.0, 4.0], "long_factor": [1.0, 2.0, 3.0, 4.0]},
    },
}
"""What a config says for the layers with compressed keys, as Transformers reads it."""

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 32, "beta_slow": 1}


def config_of(**changes):
    return AutoConfig.for_model(**copy.deepcopy({**CONFIG, **changes}))


def build(**changes):
    return from_config(config_of(**changes))


def with_entries(model, main=None, compress=None):
    """Plain Transformers with other entries; what they leave out is as in the model."""
    config = copy.deepcopy(model.config)
    own = config.rope_parameters
    kept = {name: {key: own[name][key] for key in ("rope_theta", "partial_rotary_factor")} for name in own}
    given = {"main": main, "compress": compress}
    config.rope_parameters = {name: kept[name] | given[name] if given[name] else own[name] for name in own}
    other = type(model)._from_config(config)
    other.load_state_dict(model.state_dict())
    return other.eval()


def rotary_modules(model):
    return {name: part for name, part in model.named_modules() if hasattr(part, "compress_inv_freq")}


def plain_frequencies(theta):
    return theta ** -(torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)


@pytest.mark.parametrize("spec", ENTRIES)
def test_static_frequencies_are_those_of_transformers(spec):
    model = build()
    try:
        expected = logits(with_entries(model, compress=ENTRIES[spec]), tokens())
    except UnboundLocalError:  # of Transformers 5.17
        pytest.skip("this version of Transformers has no longrope by layer type")
    plain = logits(model, tokens())
    assert (expected - plain).abs().max() > 0.1
    before = snapshot(model)
    with patch(model, spec) as handle:
        assert_close(logits(model, tokens()), expected)
        assert handle.plan.rotary == ("compress",)
        assert handle.plan.left_alone == {0: "sliding window of 16 within the training length of 32"}
        stated = model.config.rope_parameters
        assert stated == export_rope_parameters(handle.scheme, unpatched(model))
    assert snapshot(model) == before


def unpatched(model):
    config = copy.deepcopy(model.config)
    config.rope_parameters = config.rope_patch["rope_parameters"]
    config.max_position_embeddings = L
    del config.rope_patch
    return config


def test_every_module_turns_its_own_positions_by_its_own_theta():
    """Hidden positions: the compressed keys of a block stand at its first token."""
    model, calls = build(), []
    ids = tokens(24)
    patch(model, "pi:factor=4")

    def note(name):
        def hook(module, args, kwargs, tables):
            calls.append((name, kwargs["layer_type"], kwargs["position_ids"][0].double(), tables))

        return hook

    for name, module in rotary_modules(model).items():
        module.register_forward_hook(note(name), with_kwargs=True)
    logits(model, ids)
    assert len(rotary_modules(model)) == 6
    places = {name: [at.tolist() for each, _, at, _ in calls if each == name] for name in rotary_modules(model)}
    every, fours, eights = ([*map(float, range(0, 24, step))] for step in (1, 4, 8))
    assert places == {
        "model.layers.1.self_attn.compressor.rotary_emb": [fours],
        "model.layers.1.self_attn.compressor.indexer.rotary_emb": [fours, every],
        "model.layers.2.self_attn.compressor.rotary_emb": [eights],
        "model.layers.3.self_attn.compressor.rotary_emb": [fours],
        "model.layers.3.self_attn.compressor.indexer.rotary_emb": [fours, every],
        "model.rotary_emb": [every, every],
    }
    for _, kind, at, (cos, sin) in calls:
        angles = at[:, None] * (plain_frequencies(THETA) if kind == "main" else plain_frequencies(COMPRESSED) / 4)
        assert_close(cos[0].double(), angles.cos(), 1e-5)
        assert_close(sin[0].double(), angles.sin(), 1e-5)


def test_a_scheme_that_transformers_cannot_express_is_set_in_every_module():
    model, other = build(), build()
    scheme = "proportional:partial_rotary_factor=0.5,factor=4"
    frequencies = torch.cat([plain_frequencies(COMPRESSED)[:2] / 4, torch.zeros(2)]).float()
    for module in rotary_modules(other).values():
        module.compress_inv_freq.copy_(frequencies)
    with patch(model, scheme):
        assert_close(logits(model, tokens()), logits(other, tokens()))
        with pytest.raises(NotExpressible, match=r"rotates only 0\.5 of it"):
            export_rope_parameters(get_scheme(scheme), config_of())


def test_both_thetas_under_schemes_of_their_own():
    model = build()
    scheme = PerLayer({"sliding_attention": "pi:factor=2", "rest": "yarn:factor=4"})
    other = with_entries(model, {"rope_type": "linear", "factor": 2.0}, ENTRIES["yarn:factor=4"])
    with patch(model, scheme) as handle:
        assert handle.plan.rotary == ("main", "compress")
        assert_close(logits(model, tokens()), logits(other, tokens()))
        assert model.config.rope_parameters["main"]["factor"] == 2
    given = {"main": {"rope_type": "linear", "factor": 2.0}, "compress": ENTRIES["yarn:factor=4"]}
    with patch(model, given):
        assert_close(logits(model, tokens()), logits(other, tokens()))
    with patch(model, {"compress": ENTRIES["yarn:factor=4"]}):
        assert_close(logits(model, tokens()), logits(with_entries(model, None, ENTRIES["yarn:factor=4"]), tokens()))
    with patch(model, {"rope_type": "yarn", "factor": 4.0}):
        assert_close(logits(model, tokens()), logits(with_entries(model, None, ENTRIES["yarn:factor=4"]), tokens()))


def test_a_window_beyond_the_training_length_is_scaled_as_well():
    model = build(sliding_window=L + 8)
    entry = ENTRIES["pi:factor=4"]
    with patch(model, "pi:factor=4") as handle:
        assert handle.plan.rotary == ("main", "compress")
        assert_close(logits(model, tokens()), logits(with_entries(model, entry, entry), tokens()))
        assert model.config.rope_parameters["main"]["factor"] == 4


def test_layers_with_compressed_keys_alone():
    model = build(layer_types=[*RATES, *RATES])
    with patch(model, "pi:factor=4") as handle:
        assert not handle.plan.left_alone
        expected = with_entries(model, compress=ENTRIES["pi:factor=4"])
        assert_close(logits(model, tokens()), logits(expected, tokens()))
    with pytest.raises(NothingToPatch, match="sliding window of 16"):
        patch(build(layer_types=["sliding_attention"] * 4), "pi:factor=4")
    model = build(layer_types=["sliding_attention"] * 4)
    with patch(model, "layers:[rest=pi:factor=4]"):
        assert_close(logits(model, tokens()), logits(with_entries(model, ENTRIES["pi:factor=4"]), tokens()))


def test_a_checkpoint_with_its_own_scaling():
    """As published: `rope_scaling` belongs to the compressed keys, without a temperature."""
    model = build(rope_scaling=YARN)
    assert native_scheme(model) == get_scheme(
        "yarn", factor=4.0, attention_factor=1.0, original_max_position_embeddings=8, beta_fast=32, beta_slow=1
    )
    before = snapshot(model)
    with patch(model, "yarn:factor=8,attention_factor=1") as handle:
        assert (handle.stack.training_length, handle.stack.max_length) == (8, L)
        assert model.config.max_position_embeddings == 64
        expected = with_entries(model, None, {**YARN, "factor": 8.0, "attention_factor": 1.0})
        assert_close(logits(model, tokens()), logits(expected, tokens()))
    with patch(model, native_scheme(model)):
        assert_close(logits(model, tokens()), logits(with_entries(model), tokens()))
    assert snapshot(model) == before


def test_a_temperature_also_scales_values_and_the_user_is_told():
    model = build()
    with pytest.warns(RopePatchWarning, match=r"by 1\.139, by which DeepseekV4Model rotates its values, too"):
        handle = patch(model, "yarn:factor=4")
    assert all(layer.turns_values for layer in handle.stack.layers)
    assert "warning" in describe(model)
    handle.remove()
    for spec in ("yarn:factor=4,attention_factor=1", "pi:factor=4"):
        with patch(model, spec):
            assert "rotates its values" not in describe(model)


def test_a_temperature_of_the_checkpoint_is_no_news():
    entries = {"main": {"rope_type": "default", "rope_theta": THETA}, "compress": {**YARN, "rope_theta": COMPRESSED}}
    model = build(rope_parameters={name: {**entry, "partial_rotary_factor": 0.5} for name, entry in entries.items()})
    assert model.model.rotary_emb.compress_attention_scaling == pytest.approx(0.1 * math.log(4) + 1)
    with patch(model, native_scheme(model)):
        assert "rotates its values" not in describe(model)


@pytest.mark.parametrize(
    "spec", ["rerope:window=6", "alibi", "logn", "dynamic_ntk:factor=4", "self_extend:window=8,group_size=2"]
)
def test_what_scores_here_is_refused_in_one_line_that_names_the_reason(spec):
    model = build()
    before = snapshot(model)
    with pytest.raises(UnsupportedModel) as error:
        patch(model, spec)
    said = str(error.value)
    assert "DeepseekV4CSACompressor inside it rotates keys of its own; schemes of static frequencies" in said
    assert "\n" not in said
    assert snapshot(model) == before


def test_a_window_whose_values_rotate_is_refused():
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.self_attn here.*its values rotate with its keys"):
        patch(build(), "layers:[sliding_attention=rerope:window=6;rest=none]")
    with pytest.raises(UnsupportedModel, match="its values rotate with its keys"):
        patch(build(layer_types=["sliding_attention"] * 4, sliding_window=L + 8), "rerope:window=6")


def test_layers_of_one_theta_need_one_scheme():
    scheme = {"compressed_sparse_attention": "pi:factor=4", "rest": None}
    with pytest.raises(UnsupportedModel, match="give all layers of these tables one scheme of static frequencies"):
        patch(build(), PerLayer(scheme))


def test_other_frequencies_inside_a_layer_are_noticed():
    model = build()
    model.model.layers[2].self_attn.compressor.rotary_emb.compress_inv_freq.mul_(2)
    with pytest.raises(UnsupportedModel, match="has other frequencies than the stack's"):
        patch(model, "pi:factor=4")


@pytest.mark.parametrize("sizes", [(40,), (13, 15, *[1] * 12), (4, 36), [1] * 40])
def test_a_cache_gives_what_one_forward_gives(sizes):
    model = build(index_topk=40)  # a choice of some keys would jump where two scores of the indexer are 0
    expected = with_entries(model, compress=ENTRIES["pi:factor=4"])
    with patch(model, "pi:factor=4"):
        found = cached_logits(model, tokens(), sizes)
        assert_close(found, logits(model, tokens()), 1e-4)
        assert torch.equal(found, cached_logits(expected, tokens(), sizes))


def test_three_rows_with_left_pads_are_generated_as_by_transformers():
    model = build()
    other = with_entries(model, compress=ENTRIES["yarn:factor=4"])
    ids, mask = left_padded([tokens(28, seed=1), tokens(19, seed=2), tokens(11, seed=3)])
    inputs = {"attention_mask": mask, "position_ids": positions_of(mask)}
    right = {"attention_mask": mask.flip(1)}
    with patch(model, "yarn:factor=4"):
        assert_close(logits(model, ids, **inputs), logits(other, ids, **inputs))
        assert_close(logits(model, ids.flip(1), **right), logits(other, ids.flip(1), **right))
        assert torch.equal(
            generated(model, ids, 12, attention_mask=mask), generated(other, ids, 12, attention_mask=mask)
        )


def test_gradients_are_those_of_transformers():
    model = build()
    other = with_entries(model, compress=ENTRIES["yarn:factor=4"])
    with patch(model, "yarn:factor=4"):
        found, expected = gradients(model, tokens()), gradients(other, tokens())
    trained = {name for name, gradient in expected.items() if gradient is not None}
    assert_same_gradients({name: found[name] for name in trained}, {name: expected[name] for name in trained})
    assert trained == {name for name, gradient in found.items() if gradient is not None}


@pytest.mark.parametrize("spec", ["yarn:factor=4", "proportional:partial_rotary_factor=0.5,factor=4"])
def test_saved_and_loaded_again(spec, tmp_path):
    model = build()
    plain = logits(model, tokens())
    patch(model, spec)
    expected = logits(model, tokens())
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path)
    assert_close(logits(loaded, tokens()), expected)
    unpatch(loaded)
    assert_close(logits(loaded, tokens()), plain)
    if spec == "yarn:factor=4":
        assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path), tokens()), expected)


def test_a_folder_that_plain_transformers_loads_with_its_scheme(tmp_path):
    model = build()
    ids, mask = left_padded([tokens(28, seed=1), tokens(11, seed=3)])
    with patch(model, "proportional:partial_rotary_factor=0.5,factor=4"):
        model.save_pretrained(tmp_path)
        expected = logits(model, ids, attention_mask=mask)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="rope_patch")
    for _ in range(2):
        assert_close(logits(loaded, ids, attention_mask=mask), expected)


def test_exported_as_lists():
    model = build()
    lists = export_rope_parameters(get_scheme("yarn:factor=4"), model.config, as_lists=4 * L)
    assert lists["main"] == model.config.rope_parameters["main"]
    other = with_entries(model, compress=lists["compress"])
    with patch(model, "yarn:factor=4"):
        assert_close(logits(model, tokens()), logits(other, tokens()), 1e-4)


def test_a_cast_keeps_the_frequencies_of_every_module():
    model = build()
    expected = with_entries(model, compress=ENTRIES["yarn:factor=4"])
    with patch(model, "yarn:factor=4"):
        model.bfloat16()
        for name, module in rotary_modules(model).items():
            exact = expected.get_submodule(name).compress_inv_freq
            assert torch.equal(module.compress_inv_freq, exact), name
        assert logits(model, tokens()).isfinite().all()
    assert model.model.rotary_emb.compress_inv_freq.dtype == torch.bfloat16


def test_a_scheme_may_come_before_the_weights():
    loaded = build()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of()).eval()
    patch(model, "yarn:factor=4,attention_factor=1")
    model.load_state_dict(loaded.state_dict(), assign=True)
    with patch(loaded, "yarn:factor=4,attention_factor=1"):
        assert torch.equal(logits(model, tokens()), logits(loaded, tokens()))


def test_adapters_and_a_copy():
    model = build()
    expected = logits(with_entries(model, compress=ENTRIES["pi:factor=4"]), tokens())
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_b_proj"]))
    with patch(adapted, "pi:factor=4"):
        assert_close(logits(adapted, tokens()), expected)
        assert_close(logits(copy.deepcopy(adapted), tokens()), expected)


def test_a_compiled_model():
    model = build(num_hidden_layers=2, layer_types=["sliding_attention", "compressed_sparse_attention"])
    expected = logits(with_entries(model, compress=ENTRIES["pi:factor=4"]), tokens())
    with patch(model, "pi:factor=4"):
        assert_close(logits(torch.compile(model, backend="eager"), tokens()), expected, 1e-4)


def test_what_is_shown():
    model = build()
    assert "its values rotate with its keys" in describe(model)
    with patch(model, "pi:factor=4"):
        shown = describe(model)
        told = explain(model, tokens())
    third = plain_frequencies(COMPRESSED)[1] / 4
    assert f"1: {third:.4g}" in shown
    assert "layer 0: sliding window of 16 within the training length of 32" in shown
    assert "layers 1-3  eager: the model's own attention" in told


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3", "longrope"])
def test_the_oracle_reads_each_entry_alone(kind):
    """Transformers computes an entry from nothing but that entry and the sizes of the config."""
    entry = next(entry for entry in ENTRIES.values() if entry["rope_type"] == kind)
    model = with_entries(build(), compress=entry)
    found, _ = ROPE_INIT_FUNCTIONS[kind](model.config, layer_type="compress")
    assert torch.equal(found, model.model.layers[1].self_attn.compressor.indexer.rotary_emb.compress_inv_freq)
