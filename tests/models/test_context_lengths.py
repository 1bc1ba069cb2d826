"""What L is on checkpoints that were extended before: the lengths that their makers publish, whatever the spelling."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rope_patch import (
    AlreadyPatched,
    InvalidField,
    RopePatchWarning,
    UnsupportedModel,
    describe,
    from_pretrained,
    get_scheme,
    native_scheme,
    patch,
    repatch,
    unpatch,
)
from rope_patch.cli import main
from rope_patch.doctor import diagnose, read_source
from rope_patch.errors import MissingField
from rope_patch.evaluation.measured_model import MeasuredModel
from rope_patch.evaluation.scheme_specs import schemes_at_lengths
from rope_patch.models.config import context_lengths
from rope_patch.models.find_stacks import read_stack
from rope_patch.mounting.longest_text import longest_text
from rope_patch.saving.export import describe_serving
from rope_patch.saving.loading import default_checkpoint, trained_length
from rope_patch.schemes.reach import spelled
from rope_patch.serving.factors import schemes_by_factor

_SIZES = {
    **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0},
}
_LISTS = {"short_factor": [1.0] * 8, "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0]}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LATENT = {
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 16, "v_head_dim": 16},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1},
}
_DEEPSEEK = {"type": "yarn", "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
_TWO_TYPES = {"layer_types": ["sliding_attention", "full_attention"]}


def _scaled(maximum, **scaling):
    return {"max_position_embeddings": maximum, "rope_theta": 500000.0, "rope_scaling": scaling}


CONFIGS = {
    # model type, values as published (of the sizes here), original length, length today
    "llama-3.1": ("llama", _scaled(131072, rope_type="llama3", factor=8.0, **_LLAMA3), 8192, 131072),
    "llama-3.2": ("llama", _scaled(131072, rope_type="llama3", factor=32.0, **_LLAMA3), 8192, 131072),
    "llama-3.1, maximum not raised": ("llama", _scaled(8192, rope_type="llama3", factor=8.0, **_LLAMA3), 8192, 65536),
    "gpt-oss": (
        "gpt_oss",
        {
            **{"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 128},
            **_scaled(131072, rope_type="yarn", factor=32.0, truncate=False, original_max_position_embeddings=4096),
        },
        4096,
        131072,
    ),
    "phi-3 128k": (
        "phi3",
        {**_scaled(131072, type="longrope", **_LISTS), "original_max_position_embeddings": 4096},
        4096,
        131072,
    ),
    "qwen2.5 as its page says": (
        "qwen2",
        _scaled(32768, type="yarn", factor=4.0, original_max_position_embeddings=32768),
        32768,
        131072,
    ),
    "qwen3 as its page says": (
        "qwen3",
        _scaled(40960, rope_type="yarn", factor=4.0, original_max_position_embeddings=32768),
        32768,
        131072,
    ),
    "qwen3, in the words of version 5": (
        "qwen3",
        {
            "max_position_embeddings": 40960,
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0},
                "original_max_position_embeddings": 32768,
            },
        },
        32768,
        131072,
    ),
    "gemma 3": (
        "gemma3_text",
        {**_scaled(131072, rope_type="linear", factor=8.0), "rope_local_base_freq": 1e4, **_TWO_TYPES},
        16384,
        131072,
    ),
    "gemma 3, nested": (
        "gemma3_text",
        {
            **_TWO_TYPES,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        16384,
        131072,
    ),
    "deepseek-v3": (
        "deepseek_v3",
        {**_LATENT, **_scaled(163840, **_DEEPSEEK, factor=40, mscale=1.0, mscale_all_dim=1.0)},
        4096,
        163840,
    ),
    "deepseek-v3, factor null": (
        "deepseek_v3",
        {**_LATENT, **_scaled(163840, **_DEEPSEEK, factor=None)},
        4096,
        163840,
    ),
    "minicpm4": (
        "llama",
        _scaled(32768, rope_type="longrope", original_max_position_embeddings=32768, **_LISTS),
        32768,
        32768,
    ),
    "olmo 3": (
        "olmo3",
        {
            **_scaled(65536, rope_type="yarn", factor=8.0, original_max_position_embeddings=8192),
            **{**_TWO_TYPES, "sliding_window": 4096},
        },
        8192,
        65536,
    ),
    "deepseek-coder": ("llama", _scaled(16384, type="linear", factor=4.0), 4096, 16384),
    "vicuna 1.5 16k": (
        "llama",
        {**_scaled(4096, type="linear", factor=4.0), "max_sequence_length": 16384},
        4096,
        16384,
    ),
    "internlm 2": ("llama", _scaled(32768, type="dynamic", factor=2.0), 32768, 32768),
    "ministral 3": (
        "ministral3",
        {
            "max_position_embeddings": 262144,
            "rope_parameters": {
                **{"rope_type": "yarn", "factor": 16.0, "rope_theta": 1e6, "llama_4_scaling_beta": 0.1},
                "original_max_position_embeddings": 16384,
            },
        },
        16384,
        262144,
    ),
    "llama 2": ("llama", {"max_position_embeddings": 4096}, 4096, 4096),
    "a length as a float": (
        "llama",
        _scaled(131072, rope_type="llama3", factor=8.0, **{**_LLAMA3, "original_max_position_embeddings": 8192.0}),
        8192,
        131072,
    ),
}
EXTENDED = [name for name, (_, _, original, today) in CONFIGS.items() if original < today]


def config_of(name):
    kind, values, *_ = CONFIGS[name]
    return AutoConfig.for_model(kind, **json.loads(json.dumps({**_SIZES, **values})))


def build(name):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(name)).eval()


def scheme_on(name, spec):
    """The scheme as it runs, and the warnings of its patch."""
    model = build(name)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        handle = patch(model, spec)
    return handle.plan.scheme, [str(each.message) for each in given if each.category is RopePatchWarning]


def fields_of(scheme, name):
    return next(part.fields() for part in scheme.parts() if part.name == name)


@pytest.mark.parametrize("name", CONFIGS)
def test_both_lengths_are_those_that_are_published(name):
    *_, original, today = CONFIGS[name]
    assert context_lengths(config_of(name)) == (original, today)
    stack = read_stack(build(name))
    assert (stack.training_length, stack.max_length) == (original, today)
    assert {layer.spec.training_length for layer in stack.layers} == {original}  # for frequencies


@pytest.mark.parametrize("name", CONFIGS)
def test_what_keeps_the_frequencies_counts_from_the_length_of_today(name):
    *_, today = CONFIGS[name]
    assert fields_of(scheme_on(name, "rerope:target=auto")[0], "rerope")["window"] == today // 2
    assert fields_of(scheme_on(name, "logn")[0], "logn")["training_length"] == today
    assert fields_of(scheme_on(name, "window")[0], "window")["window"] == today
    assert fields_of(scheme_on(name, "lm_infinite:target=auto")[0], "lm_infinite")["local_window"] == today
    dca = fields_of(scheme_on(name, "dca")[0], "dca")
    assert (dca["chunk_size"], dca["local_window"]) == (3 * today // 4, today // 8)
    group = fields_of(scheme_on(name, f"self_extend:target={2 * today}")[0], "self_extend")
    assert group == {"group_size": 3, "window": today // 2, "shift": "floor"}  # (L - L/2) G + L/2 >= 2 L
    mixture = scheme_on(name, "layers:[rest=rerope:target=auto+logn]")[0]
    assert f"window={today // 2}" in str(mixture)
    assert f"training_length={today}" in str(mixture)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_replaces_the_frequencies_counts_from_the_original_length(name):
    *_, original, today = CONFIGS[name]
    scheme, _ = scheme_on(name, f"yarn:target={2 * today}+logn")
    assert fields_of(scheme, "yarn")["factor"] == 2 * today / original
    assert fields_of(scheme, "logn")["training_length"] == original


@pytest.mark.parametrize("name", EXTENDED)
def test_a_scheme_that_shortens_the_checkpoint_says_so_and_what_to_write(name):
    *_, original, today = CONFIGS[name]
    for spec, reach in (("yarn:factor=1.5", 1.5 * original), (f"yarn:target={today // 2}", today // 2)):
        (said,) = scheme_on(name, spec)[1]
        assert f"already reads {today:,} tokens" in said
        assert f"reaches {round(reach):,}. For twice today's length: yarn:target={2 * today}" in said
    (said,) = scheme_on(name, "rope")[1]
    assert f"rope reaches {original:,}" in said
    (said,) = scheme_on(name, "abf:base=1000000")[1]
    assert "replaces that scaling" in said
    (said,) = scheme_on(name, "layers:[rest=yarn:factor=1.5]")[1]
    assert f"reaches {round(1.5 * original):,}" in said
    for spec in (f"yarn:target={2 * today}", "dynamic_yarn", "rerope:window=64", f"pi:target={2 * today}+logn"):
        assert scheme_on(name, spec)[1] == []


def test_the_sentence_as_a_user_of_llama_3_1_reads_it():
    (said,) = scheme_on("llama-3.1", "yarn:factor=2")[1]
    assert said.startswith(
        "this checkpoint already reads 131,072 tokens (llama3, factor 8); yarn:factor=2 reaches 16,384. For twice "
        "today's length: yarn:target=262144"
    )


@pytest.mark.parametrize("name", ["llama 2", "internlm 2", "minicpm4"])
def test_a_checkpoint_that_was_not_extended_gets_no_such_warning(name):
    assert scheme_on(name, "yarn:factor=2")[1] == []
    assert scheme_on(name, "abf:base=1000000")[1] == []


def test_frequencies_that_are_the_checkpoints_own_keep_its_length():
    own = "yarn:factor=4"  # what qwen's page says, typed again
    scheme, said = scheme_on("qwen2.5 as its page says", f"{own}+logn")
    assert fields_of(scheme, "logn")["training_length"] == 131072
    assert said == []


@pytest.mark.parametrize("name", EXTENDED)
def test_describe_shows_both_lengths_and_which_one_a_scheme_uses(name):
    *_, original, today = CONFIGS[name]
    model = build(name)
    assert f"{today} tokens today" in describe(model)
    assert f"{original} before that scaling" in describe(model)
    with patch(model, "logn"):
        assert f"{today} tokens: keeps the checkpoint's own frequencies" in describe(model)
    with patch(model, f"yarn:target={2 * today}"):
        assert f"{original} tokens: replaces the checkpoint's own frequencies" in describe(model)


def test_the_references_of_a_table_and_lengths_in_multiples_of_l_are_those_of_today(tmp_path):
    model = build("llama-3.1")
    measured = MeasuredModel(model)
    assert measured.training_length == 131072
    window, cut = schemes_at_lengths(["window", "cut"], [262144], measured)
    assert window.scheme.window == 131072
    assert cut.length == 131072
    model.config.save_pretrained(tmp_path)
    assert trained_length(str(tmp_path)) == 131072


def test_a_measured_line_that_shortens_the_checkpoint_says_so():
    with pytest.warns(RopePatchWarning, match="yarn:factor=2: this checkpoint already reads 131,072"):
        schemes_at_lengths(["yarn:factor=2"], [1024, 2048], MeasuredModel(build("llama-3.1")))


def test_where_one_entry_serves_layers_that_differ_the_record_says_which_run_the_scheme():
    model = build("gpt-oss")
    native = dict(model.config.rope_parameters)
    with patch(model, "yarn:factor=64"):
        assert model.config.rope_patch["scheme"]["factor"] == 64
        assert set(model.config.rope_patch["left_alone"]) == {"0"}
        assert model.config.rope_parameters == native  # still those of layer 0, and of a load without this library
    assert model.config.rope_parameters == native
    assert not hasattr(model.config, "rope_patch")


@pytest.mark.parametrize("first", ["yarn:factor=4", "pi:factor=4", "ntk:factor=4", "abf:base=1000000"])
def test_a_folder_that_transformers_scales_by_itself_is_not_scaled_again(tmp_path, first):
    model = AutoModelForCausalLM.from_pretrained(default_checkpoint())
    plain = model.model.rotary_emb.inv_freq.clone()
    patch(model, first)
    scaled = model.model.rotary_emb.inv_freq.clone()
    model.save_pretrained(tmp_path)
    for second in ("yarn:target=1024", "pi:target=1024", "self_extend:target=1024", "logn", first):
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
        with pytest.raises(AlreadyPatched, match=r"was saved under .* would scale it again.*repatch\(model\)"):
            patch(again, second)
        assert torch.equal(again.model.rotary_emb.inv_freq, scaled)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    repatch(again)
    assert torch.equal(again.model.rotary_emb.inv_freq, scaled)
    again = from_pretrained(tmp_path)
    unpatch(again)
    patch(again, "pi:target=1024")  # as the message has it
    torch.testing.assert_close(again.model.rotary_emb.inv_freq, plain / 4)


def test_a_folder_under_a_scheme_that_transformers_ignores_can_carry_another(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(default_checkpoint())
    patch(model, "rerope:window=64")
    model.save_pretrained(tmp_path)
    patch(AutoModelForCausalLM.from_pretrained(tmp_path), "self_extend:target=1024")


# --- values that Transformers computes with, though no new scheme may have them ---

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
COMPUTED = {
    "L as a float": {**_YARN, "original_max_position_embeddings": 256.0},
    "factor null": {**_YARN, "factor": None},
    "factor below 1": {**_YARN, "factor": 0.5},
    "mscale_all_dim 0": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.0},
    "mscale 0": {**_YARN, "mscale": 0},
    "mscale": {**_YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
    "attention_factor 0": {**_YARN, "attention_factor": 0.0},
    "ramp backwards": {**_YARN, "beta_fast": 1, "beta_slow": 32},
    "beta_fast 0": {**_YARN, "beta_fast": 0},
    "linear below 1": {"rope_type": "linear", "factor": 0.5},
    "dynamic below 1": {"rope_type": "dynamic", "factor": 0.5},
    "llama3, L as a float": {
        **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 256.0,
    },
    "llama3 below 1": {
        **{"rope_type": "llama3", "factor": 0.5, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 256,
    },
    "longrope, attention_factor 0": {
        **{"rope_type": "longrope", "attention_factor": 0.0, "original_max_position_embeddings": 256},
        **_LISTS,
    },
    "proportional below 1": {"rope_type": "proportional", "factor": 0.5, "partial_rotary_factor": 0.5},
}
NOTED = {
    **{
        "L as a float": "256.0 is a float",
        "factor null": "taken as 4",
        "mscale_all_dim 0": "mscale_all_dim=0.0 counts as",
    },
    **{"mscale 0": "mscale=0 counts as", "attention_factor 0": "cos and sin 0", "ramp backwards": "runs backwards"},
    **{"linear below 1": "factor=0.5 is below 1", "factor below 1": "factor=0.5 is below 1"},
}


def computed_config(name):
    values = {**_SIZES, "max_position_embeddings": 1024, "rope_theta": 10000.0, "rope_scaling": COMPUTED[name]}
    return AutoConfig.for_model("llama", **json.loads(json.dumps(values)))


@pytest.mark.parametrize("name", COMPUTED)
def test_odd_values_are_taken_as_transformers_takes_them(name):
    model = AutoModelForCausalLM.from_config(computed_config(name)).eval()
    rotary, stack = model.model.rotary_emb, read_stack(model)
    found = native_scheme(model).resolve(stack.checkpoint).frequencies_on(stack.layers[0].spec, torch.tensor([100]))
    np.testing.assert_allclose(found.inv_freq.flatten(), rotary.inv_freq, rtol=1e-6)
    assert float(torch.as_tensor(found.attention_scaling)) == pytest.approx(rotary.attention_scaling, rel=1e-6)
    ids = torch.randint(3, 60, (1, 40))
    plain = model(ids).logits
    for spec in ("logn", "rerope:window=2000", "window:window=2000"):  # nothing changes in so short a text
        with patch(model, spec):
            torch.testing.assert_close(model(ids).logits, plain, atol=1e-5, rtol=1e-5)
    assert torch.equal(model(ids).logits, plain)


@pytest.mark.parametrize("name", NOTED)
def test_doctor_says_what_transformers_makes_of_odd_values(tmp_path, name, capsys):
    computed_config(name).save_pretrained(tmp_path)
    assert any(NOTED[name] in note for note in diagnose(read_source(tmp_path), ["transformers"]).notes)
    main(["doctor", str(tmp_path), "--for", "transformers"])
    assert "note: " in capsys.readouterr().out


@pytest.mark.parametrize("factor", [0.0, -1.0, float("inf"), "four", [1.0]])
def test_a_factor_that_nobody_can_compute_is_named(factor):
    model = AutoModelForCausalLM.from_config(computed_config("linear below 1"))
    model.config.rope_parameters["factor"] = factor
    with pytest.raises(InvalidField, match="factor"):
        patch(model, "logn")


def test_export_refuses_a_scaling_that_it_does_not_know(tmp_path, capsys):
    values = json.loads((Path(default_checkpoint()) / "config.json").read_text())
    values["rope_scaling"] = {"rope_type": "spiral", "factor": 4.0}
    values.pop("rope_parameters", None)
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UnsupportedModel, match=r"rope_type='spiral' is not known here, so yarn:factor=4"):
        describe_serving(tmp_path, "yarn:factor=4")
    assert main(["export", str(tmp_path), "--scheme", "yarn:factor=4", "--output", str(tmp_path / "out")]) == 2
    assert "spiral" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_frequencies_are_not_derived_from_a_scaling_that_is_unknown(monkeypatch):
    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "spiral", ROPE_INIT_FUNCTIONS["linear"])
    config = AutoConfig.for_model("llama", **{**_SIZES, **_scaled(1024, rope_type="spiral", factor=4.0)})
    model = AutoModelForCausalLM.from_config(config)
    for spec in ("yarn:factor=4", "rope", "layers:[0=yarn:factor=4;rest=none]"):
        with pytest.raises(UnsupportedModel, match=r"rope_type='spiral' is not known here"):
            patch(model, spec)
    patch(model, "rerope:target=auto+logn")


def test_export_says_where_a_scheme_shortens_the_checkpoint(tmp_path, capsys):
    config_of("llama-3.1").save_pretrained(tmp_path)
    assert "reaches 16,384" in describe_serving(tmp_path, "yarn:factor=2").warning
    assert describe_serving(tmp_path, "yarn:target=262144").warning == ""
    assert describe_serving(tmp_path, "yarn:target=262144").length == 262144
    main(["export", str(tmp_path), "--scheme", "yarn:factor=2"])
    assert "already reads 131,072 tokens" in capsys.readouterr().err


def test_a_scheme_is_spelled_as_it_is_typed():
    for spec in ("yarn:factor=4", "rerope:window=128+logn", "yarn:target=8192", "layers:[rest=logn]", "dca"):
        assert spelled(get_scheme(spec)) == spec or spec.startswith("layers")


@pytest.mark.parametrize(
    ("spec", "longest"),
    [
        (None, 131072),
        ("rerope:target=auto", 4 * 131072),  # no limit of its own
        ("self_extend:target=262144", 131072 // 2 * 3 + 131072 // 2),  # (L - W) G + W
        ("yarn:factor=2", 16384),
        ("yarn:target=262144", 262144),
    ],
)
def test_a_server_announces_what_a_scheme_reaches_on_it(spec, longest):
    model = build("llama-3.1")
    checkpoint = read_stack(model).checkpoint
    handle = None if spec is None else patch(model, spec)
    assert longest_text(handle, checkpoint) == longest


def test_factors_for_requests_count_from_the_length_of_today():
    checkpoint = read_stack(build("llama-3.1")).checkpoint
    found = schemes_by_factor("self_extend:target=auto", [2, 4], [checkpoint])
    assert {factor: scheme.window for factor, scheme in found.items()} == {2: 65536, 4: 65536}
    assert schemes_by_factor("yarn:target=auto", [2], [checkpoint])[2].factor == 32


@pytest.mark.parametrize("name", EXTENDED)
def test_frequencies_that_reach_todays_length_exactly_shorten_nothing(name):
    *_, today = CONFIGS[name]
    assert not any("already reads" in said for said in scheme_on(name, f"ntk:target={today}")[1])


def test_longrope_by_name_alone_on_a_checkpoint_that_has_it():
    has_it = "this checkpoint has a longrope of its own, which needs no patch"
    with pytest.raises(MissingField, match=f"longrope needs short_factor, long_factor.*; {has_it}$"):
        patch(build("phi-3 128k"), "longrope")
    with pytest.raises(MissingField) as refused:
        patch(build("llama 2"), "longrope")
    assert "of its own" not in str(refused.value)


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "rope-scaling.md"
ON_THE_PAGE = {
    **{"Llama 3.1": "llama-3.1", "Llama 3.2": "llama-3.2", "gpt-oss": "gpt-oss", "Phi-3 128k": "phi-3 128k"},
    **{"Qwen2.5, with": "qwen2.5 as its page says", "Qwen3, with": "qwen3 as its page says", "Gemma 3": "gemma 3"},
    **{"DeepSeek-V3": "deepseek-v3", "OLMo 3": "olmo 3", "MiniCPM4": "minicpm4", "InternLM 2": "internlm 2"},
}


@pytest.mark.parametrize("start", ON_THE_PAGE)
def test_the_page_has_what_patch_does_on_each_checkpoint(start):
    name = ON_THE_PAGE[start]
    *_, original, today = CONFIGS[name]
    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {start}")]
    window = fields_of(scheme_on(name, "rerope:target=auto")[0], "rerope")["window"]
    factor = fields_of(scheme_on(name, "yarn:target=2x")[0], "yarn")["factor"]
    assert row.endswith(f"| {original:,} | {today:,} | window {window:,} | factor {factor:.0f} |")
    assert fields_of(scheme_on(name, "self_extend:target=2x")[0], "self_extend")["group_size"] == 3
