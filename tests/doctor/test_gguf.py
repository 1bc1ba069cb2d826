"""GGUF files against the configs that they were converted from, with the settings that llama.cpp's converter writes."""

import json
import math

import numpy as np
import pytest

from rope_patch.doctor import Unreadable, read_source, rotations_of
from rope_patch.doctor.comparing import compare

gguf = pytest.importorskip("gguf")

SIZES = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}
SHORT, LONG = [1.0 + 0.01 * i for i in range(48)], [1.0 + i for i in range(48)]


def of_llama3(theta, width, entry):
    """What the converter writes as rope_freqs.weight (its own formula, by wavelength)."""
    low = entry["original_max_position_embeddings"] / entry["low_freq_factor"]
    high = entry["original_max_position_embeddings"] / entry["high_freq_factor"]
    for i in range(0, width, 2):
        wavelength = 2 * math.pi * theta ** (i / width)
        if wavelength < high:
            yield 1.0
        elif wavelength > low:
            yield entry["factor"]
        else:
            smooth = (
                (low / wavelength - 1)
                * entry["low_freq_factor"]
                / (entry["high_freq_factor"] - entry["low_freq_factor"])
            )
            yield 1 / ((1 - smooth) / entry["factor"] + smooth)


def gguf_file(path, architecture, settings, tensors=()):
    """A file without weights: the settings of an architecture, and lists of factors."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in settings.items():
        key = f"{architecture}.{name}"
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    writer.add_array("tokenizer.ggml.tokens", [f"token{i}" for i in range(5000)])
    writer.add_array("tokenizer.ggml.scores", [float(i) for i in range(5000)])
    for name, values in dict(tensors).items():
        writer.add_tensor(name, np.array(list(values), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_source(path)


def config(path, **fields):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(fields))
    return read_source(path)


def common(context, theta, **more):
    return {
        **{"context_length": context, "embedding_length": 4096, "attention.head_count": 32, "rope.freq_base": theta},
        **more,
    }


def yarn_of(entry, **more):
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": entry["factor"],
        "rope.scaling.original_context_length": entry["original_max_position_embeddings"],
        **more,
    }


ATTENTION_OF_PHI = math.sqrt(1 + math.log(32) / math.log(4096))
CONVERTED = {
    "plain": (
        {"model_type": "qwen2", **SIZES, "max_position_embeddings": 32768, "rope_theta": 1e6},
        "qwen2",
        common(32768, 1e6),
        {},
    ),
    "linear": (
        {"model_type": "llama", **SIZES, "rope_scaling": {"type": "linear", "factor": 4.0}},
        "llama",
        common(2048, 1e4, **{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
        {},
    ),
    "yarn": (
        {"model_type": "qwen2", **SIZES, "max_position_embeddings": 32768, "rope_theta": 1e6, "rope_scaling": YARN},
        "qwen2",
        common(32768, 1e6, **yarn_of(YARN)),
        {},
    ),
    "yarn with a temperature": (
        {
            **{"model_type": "qwen2", **SIZES, "max_position_embeddings": 32768, "rope_theta": 1e6},
            "rope_scaling": {**YARN, "attention_factor": 0.8, "beta_fast": 16.0, "beta_slow": 2.0},
        },
        "qwen2",
        common(
            32768,
            1e6,
            **yarn_of(YARN, **{"rope.scaling.attn_factor": 0.8 / (0.1 * math.log(4) + 1)}),
            **{"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0},
        ),
        {},
    ),
    "llama3": (
        {"model_type": "llama", **SIZES, "max_position_embeddings": 131072, "rope_theta": 5e5, "rope_scaling": LLAMA3},
        "llama",
        common(131072, 5e5, **{"rope.dimension_count": 128, "attention.key_length": 128}),
        {"rope_freqs.weight": of_llama3(5e5, 128, LLAMA3)},
    ),
    "longrope of a part": (
        {
            **{"model_type": "phi3", **SIZES, "max_position_embeddings": 131072, "partial_rotary_factor": 0.75},
            **{"original_max_position_embeddings": 4096},
            "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
        },
        "phi3",
        common(
            131072,
            1e4,
            **{"rope.dimension_count": 96, "rope.scaling.original_context_length": 4096},
            **{"rope.scaling.attn_factor": ATTENTION_OF_PHI},
        ),
        {"rope_factors_short.weight": SHORT, "rope_factors_long.weight": LONG},
    ),
    "a part": (
        {"model_type": "stablelm", **SIZES, "max_position_embeddings": 4096, "partial_rotary_factor": 0.25},
        "stablelm",
        common(4096, 1e4, **{"rope.dimension_count": 32}),
        {},
    ),
    "a part of latent heads": (
        {
            **{"model_type": "deepseek_v2", **SIZES, "qk_rope_head_dim": 64, "max_position_embeddings": 163840},
            "rope_scaling": {
                **{"type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707},
                "original_max_position_embeddings": 4096,
            },
        },
        "deepseek2",
        common(
            163840,
            1e4,
            **{"attention.key_length": 192, "rope.dimension_count": 64, "rope.scaling.yarn_log_multiplier": 0.0707},
            **yarn_of({"factor": 40.0, "original_max_position_embeddings": 4096}),
        ),
        {},
    ),
    "three axes": (
        {
            **{"model_type": "qwen2_vl", **SIZES, "max_position_embeddings": 32768, "rope_theta": 1e6},
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        },
        "qwen2vl",
        common(32768, 1e6, **{"rope.dimension_sections": [16, 24, 24, 0]}),
        {},
    ),
    "three axes, interleaved": (
        {
            "model_type": "qwen3_vl",
            "text_config": {
                **{"model_type": "qwen3_vl_text", **SIZES, "head_dim": 128, "rope_theta": 5e6},
                "max_position_embeddings": 262144,
                "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            },
        },
        "qwen3vl",
        common(262144, 5e6, **{"attention.key_length": 128, "rope.dimension_sections": [24, 20, 20, 0]}),
        {},
    ),
    "two thetas": (
        {
            **{"model_type": "gemma3_text", **SIZES, "head_dim": 256, "max_position_embeddings": 131072},
            **{"rope_theta": 1e6, "rope_local_base_freq": 1e4},
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        "gemma3",
        common(
            131072,
            1e6,
            **{"attention.key_length": 256, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
        ),
        {},
    ),
    "two thetas, both written": (
        {
            **{"model_type": "modernbert", **SIZES, "max_position_embeddings": 8192},
            **{"global_rope_theta": 160000.0, "local_rope_theta": 10000.0},
        },
        "modern-bert",
        common(8192, 160000.0, **{"rope.freq_base_swa": 10000.0}),
        {},
    ),
    "proportional, two widths": (
        {"model_type": "gemma4_text", **SIZES, "max_position_embeddings": 131072},
        "gemma4",
        common(
            131072,
            1e6,
            **{"rope.freq_base_swa": 1e4, "attention.key_length": 512, "attention.key_length_swa": 256},
            **{"rope.dimension_count": 512},
        ),
        {"rope_freqs.weight": [1.0] * 64 + [1e30] * 192},
    ),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_a_converted_file_says_what_its_config_says(tmp_path, name):
    fields, architecture, settings, tensors = CONVERTED[name]
    found = compare(
        config(tmp_path / "source", **fields), gguf_file(tmp_path / "m.gguf", architecture, settings, tensors)
    )
    assert not found.differences
    assert found.agrees
    assert found.lengths is None


@pytest.mark.parametrize(
    ("changes", "tensors", "words"),
    [
        ({"rope.freq_base": 1e4}, {}, "theta = 10000 instead of 500000"),
        ({"rope.dimension_count": 64}, {}, "turns 64 of 128 dimensions instead of 128 of 128"),
        ({}, {}, "rope_type = default instead of llama3"),
        ({}, {"rope_freqs.weight": [2.0] * 64}, "rope_type = longrope instead of llama3"),
    ],
)
def test_what_a_conversion_loses_is_seen(tmp_path, changes, tensors, words):
    fields, architecture, settings, lists = CONVERTED["llama3"]
    lists = lists if "rope.dimension_count" in changes or "rope.freq_base" in changes else tensors
    if "rope.dimension_count" in changes:
        lists = {"rope_freqs.weight": [1.0] * 32}
    file = gguf_file(tmp_path / "m.gguf", architecture, {**settings, **changes}, dict(lists))
    (difference,) = compare(config(tmp_path / "source", **fields), file).differences
    assert words in difference.words


def test_gpt_oss_loses_the_ends_of_its_ramp(tmp_path):
    """llama.cpp has no word for `truncate`."""
    entry = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    source = config(
        tmp_path / "source", model_type="gpt_oss", rope_theta=150000, rope_scaling={**entry, "truncate": False}
    )
    settings = {**common(131072, 150000.0, **yarn_of(entry)), "attention.key_length": 64}
    (difference,) = compare(source, gguf_file(tmp_path / "m.gguf", "gpt-oss", settings)).differences
    assert difference.words == "turns with truncate = True instead of False"


def test_a_file_that_names_no_context_still_has_its_base(tmp_path):
    source = gguf_file(tmp_path / "m.gguf", "llama", {"embedding_length": 64, "attention.head_count": 4})
    (rotation,) = rotations_of(source).rotations.values()
    assert (rotation.theta, rotation.width, rotation.longest) == (10000.0, 16, 0)


def test_version_2_is_read_as_version_3(tmp_path):
    expected = rotations_of(gguf_file(tmp_path / "m.gguf", "llama", common(4096, 5e5))).rotations
    content = bytearray((tmp_path / "m.gguf").read_bytes())
    content[4] = 2
    (tmp_path / "m.gguf").write_bytes(content)
    assert rotations_of(read_source(tmp_path / "m.gguf")).rotations == expected


def test_a_folder_with_one_file_is_read_by_it(tmp_path):
    gguf_file(tmp_path / "m.gguf", "llama", common(4096, 5e5))
    assert read_source(tmp_path).path == tmp_path / "m.gguf"
    gguf_file(tmp_path / "n.gguf", "llama", common(4096, 5e5))
    with pytest.raises(Unreadable, match="2 GGUF files; pass one of them"):
        read_source(tmp_path)


@pytest.mark.parametrize(("head_dim", "width"), [(100, 58), (224, 122), (44, 30), (192, 64)])
def test_the_width_that_a_file_states_is_the_one_that_turns(tmp_path, head_dim, width):
    settings = common(4096, 1e4, **{"attention.key_length": head_dim, "rope.dimension_count": width})
    (rotation,) = rotations_of(gguf_file(tmp_path / "m.gguf", "llama", settings)).rotations.values()
    assert rotation.width == width
