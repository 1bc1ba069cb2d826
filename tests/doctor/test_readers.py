"""The table of readers: a row computes what the program's own functions gave, or its formulas, written down again."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rope_patch.doctor import READERS, Source, Unreadable, diagnose
from rope_patch.doctor.entries import ORIGINAL
from rope_patch.doctor.readers import BUGS
from rope_patch.doctor.versions import is_ordered, older

ROOT = Path(__file__).parents[2]
ROWS = [
    json.loads(row)
    for name in ("deviations", "more_readers")
    for row in (ROOT / f"docs/results/serving/{name}.jsonl").read_text().splitlines()
]
KEYS = {"mlx-lm": "mlx", "vLLM": "vllm", "Transformers": "transformers4", "Transformers 5": "transformers"}
LIMITED = {("vLLM 0.32.0", name) for name in ("yarn_original_missing", "yarn_factor_not_the_ratio", "qwen3_8b_yarn")}
"""Rows whose positions are right, though the reader takes no text that is long enough."""

HEAD, L, M = 64, 4096, 16384
SIZES = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "head_dim": HEAD, "max_position_embeddings": M}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": L}
LLAMA3 = {
    **YARN,
    **{"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
LISTS = {
    **YARN,
    **{"rope_type": "longrope", "short_factor": [1.0] * (HEAD // 2), "long_factor": [2.5] * (HEAD // 2)},
}
EQUAL = LISTS | {"short_factor": LISTS["long_factor"]}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
PART = {"rope_type": "proportional", "rope_theta": 10000.0, "factor": 4.0, "partial_rotary_factor": 0.5}
SECTIONS = {"mrope_section": [8, 12, 12]}
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN2_VL = {"model_type": "qwen2_vl_text"}
DEEPSEEK = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
PHI3 = {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": L}


def source(entry, both=True, **changes):
    """A config with this entry, in both spellings as an export writes it, or in that of Transformers 5 alone."""
    fields = {**SIZES, "rope_parameters": entry, **changes}
    if both:
        scaling = {key: value for key, value in entry.items() if key not in ("rope_theta", "partial_rotary_factor")}
        older = {"rope_theta": entry["rope_theta"], "rope_scaling": {"type": entry["rope_type"], **scaling}}
        fields = {**older, "partial_rotary_factor": entry.get("partial_rotary_factor", 1.0), **fields}
    return Source(Path("config.json"), fields, "config", fields)


def reading(reader, config):
    return diagnose(config, [reader]).readings[0]


def found(reader, config, kind="", length=1):
    """What a reader computes: frequencies, `(d/2,)`, and the factor on cos and sin."""
    rotations = reading(reader, config).rotations
    rotation = rotations.get(kind, next(iter(rotations.values())))
    return np.array(rotation.frequencies(length)), rotation.temperature()


# The formulas again, in numpy, from the papers and the programs' sources


def plain(base=10000.0, width=HEAD):
    return base ** (-np.arange(0, width, 2) / width)


def yarn(k=4.0, trained=L, base=10000.0, width=HEAD, fast=32.0, slow=1.0, rounded=True):
    low, high = (width * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (fast, slow))
    if rounded:
        low, high = math.floor(low), math.ceil(high)
    ramp = np.clip((np.arange(width // 2) - max(low, 0)) / (min(high, width - 1) - max(low, 0)), 0, 1)
    return plain(base, width) * (ramp / k + 1 - ramp)


def llama3(k=4.0, trained=L, low=1.0, high=4.0):
    turns = trained * plain() / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return plain() * (kept + (1 - kept) / k)


def g(k, m=1.0):
    return 0.1 * m * math.log(k) + 1


def lists_temperature(k=M / L, trained=L):
    return math.sqrt(1 + math.log(k) / math.log(trained))


AT_4 = g(4.0)
ONE_BASE = plain(10000.0 * (2 * 2 - 1) ** (HEAD / (HEAD - 2)))

COMPUTED = {
    # Transformers
    "transformers4==4.55.4": (YARN | {"factor": 2.0}, {}, yarn(4.0), AT_4),
    "transformers4==4.56.0": (YARN | {"factor": 2.0}, {}, yarn(2.0), g(2.0)),
    "transformers4": (EQUAL, {}, plain() / 2.5, lists_temperature(4.0, M)),
    # vLLM
    "vllm": (DYNAMIC, {}, plain(), 1.0),
    "vllm ": (
        DYNAMIC | {"max_trained_positions": M // 2},
        {},
        plain(10000.0 * (2 * 2 - 1) ** (HEAD / (HEAD - 2))),
        1.0,
    ),
    "vllm  ": (LISTS | {"attention_factor": 1.3}, {}, plain() / 2.5, lists_temperature()),
    "vllm   ": (LISTS | {"attention_factor": 1.3, "long_mscale": 1.3}, {}, plain() / 2.5, 1.3),
    "vllm    ": (YARN | {"attention_factor": 1.3}, DEEPSEEK, yarn(), AT_4),
    "vllm     ": (YARN | {"mscale": 0.7}, DEEPSEEK, yarn(), g(4.0, 0.7)),
    "vllm      ": (LINEAR | {"original_max_position_embeddings": L}, DEEPSEEK, yarn(), AT_4),
    "vllm       ": (YARN | {"rope_dim": 32}, {}, yarn(width=32), AT_4),
    "vllm        ": (PART, {}, np.where(np.arange(HEAD // 2) < HEAD // 4, plain(), 0), 1.0),
    # SGLang
    "sglang": (YARN | {"attention_factor": 1.3}, {}, yarn(), AT_4),
    "sglang ": (YARN | {"attn_factor": 1.1}, {}, yarn(), 1.1 * AT_4),
    "sglang  ": (YARN | {"mscale": 0.0, "mscale_all_dim": 0.5}, {}, yarn(), 1 / g(4.0, 0.5)),
    "sglang   ": (DYNAMIC, {}, ONE_BASE, 1.0),
    "sglang    ": (EQUAL | {"attention_factor": 1.3}, {}, plain() / 2.5, lists_temperature()),
    "sglang     ": (PART, {}, np.where(np.arange(HEAD // 2) < HEAD // 4, plain(), 0), 1.0),
    # llama.cpp
    "llama.cpp": (YARN | {"attention_factor": 1.3, "truncate": False}, {}, yarn(), AT_4),
    "llama.cpp ": (LLAMA3, {}, llama3(trained=8192), 1.0),
    "llama.cpp  ": (LLAMA3, {"original_max_position_embeddings": L}, llama3(), 1.0),
    "llama.cpp   ": (LLAMA3, QWEN2, plain(), 1.0),
    "llama.cpp    ": (YARN | {"factor": None}, {}, plain(), 1.0),
    "llama.cpp     ": (YARN | {"mscale": 0.7, "mscale_all_dim": 0.5}, DEEPSEEK, yarn(), 1.0),
    "llama.cpp      ": (PART, {}, plain(), 1.0),
    "llama.cpp       ": (LINEAR | {"partial_rotary_factor": 0.5}, {}, plain() / 4, 1.0),
    "llama.cpp        ": (DYNAMIC, {}, plain(), 1.0),
    # mlx-lm and mlx-vlm
    "mlx": (YARN | {"attention_factor": 1.3, "mscale": 0.7, "truncate": False}, {}, yarn(), g(4.0, 0.7)),
    "mlx ": (YARN, {"model_type": "phi"}, plain(), 1.0),
    "mlx  ": (EQUAL | {"attention_factor": 1.3, "factor": 2.0}, {}, plain() / 2.5, lists_temperature()),
    "mlx-vlm": (YARN | {"mscale_all_dim": 0.5}, {}, yarn(), AT_4 / g(4.0, 0.5)),
    "mlx-vlm ": (YARN | SECTIONS, QWEN2_VL, plain(), 1.0),
    "mlx-vlm  ": (LISTS | {"long_mscale": 1.3, "short_mscale": 1.3}, {}, plain(), 1.3),
    # ONNX Runtime GenAI
    "onnx": (YARN, {}, plain(), 1.0),
    "onnx ": (YARN | {"beta_fast": 32.0, "beta_slow": 1.0}, QWEN2, yarn(rounded=False), AT_4),
    "onnx  ": (YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.7}, QWEN2, yarn(rounded=False), 0.7),
    "onnx   ": (LISTS | {"type": "longrope", "attention_factor": 1.3}, PHI3, plain(), lists_temperature()),
    # exllamav3
    "exllamav3": (YARN | {"factor": 2.0}, {}, yarn(4.0), AT_4),
    "exllamav3 ": (YARN | {"mscale": 0.7, "mscale_all_dim": 0.5}, {}, yarn(), AT_4),
    "exllamav3==1.1": (YARN | {"mscale": 0.7, "mscale_all_dim": 0.5}, {}, yarn(), g(4.0, 0.7) / g(4.0, 0.5)),
    "exllamav3==0.0.40": (YARN | {"mscale": 0.7, "mscale_all_dim": 0.5}, {}, yarn(), AT_4),
    "exllamav3  ": (YARN | {"llama_4_scaling_beta": 0.1}, {}, yarn(), 1.0),
    "exllamav3   ": (LISTS | {"attention_factor": 1.3}, {}, plain() / 2.5, lists_temperature()),
    # LMDeploy
    "lmdeploy": (YARN | {"factor": 2.0}, {}, yarn(4.0), g(2.0)),
    "lmdeploy ": (YARN | SECTIONS, QWEN2_VL, plain(), 1.0),
    "lmdeploy  ": (LINEAR | {"partial_rotary_factor": 0.5}, {}, plain() / 4, 1.0),
    "lmdeploy-pytorch": (YARN | {"mscale_all_dim": 0.5}, {}, yarn(), AT_4 / g(4.0, 0.5)),
    # TensorRT-LLM
    "tensorrt-llm": (YARN | {"attention_factor": 1.3, "mscale": 0.7, "truncate": False}, {}, yarn(), g(4.0, 0.7)),
    "tensorrt-llm ": (DYNAMIC, {}, plain(), 1.0),
    "tensorrt-llm  ": (DYNAMIC | {"alpha": 3.0}, {}, ONE_BASE, 1.0),
    "tensorrt-llm   ": (LISTS | {"long_mscale": 1.3}, {}, plain() / 2.5, lists_temperature()),
    # Megatron-Core with its bridge
    "megatron": (LLAMA3 | {"low_freq_factor": 2.0}, {}, llama3(trained=8192), 1.0),
    "megatron ": (LLAMA3, QWEN2, plain(), 1.0),
    "megatron  ": (LINEAR, {}, plain() / 4, 1.0),
    "megatron   ": (YARN | {"attention_factor": 1.3}, {}, yarn(), AT_4),
    "megatron    ": (YARN | {"mscale": 0.7, "mscale_all_dim": 0.0}, {}, yarn(), g(4.0, 0.7)),
    "megatron     ": (
        YARN | {"original_max_position_embeddings": 2048, "beta_fast": 16.0, "attention_factor": 1.3},
        {"architectures": ["MistralForCausalLM"]},
        yarn(),
        AT_4,
    ),
    "megatron      ": (YARN | {"partial_rotary_factor": 0.5}, {}, yarn(), AT_4),
    # DeepSpeed
    "deepspeed": (
        {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
        {"hidden_size": 256, "num_attention_heads": 2},
        plain(5e5, 128),
        1.0,
    ),
    # Unsloth
    "unsloth": (DYNAMIC, {}, plain(), 1.0),
    "unsloth==2026.5.1": (LLAMA3, {}, plain(), 1.0),
    "unsloth ": (LLAMA3, {}, llama3(), 1.0),
}
"""By reader, with blanks for several: an entry, other fields, and the frequencies and factor of short texts."""


@pytest.mark.parametrize("reader", COMPUTED, ids=lambda reader: reader.replace(" ", "_"))
def test_a_row_computes_what_the_formulas_of_the_program_give(reader):
    entry, changes, frequencies, factor = COMPUTED[reader]
    got, temperature = found(reader.strip(), source(entry, **changes))
    np.testing.assert_allclose(got, frequencies, rtol=1e-12)
    assert temperature == pytest.approx(factor, rel=1e-12)


def test_lists_that_are_frozen_stay_those_of_short_texts():
    got, _ = found("unsloth", source(LISTS), length=M)
    np.testing.assert_allclose(got, plain(), rtol=1e-12)


NESTED = {
    "full_attention": LINEAR | {"rope_theta": 1e6},
    "sliding_attention": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 2.0},
}
GEMMA3 = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}
SIXTH = ["sliding_attention"] * 5 + ["full_attention"]
BY_LAYER = [
    ("vllm", SIXTH, plain(1e6) / 4, plain(20000.0) / 2),
    ("llama.cpp", SIXTH, plain(1e6) / 4, plain(20000.0)),
    ("mlx", SIXTH, plain(1e6), plain()),
    ("mlx", SIXTH[::-1], plain(), plain()),
    ("exllamav3", SIXTH, plain(1e6), plain()),
]


@pytest.mark.parametrize(("reader", "kinds", "full", "sliding"), BY_LAYER)
def test_parameters_by_layer_type(reader, kinds, full, sliding):
    config = source(NESTED, both=False, layer_types=kinds, **GEMMA3)
    np.testing.assert_allclose(found(reader, config, "full_attention")[0], full, rtol=1e-12)
    np.testing.assert_allclose(found(reader, config, "sliding_attention")[0], sliding, rtol=1e-12)


@pytest.mark.parametrize("reader", ["sglang", "lmdeploy", "lmdeploy-pytorch", "mlx-vlm"])
def test_code_by_layer_type_that_nobody_looked_at_is_not_called_right(reader):
    nested = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    found = reading(reader, source(nested, both=False, **GEMMA3))
    assert found.verdict != "agrees"


def test_the_yardstick_rounds_ramps_that_are_nested():
    nested = {"full_attention": YARN | {"truncate": False}, "sliding_attention": YARN}
    got, _ = found("transformers", source(nested, both=False, **GEMMA3), "full_attention")
    np.testing.assert_allclose(got, yarn(), rtol=1e-12)


REFUSED = [
    ("transformers4", PART, {}, "KeyError"),
    ("transformers4", {key: LLAMA3[key] for key in LLAMA3 if not key.startswith("orig")}, {}, "KeyError"),
    ("vllm", LINEAR | {"factor": 4}, {}, "integer"),
    ("vllm", LINEAR | {"type": "yarn"}, {}, "type and rope_type differ"),
    ("vllm", YARN, {"architectures": ["GptOssForCausalLM"]}, "beta_fast"),
    ("vllm", LINEAR, DEEPSEEK, "KeyError"),
    ("mlx-vlm", DYNAMIC, {}, "ValueError"),
    ("mlx", {key: EQUAL[key] for key in EQUAL if not key.startswith("orig")}, {}, "KeyError"),
    ("onnx", LLAMA3, QWEN2, "NotImplementedError"),
    ("onnx", YARN, QWEN2, "ZeroDivisionError"),
    ("onnx", YARN | {"beta_fast": 1e4, "beta_slow": 1.0}, QWEN2, "AssertionError"),
    ("exllamav3", DYNAMIC, {}, "ValueError"),
    ("lmdeploy", EQUAL, {}, "RuntimeError"),
    ("lmdeploy-pytorch", PART, {}, "KeyError"),
    ("tensorrt-llm", PART, {}, "ValueError"),
    ("deepspeed", YARN, {}, "ValueError"),
    ("deepspeed-fastgen", LLAMA3, {}, "refuses llama3"),
]


@pytest.mark.parametrize(("reader", "entry", "changes", "words"), REFUSED)
def test_what_does_not_load(reader, entry, changes, words):
    both = "type" not in entry
    found = reading(reader, source(entry, both, **changes))
    assert found.verdict == "refuses"
    assert words in "; ".join(found.reasons)


OLD_WORDS_ALONE = ["transformers4", "mlx"]


@pytest.mark.parametrize("reader", OLD_WORDS_ALONE)
def test_who_does_not_read_the_words_of_transformers_5(reader):
    got, factor = found(reader, source(YARN | {"rope_theta": 5e5}, both=False))
    np.testing.assert_allclose(got, plain(), rtol=1e-12)
    assert factor == 1
    assert reading(reader, source(YARN)).verdict == "agrees"


def test_who_takes_theta_at_the_top_first():
    entry = {"rope_type": "default", "rope_theta": 5e5}
    bases = {reader.key: 5e5 for reader in READERS}
    bases |= dict.fromkeys(("transformers4", "mlx", "exllamav3", "megatron", "deepspeed", "unsloth"), 20000.0)
    bases["deepspeed-fastgen"] = 20000.0
    for key, base in bases.items():
        np.testing.assert_allclose(
            found(key, source(entry, both=False, rope_theta=20000.0))[0], plain(base), rtol=1e-12, err_msg=key
        )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['reader']}-{row['vector']}")
def test_what_a_reader_was_seen_to_compute_is_told(row):
    vector = json.loads((ROOT / "vectors" / f"{row['vector']}.json").read_text())
    config, entry, name = (
        vector["config"],
        vector["config"].get("rope_parameters", {}),
        row["reader"].rpartition(" ")[0],
    )
    if name in ("mlx-lm", "Transformers") and "rope_theta" in entry:  # they were given the older words, too
        older = {"rope_scaling": {"type": entry["rope_type"], **entry}, "rope_theta": entry["rope_theta"]}
        config = {"partial_rotary_factor": entry.get("partial_rotary_factor", 1.0), **older, **config}
    told = reading(KEYS.get(name, name), Source(Path("vector"), config, "config", config))
    without_axes = "an image has three" in str(row["errors"])  # said by the script that ran the reader
    assert (told.verdict == "refuses") == (isinstance(row["errors"], str) and not without_axes)
    differs = any(
        each.layer_type == vector["layer_type"]
        and ("image" in row["vector"] or not each.words.startswith("gives the axes"))
        for each in told.differences
    )
    assert (told.verdict == "refuses" or differs) == (not row["agrees"])
    assert bool(told.limit) == ((row["reader"], row["vector"]) in LIMITED)
    if not row["agrees"]:
        assert told.reasons
        assert told.sources


def test_every_key_works_and_every_row_has_a_source():
    keys = [reader.key for reader in READERS]
    assert len(set(keys)) == len(keys) >= 21
    assert [each.verdict for each in diagnose(source(YARN), keys).readings]
    for reader in READERS:
        assert (reader.known in ("run", "read"), bool(reader.version), bool(reader.source), bool(reader.takes)) == (
            (True,) * 4
        ), reader.key
        assert all(each.source and not each.words.endswith(".") for each in reader.deviations), reader.key
    with pytest.raises(Unreadable, match="did you mean"):
        diagnose(source(YARN), ["vlm"])


def test_only_programs_that_ran_are_called_run():
    run = {reader.name for reader in READERS if reader.known == "run"}
    assert run == {"Transformers 5", "Transformers 4", "vLLM", "llama.cpp", "mlx-lm", "mlx-vlm", "exllamav3"}
    assert reading("vllm==0.22", source(YARN)).known == "read"


@pytest.mark.parametrize(
    ("one", "other", "is_older"),
    [
        ("0.9", "0.10", True),
        ("0.10", "0.9", False),
        ("4.56", "4.56.0", False),
        ("4.56.0rc1", "4.56", True),
        ("4.56", "4.56.0rc1", False),
        ("v1.2.1", "1.2.2", True),
        ("b9608", "b9728", True),
        ("2026.5.1", "2026.6", True),
        ("0.32.0+cpu", "0.32.0", False),
    ],
)
def test_versions_are_compared_number_by_number(one, other, is_older):
    assert older(one, other) is is_older


@pytest.mark.parametrize("version", ["0c1e570", "main", "nightly", "8f3e1d4c2b1a", ""])
def test_a_commit_or_a_name_has_no_place_in_the_order(version):
    assert not is_ordered(version)


@pytest.mark.parametrize("version", ["main", "8f3e1d4c2b1a", "1.1"])
def test_a_version_that_may_deviate_is_told_in_words(version):
    entry = YARN | {"mscale": 0.7, "mscale_all_dim": 0.5}
    words = "; ".join(reading(f"exllamav3=={version}", source(entry)).reasons)
    assert ("may be older than" in words) == (version != "1.1")


LAGUNA = source(
    {"full_attention": YARN | {"attention_factor": 1.4}, "sliding_attention": {"rope_type": "default"}},
    both=False,
    model_type="laguna",
)


@pytest.mark.parametrize(
    ("asked", "config", "words"),
    [
        ("vllm==0.22", source(YARN | {"attention_factor": 1.3}), "before, it ignores attention_factor"),
        ("sglang==0.4", source(YARN, both=False, model_type="lfm2_moe"), "before, it drops the scaling"),
        ("llama.cpp==b5000", source(YARN, architectures=["Qwen3MoeForCausalLM"]), "before, it drops yarn"),
        ("lmdeploy==0.9", source(YARN, both=False), "reads only rope_theta and rope_scaling at the top"),
        ("tensorrt-llm==1.0", LAGUNA, "applied twice"),
        ("megatron==0.10", source(LINEAR), "before, it drops linear"),
        ("deepspeed==0.17", source(LLAMA3), "silently drops the scaling"),
        ("mlx-vlm==0.3", source(LLAMA3, model_type="mllama_text_model"), "before, it drops the scaling"),
    ],
)
def test_a_bug_whose_fix_has_a_date_is_told_for_other_versions(asked, config, words):
    assert words in "; ".join(reading(asked, config).reasons)
    assert words not in "; ".join(reading(asked.partition("==")[0], config).reasons)


@pytest.mark.parametrize(("version", "factor"), [("4.55.4", 2.0), ("4.56", 4.0), ("4.57.3", 4.0), ("", 4.0)])
def test_a_bug_holds_up_to_the_release_that_fixed_it(version, factor):
    asked = "transformers4" + f"=={version}" * bool(version)  # huggingface/transformers#38224
    told = reading(asked, source(YARN, max_position_embeddings=2 * L))
    assert [each.factor for each in told.rotations.values()] == [factor]


@pytest.mark.parametrize(
    ("reader", "entry", "limit"),
    [
        ("vllm", YARN, 4096),
        ("vllm==0.22", YARN, None),
        ("sglang", YARN, 4096),
        ("sglang", {key: YARN[key] for key in YARN if not key.startswith("orig")}, None),
        ("llama.cpp", YARN, 4096),
        ("mlx", YARN, None),
    ],
)
def test_who_limits_texts_to_the_maximum(reader, entry, limit):
    assert reading(reader, source(entry, max_position_embeddings=4096)).limit == limit


def test_trainers_say_what_they_write():
    writes = {reader.name: reader.writes for reader in READERS if reader.writes}
    assert set(writes) == {"TRL", "Unsloth", "axolotl", "LLaMA-Factory", "ms-swift", "verl"}
    assert reading("llamafactory", source(YARN)).writes == writes["LLaMA-Factory"]


def test_bugs_name_a_thread_and_a_vector_that_is_there():
    for bug in BUGS:
        assert "#" in bug.thread or "@" in bug.thread, bug.program
        assert not bug.vector or (ROOT / "vectors" / f"{bug.vector}.json").is_file(), bug.vector


@pytest.mark.parametrize("key", ["transformers", "transformers4", "vllm", "sglang"])
@pytest.mark.parametrize("changes", [{"factor": "4"}, {"rope_theta": "1e6"}, {ORIGINAL: "4096"}])
def test_a_number_that_is_a_string_stops_what_computes_with_it(key, changes):
    config = SIZES | {"rope_scaling": YARN | changes, "rope_theta": 10000.0}
    told = reading(key, Source(Path("strings"), config, "config", config))
    assert (told.verdict, told.cures) == ("refuses", ("write it as a number",))


def test_transformers_stops_at_a_number_that_is_a_string():
    config = AutoConfig.for_model("llama", rope_scaling={"rope_type": "linear", "factor": "4"})
    with pytest.raises(TypeError):
        LlamaRotaryEmbedding(config)
