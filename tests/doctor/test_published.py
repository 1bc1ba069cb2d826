"""Configs as they are published, with the fields that have to do with positions."""

import copy
import json
import math

import pytest
import transformers
from transformers import CONFIG_MAPPING

from rope_patch.doctor import Unreadable, diagnose, read_source, rotations_of
from rope_patch.doctor.words import stated
from tests.doctor.test_transformers import disagreement
from tests.releases import since
from tools.position_defaults import text_of, turned

pytestmark = pytest.mark.filterwarnings("ignore")

LLAMA3 = {"low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}
SIZES_7B = {"hidden_size": 4096, "num_attention_heads": 32}
QWEN2_5 = {"model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28, "max_position_embeddings": 32768}
YARN_OF_QWEN = {"factor": 4.0, "original_max_position_embeddings": 32768}
MROPE = {"type": "mrope", "mrope_section": [16, 24, 24]}
DEEPSEEK_YARN = {
    **{"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
    **{"original_max_position_embeddings": 4096, "type": "yarn"},
}
QWEN3_5 = {
    **{"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default"},
    **{"rope_theta": 10000000, "partial_rotary_factor": 0.25},
}
GPT_OSS_YARN = {
    **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096},
    **{"rope_type": "yarn", "truncate": False},
}
OLMO3_YARN = {
    **{"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0},
    **{"original_max_position_embeddings": 8192, "rope_type": "yarn"},
}
LAYERS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
PHI3_MINI = {
    **{"model_type": "phi3", "hidden_size": 3072, "num_attention_heads": 32, "rope_theta": 10000.0},
    **{"max_position_embeddings": 131072, "original_max_position_embeddings": 4096},
}
PHI3_LISTS = {"long_factor": [1.08 + 1.3 * i for i in range(48)], "short_factor": [1.0 + 0.05 * i for i in range(48)]}
PHI4_LIST = [min(1.118320672**i, 32.0) for i in range(48)]
MINICPM3_LIST = [
    *(1.0591234137867171, 1.1241891283591912, 1.2596935748670968, 1.5380380402321725, 2.093982484148734),
    *(3.1446935121267696, 4.937952647693647, 7.524541999994549, 10.475458000005451, 13.062047352306353),
    *(14.85530648787323, 15.906017515851266, 16.461961959767827, 16.740306425132907, 16.87581087164081),
    16.940876586213285,
]

PUBLISHED = {
    "Llama-3.1-8B": (
        {
            **{"model_type": "llama", **SIZES_7B, "max_position_embeddings": 131072, "rope_theta": 500000.0},
            "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, **LLAMA3},
        },
        {"": "llama3, theta = 500000, factor = 8, L = 8192"},
    ),
    "Qwen2.5-7B-Instruct": ({**QWEN2_5, "rope_theta": 1000000.0}, {"": "default, theta = 1000000"}),
    "Qwen2.5-7B-Instruct with YaRN, version 4": (
        {**QWEN2_5, "rope_theta": 1000000.0, "rope_scaling": {**YARN_OF_QWEN, "type": "yarn"}},
        {"": "yarn, theta = 1000000, factor = 4, L = 32768, cos and sin times 1.139"},
    ),
    "Qwen2.5-7B-Instruct with YaRN": (
        {**QWEN2_5, "rope_parameters": {**YARN_OF_QWEN, "rope_type": "yarn", "rope_theta": 1000000.0}},
        {"": "yarn, theta = 1000000, factor = 4, L = 32768, cos and sin times 1.139"},
    ),
    "Qwen2-VL-7B-Instruct": (
        {**QWEN2_5, "model_type": "qwen2_vl", "rope_theta": 1000000.0, "rope_scaling": MROPE},
        {"": "default, theta = 1000000, sections [16, 24, 24]"},
    ),
    "Qwen2.5-VL-7B-Instruct": (
        {**QWEN2_5, "model_type": "qwen2_5_vl", "rope_theta": 1000000.0, "rope_scaling": MROPE},
        {"": "default, theta = 1000000, sections [16, 24, 24]"},
    ),
    "Qwen3-VL-8B-Instruct": (
        {
            "model_type": "qwen3_vl",
            "text_config": {
                **{"model_type": "qwen3_vl_text", "head_dim": 128, **SIZES_7B, "max_position_embeddings": 262144},
                **{"rope_theta": 5000000},
                "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            },
        },
        {"": "default, theta = 5000000, sections [24, 20, 20], interleaved"},
    ),
    "Qwen3.5-9B": (
        {
            "model_type": "qwen3_5",
            "text_config": {
                **{"model_type": "qwen3_5_text", "head_dim": 256, "hidden_size": 4096, "num_attention_heads": 16},
                **{"max_position_embeddings": 262144, "partial_rotary_factor": 0.25, "rope_parameters": QWEN3_5},
                "layer_types": ["linear_attention"] * 3 + ["full_attention"],
                "num_hidden_layers": 4,
            },
        },
        {"": "default, theta = 10000000, 64 of 256 dimensions, sections [11, 11, 10], interleaved"},
    ),
    "Qwen3.6 with YaRN, as its card says": (
        {
            "model_type": "qwen3_5",
            "text_config": {
                **{"model_type": "qwen3_5_text", "head_dim": 256, "max_position_embeddings": 262144},
                "rope_parameters": {
                    **QWEN3_5,
                    **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144},
                },
            },
        },
        {
            "": "yarn, theta = 10000000, factor = 4, L = 262144, cos and sin times 1.139, 64 of 256 dimensions, "
            "sections [11, 11, 10], interleaved"
        },
    ),
    "DeepSeek-V2-Lite": (
        {
            **{"model_type": "deepseek_v2", "hidden_size": 2048, "num_attention_heads": 16, "qk_rope_head_dim": 64},
            **{"max_position_embeddings": 163840, "rope_theta": 10000},
            "rope_scaling": {**DEEPSEEK_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
        {"": "yarn, theta = 10000, factor = 40, L = 4096"},
    ),
    "DeepSeek-V3": (
        {
            **{"model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128, "qk_rope_head_dim": 64},
            **{"max_position_embeddings": 163840, "rope_theta": 10000, "rope_scaling": DEEPSEEK_YARN},
        },
        {"": "yarn, theta = 10000, factor = 40, L = 4096"},
    ),
    "gpt-oss-20b": (
        {
            **{"model_type": "gpt_oss", "hidden_size": 2880, "num_attention_heads": 64, "head_dim": 64},
            **{"max_position_embeddings": 131072, "rope_theta": 150000, "rope_scaling": GPT_OSS_YARN},
        },
        {"": "yarn, theta = 150000, factor = 32, L = 4096, cos and sin times 1.347"},
    ),
    "gemma-2-9b": (
        {
            **{"model_type": "gemma2", "hidden_size": 3584, "num_attention_heads": 16, "head_dim": 256},
            **{"max_position_embeddings": 8192, "rope_theta": 10000.0},
        },
        {"": "default, theta = 10000"},
    ),
    "gemma-3-4b-it": (  # its sizes of a head are the class's own
        {
            "model_type": "gemma3",
            "text_config": {
                **{"model_type": "gemma3_text", "hidden_size": 2560, "sliding_window": 1024},
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            },
        },
        {
            "full_attention": "linear, theta = 1000000, factor = 8",
            "sliding_attention": "default, theta = 10000",
        },
    ),
    "gemma-3-1b-it": (
        {
            **{"model_type": "gemma3_text", "hidden_size": 1152, "num_attention_heads": 4, "head_dim": 256},
            **{"max_position_embeddings": 32768, "rope_theta": 1000000, "rope_local_base_freq": 10000},
            "rope_scaling": None,
        },
        {"full_attention": "default, theta = 1000000", "sliding_attention": "default, theta = 10000"},
    ),
    "gemma-3-4b-it, saved by Transformers 5": (
        {
            "model_type": "gemma3",
            "text_config": {
                **{"model_type": "gemma3_text", "hidden_size": 2560, "head_dim": 256},
                "rope_parameters": {
                    "full_attention": {"factor": 8.0, "rope_theta": 1000000.0, "rope_type": "linear"},
                    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
                },
            },
        },
        {
            "full_attention": "linear, theta = 1000000, factor = 8",
            "sliding_attention": "default, theta = 10000",
        },
    ),
    "gemma-4-E2B-it": (
        {
            "model_type": "gemma4",
            "text_config": {
                **{"model_type": "gemma4_text", "hidden_size": 1536, "num_attention_heads": 8, "head_dim": 256},
                **{"global_head_dim": 512, "max_position_embeddings": 131072, "num_hidden_layers": 5},
                "rope_parameters": {
                    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
                    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
                },
                "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
            },
        },
        {
            "full_attention": "proportional, theta = 1000000, 128 of 512 dimensions",
            "sliding_attention": "default, theta = 10000",
        },
    ),
    "Phi-3-mini-128k-instruct": (
        {**PHI3_MINI, "rope_scaling": {**PHI3_LISTS, "type": "longrope"}},
        {"": "longrope, theta = 10000, factor = 32, L = 4096, cos and sin times 1.19"},
    ),
    "Phi-4-mini-instruct": (
        {
            **PHI3_MINI,
            **{"num_attention_heads": 24, "partial_rotary_factor": 0.75},
            "rope_scaling": {"long_factor": PHI4_LIST, "short_factor": [1.0] * 48, "type": "longrope"},
        },
        {"": "longrope, theta = 10000, factor = 32, L = 4096, cos and sin times 1.19, 96 of 128 dimensions"},
    ),
    "GLM-4-9B-0414": (
        {
            **{"model_type": "glm4", **SIZES_7B, "head_dim": 128, "max_position_embeddings": 32768},
            **{"partial_rotary_factor": 0.5, "rope_theta": 10000.0},
        },
        {"": "default, theta = 10000, 64 of 128 dimensions"},
    ),
    "Yi-34B-200K": (
        {
            **{"model_type": "llama", "hidden_size": 7168, "num_attention_heads": 56, "rope_theta": 5000000.0},
            "max_position_embeddings": 200000,
        },
        {"": "default, theta = 5000000"},
    ),
    "Mistral-7B-v0.3": (
        {"model_type": "mistral", **SIZES_7B, "max_position_embeddings": 32768, "rope_theta": 1000000.0},
        {"": "default, theta = 1000000"},
    ),
    "LFM2-1.2B": (
        {
            **{"model_type": "lfm2", "hidden_size": 2048, "num_attention_heads": 32, "rope_theta": 1000000.0},
            "max_position_embeddings": 128000,
        },
        {"": "default, theta = 1000000"},
    ),
    "Olmo-3-7B": (
        {
            **{"model_type": "olmo3", **SIZES_7B, "max_position_embeddings": 65536, "rope_theta": 500000},
            **{"rope_scaling": OLMO3_YARN, "layer_types": LAYERS, "num_hidden_layers": 4},
        },
        {
            "full_attention": "yarn, theta = 500000, factor = 8, L = 8192, cos and sin times 1.208",
            "sliding_attention": "default, theta = 500000",
        },
    ),
    "ModernBERT-base": (
        {
            **{"model_type": "modernbert", "hidden_size": 768, "num_attention_heads": 12},
            **{"global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "max_position_embeddings": 8192},
        },
        {"full_attention": "default, theta = 160000", "sliding_attention": "default, theta = 10000"},
    ),
    "gpt-neox-20b": (
        {
            **{"model_type": "gpt_neox", "hidden_size": 6144, "num_attention_heads": 64, "rotary_pct": 0.25},
            **{"rotary_emb_base": 10000, "max_position_embeddings": 2048},
        },
        {"": "default, theta = 10000, 24 of 96 dimensions"},
    ),
    "falcon-7b": (
        {"model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71, "alibi": False},
        {"": "default, theta = 10000"},
    ),
    "stablelm-3b-4e1t": (
        {
            **{"model_type": "stablelm", "hidden_size": 2560, "num_attention_heads": 32, "rope_theta": 10000},
            **{"partial_rotary_factor": 0.25, "max_position_embeddings": 4096},
        },
        {"": "default, theta = 10000, 20 of 80 dimensions"},
    ),
    "persimmon-8b-base": (
        {
            **{"model_type": "persimmon", "hidden_size": 4096, "num_attention_heads": 64, "rope_theta": 25000.0},
            **{"partial_rotary_factor": 0.5, "max_position_embeddings": 16384},
        },
        {"": "default, theta = 25000, 32 of 64 dimensions"},
    ),
    "CodeLlama-7b": (
        {"model_type": "llama", **SIZES_7B, "max_position_embeddings": 16384, "rope_theta": 1000000},
        {"": "default, theta = 1000000"},
    ),
    "MiniCPM3-4B": (
        {
            **{"model_type": "minicpm3", "hidden_size": 2560, "num_attention_heads": 40, "qk_rope_head_dim": 32},
            "max_position_embeddings": 32768,
            "rope_scaling": {
                **{"type": "longrope", "long_factor": MINICPM3_LIST, "short_factor": MINICPM3_LIST},
                "original_max_position_embeddings": 32768,
            },
        },
        {"": "longrope, theta = 10000, L = 32768"},
    ),
    "Llama-4-Scout-17B-16E": (  # the ends of its ramp are equal, and every fourth layer has no positions
        {
            "model_type": "llama4",
            "text_config": {
                **{"model_type": "llama4_text", "hidden_size": 5120, "num_attention_heads": 40, "head_dim": 128},
                **{"max_position_embeddings": 10485760, "rope_theta": 500000.0, "no_rope_layers": [1, 1, 1, 0] * 12},
                "rope_scaling": {"factor": 16.0, "high_freq_factor": 1.0, **LLAMA3},
            },
        },
        {"": "llama3, theta = 500000, factor = 16, L = 8192"},
    ),
    "llava-1.5-7b-hf": (  # its text model's sizes are Llama's own, and are not written
        {"model_type": "llava", "text_config": {"model_type": "llama", "max_position_embeddings": 4096}},
        {"": "default, theta = 10000"},
    ),
}


def written(tmp_path, fields):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    return path


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_published_is_read(tmp_path, name):
    fields, expected = PUBLISHED[name]
    source = read_source(written(tmp_path, fields))
    found = rotations_of(source)
    assert {kind: stated(rotation) for kind, rotation in found.rotations.items()} == expected
    assert not found.notes
    config = text_of(CONFIG_MAPPING[fields["model_type"]].from_dict(copy.deepcopy(fields)))
    assert not disagreement(found.rotations, turned(config))
    assert diagnose(source, ["transformers"]).agrees


def frequencies(theta, width):
    return [theta ** (-i / width) for i in range(0, width, 2)]


def test_gpt_j_rotates_a_part(tmp_path):
    fields = {"model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_positions": 2048, "rotary_dim": 64}
    (rotation,) = rotations_of(read_source(written(tmp_path, fields))).rotations.values()
    assert rotation.frequencies() == pytest.approx(frequencies(10000.0, 64))
    assert (rotation.head_dim, rotation.longest) == (256, 2048)


@pytest.mark.parametrize(
    ("fields", "theta", "scale"),
    [
        ({"model_type": "baichuan", **SIZES_7B, "model_max_length": 4096, "max_position_embeddings": 4096}, 10000.0, 1),
        ({"model_type": "internlm2", **SIZES_7B, "rope_theta": 1000000, "max_position_embeddings": 32768}, 1e6, 1),
        (
            {
                **{"model_type": "minicpm", **SIZES_7B, "max_position_embeddings": 65536},
                "rope_scaling": {
                    **{"rope_type": "longrope", "long_factor": [2.0] * 64, "short_factor": [1.0] * 64},
                    "original_max_position_embeddings": 32768,
                },
            },
            10000.0,
            math.sqrt(1 + math.log(2) / math.log(32768)),
        ),
    ],
    ids=["Baichuan2-7B", "InternLM2-7B", "MiniCPM4-8B"],
)
def test_remote_code_is_read_with_a_note(tmp_path, fields, theta, scale):
    found = rotations_of(read_source(written(tmp_path, fields)))
    (rotation,) = found.rotations.values()
    assert rotation.frequencies() == pytest.approx(frequencies(theta, 128))
    assert rotation.temperature() == pytest.approx(scale)
    assert [note for note in found.notes if "is not one of Transformers" in note] == list(found.notes)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_type": "bert", "hidden_size": 768, "num_attention_heads": 12}, "it has no rotary positions"),
        ({"model_type": "gpt2", "n_embd": 768, "n_head": 12}, "it has no rotary positions"),
        ({"model_type": "t5", "d_model": 512, "num_heads": 8}, "it has no rotary positions"),
        ({"model_type": "mpt", "d_model": 4096, "n_heads": 32}, "it has no rotary positions"),
        ({"model_type": "falcon", "alibi": True}, "alibi is true: it has no rotary positions"),
        ({"model_type": "granitemoehybrid", "position_embedding_type": "nope"}, "it has no rotary positions"),
        ({"model_type": "chatglm", "rope_ratio": 50, **SIZES_7B}, "multiplies theta by rope_ratio"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(tmp_path, fields, reason):
    with pytest.raises(Unreadable) as error:
        diagnose(read_source(written(tmp_path, fields)))
    assert reason in str(error.value)
    assert str(error.value).startswith(str(tmp_path))
    assert "\n" not in str(error.value)


V4_YARN = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}


@pytest.mark.parametrize(
    ("fields", "main", "compress"),
    [
        ({}, "default, theta = 10000", "default, theta = 160000"),
        (
            {"rope_theta": 2e4, "compress_rope_theta": 5e4, "rope_scaling": {**V4_YARN, "rope_theta": 7.0}},
            "default, theta = 20000",
            "yarn, theta = 50000, factor = 16, L = 65536",
        ),
        (
            {"rope_parameters": {"main": {"rope_theta": 3e4}, "compress": {**V4_YARN, "partial_rotary_factor": 0.125}}},
            "default, theta = 30000",
            "yarn, theta = 10000, factor = 16, L = 65536, cos and sin times 1.277",
        ),
        pytest.param(
            {"rope_parameters": {"compress": {**V4_YARN, "rope_theta": 3e4}}},
            "default, theta = 10000",
            "default, theta = 160000",
            marks=since(transformers, "5.18", "cannot load a DeepSeek V4 that says one of its two rotations"),
        ),
    ],
)
def test_a_scaling_of_deepseek_v4_belongs_to_its_compressed_keys(tmp_path, fields, main, compress):
    fields = {"model_type": "deepseek_v4", **fields}
    found = rotations_of(read_source(written(tmp_path, fields))).rotations
    share = ", 64 of 512 dimensions"
    assert stated(found["compress"]) in (compress + share, compress.replace(", cos", f"{share}, cos"))
    assert stated(found["main"]).startswith(main)
    assert not disagreement(found, turned(CONFIG_MAPPING["deepseek_v4"].from_dict(copy.deepcopy(fields))))


def test_programs_with_code_of_their_own_for_deepseek_v4_are_not_judged(tmp_path):
    source = read_source(written(tmp_path, {"model_type": "deepseek_v4", "rope_scaling": V4_YARN}))
    verdicts = {reading.reader: reading.verdict for reading in diagnose(source).readings}
    assert verdicts["Transformers 5"] == "agrees"
    assert {verdicts[name] for name in ("vLLM", "llama.cpp", "SGLang", "Transformers 4")} == {"unknown"}
    assert diagnose(source).agrees


def test_the_first_form_of_phi_3_is_read_and_transformers_5_stops_at_it(tmp_path):
    fields = {**PHI3_MINI, "rope_scaling": {**PHI3_LISTS, "type": "su"}}
    found = rotations_of(read_source(written(tmp_path, fields)))
    (rotation,) = found.rotations.values()
    assert stated(rotation) == PUBLISHED["Phi-3-mini-128k-instruct"][1][""]
    assert any("'su' is an older name of longrope" in note for note in found.notes)
    with pytest.raises(KeyError, match="original_max_position_embeddings"):
        CONFIG_MAPPING["phi3"].from_dict(fields)


def test_type_without_rope_type_is_dropped_beside_layer_types(tmp_path):
    """Transformers 5 fills in `rope_type: default` before it looks at the older word."""
    fields = {"model_type": "gemma3_text", "rope_scaling": {"type": "linear", "factor": 8.0}}
    found = rotations_of(read_source(written(tmp_path, fields)))
    assert {rotation.rope_type for rotation in found.rotations.values()} == {"default"}
    assert any("drops the scaling" in note for note in found.notes)
