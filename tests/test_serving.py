"""Exported folders: plain Transformers computes from them what a patched model computes, bit for bit."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import rope_patch
from rope_patch.cli import main
from rope_patch.errors import AlreadyPatched, InvalidField, NotExpressible
from rope_patch.models.record import Record
from rope_patch.patching import find_handle
from rope_patch.saving.export import describe_serving, export_checkpoint
from rope_patch.saving.loading import default_checkpoint

TRAINING_LENGTH = 16
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": TRAINING_LENGTH,
}
LEFT_BY_TRAINERS = {
    *("optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth", "rng_state_0.pth"),
    *("trainer_state.json", "training_args.bin", "optimizer.bin"),
}
UNROUNDED = "yarn:factor=4,truncate=false,beta_fast=1,beta_slow=0.01"
"""Rounding the ends of its ramp makes a difference at L = 16 and d = 16."""

ONES = f"[{','.join(['1'] * 8)}]"
DOUBLES = f"[{','.join(['2.5'] * 8)}]"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serving") / "checkpoint"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    for name in LEFT_BY_TRAINERS:
        (folder / name).write_text("left by a trainer")
    (folder / "checkpoint-5").mkdir()
    return folder


def logits(model):
    ids = torch.arange(60).remainder(64)[None]
    with torch.no_grad():
        return model.eval()(ids).logits


def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    ("scheme", "length"),
    [
        ("pi:factor=4", None),
        ("ntk:factor=4", None),
        ("abf:base=500000", 64),
        ("yarn:factor=4", None),
        ("yarn:factor=2.5,attention_factor=1.2", None),
        ("yarn:factor=4,truncate=false", None),
        ("ntk_by_parts:factor=4", None),
        ("llama3:factor=8", None),
        (f"longrope:short_factor={ONES},long_factor={DOUBLES},factor=4", None),
    ],
)
def test_plain_transformers_computes_what_a_patched_model_computes(scheme, length, checkpoint, tmp_path):
    export_checkpoint(checkpoint, tmp_path / "out", scheme, length=length)
    with rope_patch.patch(patched := loaded(checkpoint), scheme):
        expected = logits(patched)
    assert torch.equal(logits(loaded(tmp_path / "out")), expected)
    assert not torch.equal(logits(loaded(checkpoint)), expected)
    assert torch.equal(logits(rope_patch.from_pretrained(tmp_path / "out")), expected), "patched twice"


def test_ntk_is_a_changed_base_and_a_longer_context(checkpoint):
    serving = describe_serving(checkpoint, "ntk:factor=4")
    base = 10000 * 4 ** (16 / 14)
    assert serving.config["rope_parameters"]["rope_type"] == "default"
    assert math.isclose(serving.config["rope_parameters"]["rope_theta"], base)
    assert math.isclose(serving.config["rope_theta"], base)
    assert serving.config["rope_scaling"] is None
    assert serving.config["max_position_embeddings"] == serving.length == 64


def test_older_readers_find_their_own_words(checkpoint):
    config = describe_serving(checkpoint, "yarn:factor=4").config
    scaling = config["rope_scaling"]
    assert scaling["type"] == scaling["rope_type"] == "yarn"
    assert scaling["factor"] == 4
    assert config["max_position_embeddings"] / scaling["original_max_position_embeddings"] == scaling["factor"]
    assert config["rope_theta"] == 10000


@pytest.mark.filterwarnings("ignore::rope_patch.RopePatchWarning")
def test_mlx_finds_the_share_of_pairs_where_it_reads_it(checkpoint):
    config = describe_serving(checkpoint, "proportional:partial_rotary_factor=0.5,factor=4", readers=["mlx"]).config
    assert config["rope_scaling"]["partial_rotary_factor"] == config["partial_rotary_factor"] == 0.5


def test_the_converter_of_llama_cpp_finds_the_length_of_llama3_where_it_looks(checkpoint):
    assert describe_serving(checkpoint, "llama3:factor=8").config["original_max_position_embeddings"] == TRAINING_LENGTH


def test_factors_by_pair_are_written_as_floats_however_they_were_typed(checkpoint):
    config = describe_serving(checkpoint, f"longrope:short_factor={ONES},long_factor={DOUBLES},factor=4").config
    assert all(type(factor) is float for factor in config["rope_parameters"]["short_factor"])


def test_all_that_is_not_positional_stays_in_the_config(checkpoint):
    before = json.loads((checkpoint / "config.json").read_text())
    serving = describe_serving(checkpoint, "yarn:factor=4")
    assert set(serving.changed) == {"rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings"}
    assert {key: serving.config[key] for key in before if key not in serving.changed} == {
        key: value for key, value in before.items() if key not in serving.changed
    }


@pytest.mark.parametrize("link", [False, True])
def test_files_are_taken_along_as_they_are(link, checkpoint, tmp_path):
    export_checkpoint(checkpoint, tmp_path / "new" / "out", "pi:factor=2", link=link)
    names = {file.name for file in (tmp_path / "new" / "out").iterdir()}
    kept = {file.name for file in checkpoint.iterdir()} - LEFT_BY_TRAINERS - {"checkpoint-5"}
    assert names == kept
    weights = tmp_path / "new" / "out" / "model.safetensors"
    assert weights.read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    assert weights.samefile(checkpoint / "model.safetensors") == link
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["out"], "something was left aside"


@pytest.mark.parametrize("link", [False, True])
def test_files_of_the_hubs_cache_are_files_in_the_export(link, checkpoint, tmp_path):
    """The cache has relative links, `snapshots/<commit>/<file>`, to `blobs/<hash>`."""
    repository = tmp_path / "hub" / "models--owner--name"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "0123abc"
    for folder in (blobs, snapshot):
        folder.mkdir(parents=True)
    for file in filter(lambda file: file.is_file(), checkpoint.iterdir()):
        (blobs / f"hash of {file.name}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/hash of {file.name}")
    export_checkpoint(snapshot, tmp_path / "deeper" / "down" / "out", "pi:factor=2", link=link)
    for file in (tmp_path / "deeper" / "down" / "out").iterdir():
        assert file.is_file(), file.name
        assert not file.is_symlink(), file.name
    weights = tmp_path / "deeper" / "down" / "out" / "model.safetensors"
    assert weights.read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    assert weights.samefile(blobs / "hash of model.safetensors") == link


def test_a_checkpoint_saved_under_a_scheme_is_exported_under_it(checkpoint, tmp_path):
    model = loaded(checkpoint)
    rope_patch.patch(model, "yarn", factor=4)
    expected = logits(model)
    model.save_pretrained(tmp_path / "saved")
    serving = export_checkpoint(tmp_path / "saved", tmp_path / "out")
    assert (serving.training_length, serving.length) == (TRAINING_LENGTH, 64)
    assert "rope_patch" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert torch.equal(logits(loaded(tmp_path / "out")), expected)
    with pytest.raises(AlreadyPatched, match=r"saved under yarn.*, not pi:factor=2"):
        describe_serving(tmp_path / "saved", "pi:factor=2")


def test_a_scheme_is_measured_from_what_was_trained_not_from_an_earlier_extension(tmp_path):
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}
    llama3["original_max_position_embeddings"] = TRAINING_LENGTH
    config = LlamaConfig(**{**SIZES, "max_position_embeddings": 128}, rope_parameters=llama3)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "extended")
    serving = export_checkpoint(tmp_path / "extended", tmp_path / "out", "yarn:factor=2")
    assert serving.length == 2 * TRAINING_LENGTH
    assert AutoConfig.from_pretrained(tmp_path / "out").rope_parameters["rope_type"] == "yarn"
    assert "original_max_position_embeddings" not in serving.config


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        ("rerope:window=8", "rerope fills segments"),
        ("yarn:factor=4+logn", "logn fills query_scale"),
        ("alibi", "alibi fills bias"),
        ("dynamic_yarn", "no yarn that follows the length"),
        ("dynamic_ntk", r"readers disagree.*ntk:factor=k with k = l / L"),
        ("dynamic_ntk:factor=2", "k = 2 l / L - 1"),
        ("abf:base=500000", "set a length in tokens"),
    ],
)
def test_what_cannot_be_said_is_refused_with_the_reason(scheme, reason, checkpoint, tmp_path):
    with pytest.raises(NotExpressible, match=reason):
        export_checkpoint(checkpoint, tmp_path / "out", scheme)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("length", [0, -3])
@pytest.mark.parametrize("scheme", ["yarn:factor=4", "mrrope:factor=4"])
def test_a_length_below_one_is_refused(scheme, length, checkpoint):
    with pytest.raises(NotExpressible, match=f"length={length} is not allowed"):
        describe_serving(checkpoint, scheme, length=length)


def test_a_length_that_would_change_the_factor_of_some_readers_is_refused(checkpoint):
    with pytest.raises(NotExpressible, match="must be factor times L, 64"):
        describe_serving(checkpoint, "yarn:factor=4", length=128)
    assert describe_serving(checkpoint, "ntk:factor=4", length=128).length == 128


def test_an_adapter_is_to_be_merged_first(checkpoint, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(NotExpressible, match="Merge it first"):
        describe_serving(tmp_path, "yarn:factor=4")


def test_a_checkpoint_with_code_of_its_own_is_refused(checkpoint, tmp_path):
    config = json.loads((checkpoint / "config.json").read_text()) | {"auto_map": {"AutoConfig": "configuration.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(NotExpressible, match="its own code"):
        describe_serving(tmp_path, "yarn:factor=4")


def test_nothing_is_overwritten(checkpoint, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="already exists"):
        export_checkpoint(checkpoint, tmp_path / "out", "yarn:factor=4")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    export_checkpoint(checkpoint, tmp_path / "empty", "yarn:factor=4")


def test_a_scheme_has_to_be_named_where_none_was_saved(checkpoint):
    with pytest.raises(NotExpressible, match="was not saved under a scheme"):
        describe_serving(checkpoint)


@pytest.mark.parametrize(
    ("scheme", "vllm", "llama_cpp"),
    [
        ("pi:factor=4", "yes", "yes"),
        ("ntk:factor=4", "yes", "yes"),
        ("yarn:factor=4", "yes", "yes"),
        ("llama3:factor=8", "yes", "yes"),
        ("ntk_by_parts:factor=4", "yes", "no"),
        (UNROUNDED, "yes", "no"),
        (f"longrope:short_factor={ONES},long_factor={DOUBLES},factor=4", "partly", "no"),
    ],
)
def test_each_reader_is_told_apart(scheme, vllm, llama_cpp, checkpoint):
    readers = {reader.name: reader for reader in describe_serving(checkpoint, scheme).readers}
    assert (readers["Transformers 5"].reads, readers["vLLM"].reads, readers["llama.cpp"].reads) == (
        "yes",
        vllm,
        llama_cpp,
    )
    assert all(reader.words for reader in readers.values())


@pytest.mark.parametrize(
    ("scheme", "reads"),
    [
        ("yarn:factor=4", "yes"),
        ("ntk:factor=4", "yes"),
        ("pi:factor=4", "no"),
        ("mrrope:factor=4", "no"),
        ("yarn:factor=4,attention_factor=1.3", "no"),
    ],
)
def test_servers_take_every_type_of_deepseek_for_yarn(scheme, reads, tmp_path):
    latent = {"q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    DeepseekV2ForCausalLM(DeepseekV2Config(**SIZES, **latent, first_k_dense_replace=2)).save_pretrained(tmp_path)
    readers = describe_serving(tmp_path, scheme, readers=["vllm", "sglang", "transformers"]).readers
    assert [reader.reads for reader in readers] == [reads, reads, "yes"]


def test_other_families_read_it_as_it_was_meant(tmp_path):
    Qwen2ForCausalLM(Qwen2Config(**SIZES)).save_pretrained(tmp_path / "qwen")
    serving = export_checkpoint(tmp_path / "qwen", tmp_path / "out", "llama3:factor=8")
    with rope_patch.patch(patched := loaded(tmp_path / "qwen"), "llama3", factor=8):
        assert torch.equal(logits(loaded(tmp_path / "out")), logits(patched))
    assert {reader.name: reader.reads for reader in serving.readers}["llama.cpp"] == "no"


def test_a_field_that_transformers_overlooks_in_nested_parameters_becomes_lists(tmp_path):
    layers = ["sliding_attention", "full_attention"]
    sizes = {**SIZES, "head_dim": 16, "sliding_window": 8, "layer_types": layers}
    Gemma3ForCausalLM(Gemma3TextConfig(**sizes)).save_pretrained(tmp_path / "gemma")
    unrounded = describe_serving(tmp_path / "gemma", "yarn:factor=4,truncate=false").config["rope_parameters"]
    assert unrounded["full_attention"]["rope_type"] == "longrope"
    serving = export_checkpoint(tmp_path / "gemma", tmp_path / "out", "yarn:factor=4")
    assert "rope_scaling" not in serving.config
    assert serving.config["rope_parameters"]["sliding_attention"]["rope_type"] == "default"
    with rope_patch.patch(patched := loaded(tmp_path / "gemma"), "yarn", factor=4):
        assert torch.equal(logits(loaded(tmp_path / "out")), logits(patched))


def test_the_command_says_what_it_would_write(checkpoint, tmp_path, capsys):

    words = ["export", str(checkpoint), "--scheme", "pi:factor=4", "--output", str(tmp_path / "out")]
    assert main([*words, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "L = 16, served up to 64 tokens" in " ".join(printed.split())
    assert "llama.cpp" in printed
    assert not (tmp_path / "out").exists()
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["readers"]["vLLM"]["reads"] == "yes"
    assert (tmp_path / "out" / "config.json").is_file()


LISTED = [
    "ntk_mixed:factor=4",
    "mrrope:factor=4",
    "clip",
    "fope_cut",
    "giraffe:cutoff_length=16",
    "yarn:factor=4+resonance",
    "proportional:partial_rotary_factor=0.5,factor=4",
    "yarn:factor=4,attention_factor=1.3",
    UNROUNDED,
    f"longrope:short_factor={DOUBLES},long_factor={DOUBLES},factor=4",  # as a search finds it
    f"longrope:short_factor={DOUBLES},long_factor={DOUBLES},factor=4,attention_factor=1.3",
]


@pytest.mark.filterwarnings("ignore::rope_patch.RopePatchWarning")
@pytest.mark.parametrize("scheme", LISTED)
def test_every_static_scheme_is_two_equal_lists(scheme, checkpoint, tmp_path):
    own = "mlx" if "truncate" in scheme else "sglang"  # vLLM reads these as they are
    asked = [own] if scheme.startswith("yarn:factor=4,") else ["vllm"]
    serving = export_checkpoint(checkpoint, tmp_path / "out", scheme, length=64, readers=asked)
    entry = serving.config["rope_parameters"]
    assert entry["rope_type"] == "longrope"
    assert entry["short_factor"] == entry["long_factor"]
    with rope_patch.patch(patched := loaded(checkpoint), scheme):
        expected = logits(patched)
        temperature = patched.model.rotary_emb.attention_scaling
    torch.testing.assert_close(logits(loaded(tmp_path / "out")), expected, rtol=0, atol=2e-6)
    assert entry["attention_factor"] == entry["short_mscale"] == entry["long_mscale"] == pytest.approx(temperature)
    # what readers compute that know neither attention_factor nor short_mscale
    trained = entry["original_max_position_embeddings"]
    assert math.sqrt(1 + math.log(64 / trained) / math.log(trained)) == pytest.approx(temperature, rel=5e-3)
    assert {reader.name: reader.reads for reader in serving.readers} == {serving.readers[0].name: "yes"}


def test_lists_that_differ_have_their_temperature_in_the_words_of_vllm(checkpoint):
    scheme = f"longrope:short_factor={ONES},long_factor={DOUBLES},factor=4,attention_factor=1.3"
    entry = describe_serving(checkpoint, scheme).config["rope_parameters"]
    assert (entry["attention_factor"], entry["short_mscale"], entry["long_mscale"]) == (1.3, 1.3, 1.3)


def test_lists_are_read_by_a_model_that_prefers_the_length_beside_them(tmp_path):
    torch.manual_seed(0)
    config = Phi3Config(**SIZES, original_max_position_embeddings=TRAINING_LENGTH, pad_token_id=0, eos_token_id=1)
    Phi3ForCausalLM(config).save_pretrained(tmp_path / "in")
    export_checkpoint(tmp_path / "in", tmp_path / "out", "mrrope:factor=4")
    with rope_patch.patch(patched := loaded(tmp_path / "in"), "mrrope:factor=4"):
        expected = logits(patched)
    torch.testing.assert_close(logits(loaded(tmp_path / "out")), expected, rtol=0, atol=2e-6)


def test_layers_of_different_types_get_lists_of_their_own(tmp_path):
    torch.manual_seed(0)
    sizes = SIZES | {"max_position_embeddings": 32, "num_hidden_layers": 4, "head_dim": 16}
    kinds = ["sliding_attention", "full_attention"] * 2
    Gemma3ForCausalLM(Gemma3TextConfig(**sizes, sliding_window=8, layer_types=kinds)).save_pretrained(tmp_path / "in")
    export_checkpoint(tmp_path / "in", tmp_path / "out", "mrrope:factor=4")
    written = json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"]
    assert (written["full_attention"]["rope_type"], written["sliding_attention"]["rope_type"]) == (
        "longrope",
        "default",
    )
    with rope_patch.patch(patched := loaded(tmp_path / "in"), "mrrope:factor=4"):
        expected = logits(patched)
    torch.testing.assert_close(logits(loaded(tmp_path / "out")), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("scheme", ["rerope:window=8", "dynamic_yarn", "xpos", "learned_rope", "logn"])
def test_lists_are_static_frequencies_and_nothing_else(scheme, checkpoint):
    with pytest.raises(NotExpressible):
        describe_serving(checkpoint, scheme, 64, readers=["vllm"])


@pytest.mark.parametrize("shard", ["1GB", "5KB"])
@pytest.mark.parametrize("scheme", ["learned_rope:per_layer=false", "yarn:factor=4+learned_rope:per_layer=false"])
def test_frequencies_that_all_layers_learned_are_lists(scheme, shard, checkpoint, tmp_path):
    model = loaded(checkpoint)
    rope_patch.patch(model, scheme)
    with torch.no_grad():
        model.model.rope_patch.log_speed.copy_(torch.linspace(0.3, -0.5, 8))
    expected = logits(model)
    model.save_pretrained(tmp_path / "trained", max_shard_size=shard)
    export_checkpoint(tmp_path / "trained", tmp_path / "out", length=64)
    plain, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), "other programs refuse parameters that they do not know"
    for file in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(file, "pt") as tensors, safe_open(tmp_path / "trained" / file.name, "pt") as before:
            assert tensors.metadata() == before.metadata() == {"format": "pt"}  # which older programs ask for
    torch.testing.assert_close(logits(plain), expected, rtol=0, atol=2e-6)
    assert not torch.allclose(logits(loaded(checkpoint)), expected, rtol=0, atol=1e-5)


def test_frequencies_that_layers_learned_apart_are_refused(checkpoint, tmp_path):
    model = loaded(checkpoint)
    rope_patch.patch(model, "learned_rope")
    with torch.no_grad():
        model.model.layers[1].self_attn.rope_patch.log_speed.add_(0.1)
    model.save_pretrained(tmp_path / "trained")
    with pytest.raises(NotExpressible, match=r"2 layers of .* trained frequencies of their own"):
        describe_serving(tmp_path / "trained", length=64)


def test_the_asked_readers_choose_the_form(checkpoint):
    def form(*readers):
        serving = describe_serving(checkpoint, UNROUNDED, readers=readers)
        return serving.config["rope_parameters"]["rope_type"], [reader.reads for reader in serving.readers]

    assert form("transformers", "vllm") == ("yarn", ["yes", "yes"])
    assert form("mlx", "vllm") == ("longrope", ["yes", "yes"])
    with pytest.raises(rope_patch.InvalidField, match="there is no reader 'vlm'; did you mean 'vllm'"):
        form("vlm")


def test_factors_for_requests_are_recorded_and_survive_loading_and_saving(tmp_path):
    words = ["export", default_checkpoint(), "--scheme", "yarn:target=auto", "--factors", "4,1,2"]
    main([*words, "--output", str(tmp_path / "many")])
    config = AutoConfig.from_pretrained(tmp_path / "many")
    factors = Record.read(config).per_request
    assert [(factor, scheme.factor) for factor, scheme in factors.items()] == [(1, 1), (2, 2), (4, 4)]
    model = rope_patch.from_pretrained(tmp_path / "many")
    assert find_handle(model).scheme.factor == 4
    model.save_pretrained(tmp_path / "again")
    assert AutoConfig.from_pretrained(tmp_path / "again").rope_patch["per_request"] == config.rope_patch["per_request"]
    main(["export", default_checkpoint(), "--scheme", "yarn:factor=4", "--output", str(tmp_path / "largest")])
    torch.testing.assert_close(logits(loaded(tmp_path / "many")), logits(loaded(tmp_path / "largest")), atol=0, rtol=0)


def test_factors_of_a_scheme_inside_attention_leave_the_config_to_the_checkpoint(tmp_path):
    words = ["export", default_checkpoint(), "--scheme", "self_extend:target=auto", "--factors", "1,4"]
    main([*words, "--output", str(tmp_path / "many")])
    config = AutoConfig.from_pretrained(tmp_path / "many")
    assert (config.rope_parameters["rope_type"], config.max_position_embeddings) == ("default", 1024)
    assert list(Record.read(config).per_request) == [1, 4]
    assert rope_patch.from_pretrained(tmp_path / "many").config.max_position_embeddings == 256


@pytest.mark.parametrize("by_factor", [[1, 2], {"x": {"name": "yarn", "factor": 2.0}}, {"0": {"name": "yarn"}}, 3])
def test_a_record_of_factors_that_means_nothing_is_refused(tmp_path, by_factor):
    words = ["export", default_checkpoint(), "--scheme", "yarn:target=auto", "--factors", "1,2"]
    main([*words, "--output", str(tmp_path / "many")])
    config = json.loads((tmp_path / "many" / "config.json").read_text())
    config["rope_patch"]["per_request"] = by_factor
    (tmp_path / "many" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidField, match="it must be a scheme for each factor"):
        rope_patch.from_pretrained(tmp_path / "many")
