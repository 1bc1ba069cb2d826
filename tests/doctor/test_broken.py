"""Broken and hostile files end in one line: the file, the field, its value and what is allowed; or in a note."""

import json
import os
import re
import struct
import time

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rope_patch.doctor import Unreadable, as_numbers, diagnose, read_source, rotations_of
from rope_patch.doctor.architecture import architecture_of
from rope_patch.doctor.command import main
from rope_patch.doctor.gguf import fields_of_gguf
from rope_patch.doctor.words import words_of

LLAMA = {
    **{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 4096},
    "rope_theta": 10000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LONGROPE = {**YARN, "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
HUGE = "1e400"  # JSON has it, and Python reads it as infinity


def written(tmp_path, fields):
    path = tmp_path / "config.json"
    path.write_text(fields if isinstance(fields, str) else json.dumps(fields))
    return path


def report_of(path):
    """All that the command does with a file."""
    report = diagnose(read_source(path))
    words_of(report).encode()
    json.dumps(as_numbers(report))
    return report


def outcome(path):
    """The report, or the line that stands for it; within two seconds of one processor."""
    start = time.process_time()
    try:
        report, said = report_of(path), ""
    except Unreadable as error:
        report, said = None, str(error)
    assert time.process_time() - start < 2
    return report, said


def refused(path):
    with pytest.raises(Unreadable) as error:
        report_of(path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < len(str(path)) + 400
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("rope_scaling", [1, 2], "must be an object with a rope_type"),
        ("rope_scaling", "yarn", "must be an object with a rope_type"),
        ("rope_parameters", 3, "must be an object with a rope_type"),
        ("rope_theta", 0, "above 1 and at most 1e+30"),
        ("rope_theta", -1, "above 1 and at most 1e+30"),
        ("rope_theta", 1, "above 1 and at most 1e+30"),
        ("rope_theta", True, "above 1 and at most 1e+30"),
        ("rope_theta", [1e4], "above 1 and at most 1e+30"),
        ("rope_theta", "ten thousand", "above 1 and at most 1e+30"),
        ("max_position_embeddings", 0, "must be a number above 0"),
        ("max_position_embeddings", -4096, "must be a number above 0"),
        ("max_position_embeddings", 10**30, "must be a number above 0"),
        ("max_position_embeddings", {}, "must be a number above 0"),
        ("hidden_size", 0, "must be a number above 0"),
        ("hidden_size", [[]], "must be a number above 0"),
        ("hidden_size", [], "must be a number above 0"),
        ("num_attention_heads", 0, "must be a number above 0"),
        ("num_attention_heads", 2.5e9, "must be a number above 0"),
        ("head_dim", 10**6, "it must be from 2 to 4096"),
        ("head_dim", 1, "it must be from 2 to 4096"),
    ],
)
def test_a_field_is_named_with_what_is_allowed(tmp_path, name, value, allowed):
    said = refused(written(tmp_path, {**LLAMA, name: value}))
    assert name in said
    assert allowed in said
    if "it must be" not in allowed:
        assert f"{value!r:.80}" in said


@pytest.mark.parametrize(
    ("entry", "name", "value"),
    [
        *((YARN, "rope_type", value) for value in (5, None, ["yarn"], True, "yarm", "axial")),
        *((YARN, "factor", value) for value in (-1, 0, "eight", True, [4], float("nan"))),
        *((LLAMA3, "factor", value) for value in (None, -1, 0, "eight", False)),
        *((LLAMA3, name, value) for name in ("low_freq_factor", "high_freq_factor") for value in (None, 0, -1, "x")),
        (LLAMA3, "high_freq_factor", 0.5),
        *((YARN, "original_max_position_embeddings", value) for value in (0, 1, -8, "x", True, [1024], 1e300)),
        *((YARN, name, value) for name in ("beta_fast", "beta_slow", "mscale") for value in (-1, "x", True, [1])),
        *((YARN, "attention_factor", value) for value in (-1, "x", True)),
        *((YARN, "truncate", value) for value in ("false", 0, 1, [])),
        *((YARN, "rope_theta", value) for value in (0, 1, -5, True, "x", {})),
        *((LONGROPE, "short_factor", value) for value in (None, [], "x", [1.0] * 7, [1.0] * 7 + ["2"], [0.0] * 8)),
        *((LONGROPE, "long_factor", value) for value in (3, [None] * 8, [1.0] * 9, [-1.0] * 8, [True] * 8)),
        *((LONGROPE, name, "x") for name in ("short_mscale", "long_mscale")),
    ],
)
def test_a_field_beside_the_scaling_is_named(tmp_path, entry, name, value):
    for spelling in ("rope_scaling", "rope_parameters"):
        said = refused(written(tmp_path, {**LLAMA, spelling: {**entry, name: value}}))
        assert name in said
        assert re.search(r"must be|allowed are|is missing|there are \d+ pairs", said)


@pytest.mark.parametrize("name", ["rope_theta", "max_position_embeddings", "head_dim"])
def test_infinity_is_no_number(tmp_path, name):
    text = json.dumps({**LLAMA, name: 0}).replace(f'"{name}": 0', f'"{name}": {HUGE}')
    assert f"{name}=inf" in refused(written(tmp_path, text))
    assert f"{name}=nan" in refused(written(tmp_path, text.replace(HUGE, "NaN")))


@pytest.mark.parametrize("missing", ["factor", "low_freq_factor", "high_freq_factor"])
def test_what_a_type_needs_is_named(tmp_path, missing):
    entry = {name: value for name, value in LLAMA3.items() if name != missing}
    assert f"{missing} is missing, which llama3 needs" in refused(written(tmp_path, {**LLAMA, "rope_scaling": entry}))


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ({"rope_theta": "1e6"}, "rope_theta='1e6' is a string"),
        ({"rope_theta": None}, "rope_theta is null"),
        ({"rope_scaling": {**YARN, "factor": "8"}}, "factor='8' is a string"),
        ({"rope_scaling": {**YARN, "factor": None}}, "factor=None: it is taken as 4"),
        ({"rope_scaling": {**YARN, "rope_theta": 5e5}}, "theta is there twice: 500000 beside the scaling, 10000 at"),
        ({"rope_scaling": YARN, "original_max_position_embeddings": 2048}, "is there twice: 1024 beside the scaling"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "is missing: yarn takes max_position_embeddings=4096"),
        ({"rope_scaling": {**YARN, "type": "linear"}}, "type='linear' and rope_type='yarn': rope_type is taken"),
        ({"rope_scaling": {**YARN, "betafast": 3}}, "no rope type has betafast"),
        ({"rope_scaling": {**YARN, "beta_fast": 0}}, "beta_fast=0 counts as not given"),
        ({"rope_parameters": {"full_attention": YARN}}, "llama has one rotation for all layers"),
        ({"rotary_emb_base": 500}, "rotary_emb_base is not a name of theta that llama reads"),
        ({"model_type": "my_llama"}, "model_type='my_llama' is not one of Transformers"),
        ({"model_type": None}, "model_type='' is not one of Transformers"),
        ({"model_type": "cohere2_moe", "rope_scaling": YARN}, "does not read rope_scaling"),
        ({"model_type": "gemma3_text", "rope_parameters": YARN}, "names no layer type, so gemma3_text ignores it"),
    ],
)
def test_what_programs_may_take_otherwise_is_a_note(tmp_path, fields, note):
    assert any(note in each for each in report_of(written(tmp_path, {**LLAMA, **fields})).notes)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": {}},
        {"rope_scaling": None, "rope_parameters": None},
        {"rope_scaling": False},
        {"text_config": None},
        {"text_config": {}},
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_scaling": {"factor": 8.0}},
    ],
)
def test_what_says_nothing_is_plain(tmp_path, fields):
    (rotation,) = report_of(written(tmp_path, {**LLAMA, **fields})).rotations.values()
    assert (rotation.rope_type, rotation.theta, rotation.width) == ("default", 10000.0, 16)


@pytest.mark.parametrize("sections", [3, "x", {}, [], [1, 2, 3, 4, 5], [16, "x"], [16, -1], [16, True], [2, 2**23]])
def test_sections_that_are_none_are_refused(tmp_path, sections):
    fields = {**LLAMA, "model_type": "qwen2_vl", "rope_scaling": {"type": "mrope", "mrope_section": sections}}
    start = time.perf_counter()
    assert "mrope_section" in refused(written(tmp_path, fields))
    assert time.perf_counter() - start < 0.5


def test_many_unknown_keys_make_one_short_note(tmp_path):
    entry = {"rope_type": "default", **{f"{'k' * 200}{i}": i for i in range(1000)}}
    (note,) = report_of(written(tmp_path, {**LLAMA, "rope_scaling": entry})).notes
    assert len(note) < 400


def test_layers_without_positions_have_none(tmp_path):
    fields = {"model_type": "gemma3_text", "rope_parameters": {"full_attention": None, "sliding_attention": {}}}
    assert list(report_of(written(tmp_path, fields)).rotations) == ["sliding_attention"]
    fields["rope_parameters"]["sliding_attention"] = None
    assert "null for every layer type" in refused(written(tmp_path, fields))
    fields["rope_parameters"]["sliding_attention"] = 3
    assert "sliding_attention=3 must be an object" in refused(written(tmp_path, fields))
    fields["rope_parameters"] = {"full_attention": None}
    assert report_of(written(tmp_path, fields)).rotations.keys() == {"sliding_attention"}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"[" * 100000, "is not JSON"),
        (b'{"a":' * 100000, "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b'{"model_type": "\xe9"}', "is not JSON"),
        (b"[1, 2]", "contains a list"),
        (b"null", "contains a NoneType"),
        (b'"llama"', "contains a str"),
        (b"1" * 5000, "is not JSON"),
    ],
)
def test_what_is_no_config_says_so(tmp_path, content, reason):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    assert reason in refused(path)
    assert main([str(path)]) == 2


def test_a_byte_order_mark_is_skipped(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(LLAMA).encode())
    assert report_of(path).rotations[""].width == 16


def test_a_huge_file_is_not_read(tmp_path):
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(100 * 2**20)
    start = time.perf_counter()
    assert "a config has at most" in refused(path)
    assert time.perf_counter() - start < 0.5


def test_places_without_a_config(tmp_path, capsys):
    for place in (tmp_path, tmp_path / "nowhere", tmp_path / ("x" * 5000), "a\0b"):
        assert main([str(place)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "meta-llama/Llama-3.1-8B"}')
    assert "has adapters of 'meta-llama/Llama-3.1-8B', which is no folder here" in refused(tmp_path)
    for base in (None, 5, [], "x" * 5000):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
        assert main([str(tmp_path)]) == 2
    (tmp_path / "config.json").mkdir()
    assert main([str(tmp_path)]) == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_rights_is_named(tmp_path):
    path = written(tmp_path, LLAMA)
    path.chmod(0)
    assert "cannot be read" in refused(path)


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def setting(name, kind, value):
    return text(name) + struct.pack("<I", kind) + value


def gguf_bytes(*settings, tensors=b"", count=0, magic=b"GGUF", version=3, said=None):
    head = magic + struct.pack("<IQQ", version, count, len(settings) if said is None else said)
    return head + b"".join(settings) + tensors


SETTINGS = [
    setting("general.architecture", 8, text("llama")),
    setting("llama.context_length", 4, struct.pack("<I", 4096)),
    setting("llama.embedding_length", 4, struct.pack("<I", 64)),
    setting("llama.attention.head_count", 4, struct.pack("<I", 4)),
    setting("llama.rope.freq_base", 6, struct.pack("<f", 10000.0)),
    setting("llama.rope.scaling.type", 8, text("yarn")),
    setting("llama.rope.scaling.factor", 6, struct.pack("<f", 4.0)),
    setting("llama.rope.scaling.original_context_length", 4, struct.pack("<I", 1024)),
    setting("llama.rope.dimension_sections", 9, struct.pack("<IQ4i", 5, 4, 2, 3, 3, 0)),
    setting("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 2) + text("a") + text("b")),
]
LISTS = text("rope_freqs.weight") + struct.pack("<IQIQ", 1, 8, 0, 0)


def whole():
    header = gguf_bytes(*SETTINGS, tensors=LISTS, count=1)
    return header + bytes(-len(header) % 32) + struct.pack("<8f", *(1.0 + i for i in range(8)))


def test_a_gguf_file_is_read_and_cut_at_every_byte_is_not(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(whole())
    (rotation,) = report_of(path).rotations.values()
    assert rotation.frequencies() == pytest.approx([10000.0 ** (-i / 8) / (1 + i) for i in range(8)])
    for end in range(len(whole())):
        path.write_bytes(whole()[:end])
        refused(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (gguf_bytes(*SETTINGS, version=1), "version 1; 2 and 3 are known"),
        (gguf_bytes(*SETTINGS, version=4), "version 4"),
        (gguf_bytes(*SETTINGS, magic=b"GGML"), "does not begin with the letters GGUF"),
        (gguf_bytes(*SETTINGS, said=2**40), f"{2**40} settings"),
        (gguf_bytes(*SETTINGS, count=2**40), f"{2**40} tensors"),
        (gguf_bytes(*SETTINGS, said=len(SETTINGS) + 1), "truncated"),
        (gguf_bytes(struct.pack("<Q", 2**62)), f"a text of {2**62} bytes"),
        (gguf_bytes(setting("a", 77, b"")), "a value of type 77"),
        (gguf_bytes(setting("a", 9, struct.pack("<IQ", 4, 2**60))), f"an array of {2**60} values"),
        (gguf_bytes(setting("a", 9, struct.pack("<IQ", 9, 1))), "an array of 1 values of type 9"),
        (gguf_bytes(setting("a", 9, struct.pack("<IQ", 8, 5000) + struct.pack("<Q", 2**63) * 2)), "truncated"),
        (gguf_bytes(setting("general.alignment", 8, text("x"))), "general.alignment='x'"),
        (gguf_bytes(setting("general.alignment", 4, struct.pack("<I", 0))), "general.alignment=0"),
        (gguf_bytes(*SETTINGS, count=1, tensors=text("t") + struct.pack("<I", 99)), "a tensor of 99 dimensions"),
        (gguf_bytes(*SETTINGS, count=1, tensors=LISTS[:-8] + struct.pack("<Q", 2**63)), "truncated"),
        (gguf_bytes(*SETTINGS, count=1, tensors=LISTS[:-8] + struct.pack("<Q", 2**62)), "cannot be read|truncated"),
        (gguf_bytes(), "head_dim, or hidden_size / num_attention_heads, is 0"),
        (gguf_bytes(setting("general.architecture", 4, struct.pack("<I", 7)), *SETTINGS[1:]), "head_dim"),
        (gguf_bytes(*SETTINGS[:5], setting("llama.rope.scaling.type", 4, struct.pack("<I", 7))), "rope_type=7"),
        (gguf_bytes(*SETTINGS[:5], setting("llama.rope.freq_base", 8, text("x"))), "rope_theta='x' must be a number"),
        (gguf_bytes(*SETTINGS[:6], setting("llama.rope.scaling.factor", 8, text("x"))), "factor='x' must be"),
    ],
)
def test_a_broken_gguf_file_says_what_is_wrong(tmp_path, content, reason):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert re.search(reason, refused(path))


@given(st.data())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_changed_bytes_of_a_gguf_file_end_in_one_line(tmp_path, data):
    content = bytearray(whole())
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=6)):
        content[place] = data.draw(st.integers(0, 255))
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + content[4:])
    report, said = outcome(path)
    assert report or said.startswith(str(path))


def test_the_fields_of_a_gguf_file_have_the_names_of_transformers(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(whole())
    fields = fields_of_gguf(path)
    assert fields["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    assert (fields["rope_theta"], fields["mrope_section"]) == (10000.0, [2, 3, 3])


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["yarn", "1e6", 10**40, -1, 0, 1, 1e308, 5e-324, "nan", "\ud800"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
TYPES = st.sampled_from(["default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional", "su", "mrope"])
NUMBERS = st.sampled_from([0, 1, 2, 4, 0.5, 8.0, 1e4, 1e-30, 1e9, 32, 4096, 131072, 1.0000001, None, "8"])
LISTS_OF = st.integers(1, 70).flatmap(
    lambda size: st.lists(st.sampled_from([1.0, 2, 1e30]), min_size=size, max_size=size)
)
ENTRY = st.fixed_dictionaries(
    {"rope_type": TYPES | JUNK, "factor": NUMBERS | JUNK},
    optional={
        **dict.fromkeys(
            ("rope_theta", "original_max_position_embeddings", "attention_factor", "mscale"), NUMBERS | JUNK
        ),
        **dict.fromkeys(("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "alpha"), NUMBERS | JUNK),
        **dict.fromkeys(("mscale_all_dim", "partial_rotary_factor", "long_mscale"), NUMBERS | JUNK),
        **dict.fromkeys(("short_factor", "long_factor"), LISTS_OF | JUNK),
        **dict.fromkeys(("max_trained_positions", "rope_dim"), NUMBERS | JUNK),
        "type": TYPES | JUNK,
        "truncate": st.booleans() | JUNK,
        "mrope_section": st.just([16, 24, 24]) | JUNK,
    },
)
NESTED = st.dictionaries(st.sampled_from(["full_attention", "sliding_attention", "x"]), ENTRY | JUNK, max_size=3)
ENTRIES = ENTRY | NESTED | JUNK
MODEL_TYPES = ["llama", "gemma3_text", "gemma4_text", "phi3", "deepseek_v3", "qwen2_vl", "gptj", "olmo3", "mistral4"]
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "model_type": st.sampled_from([*MODEL_TYPES, "laguna", "hunyuan_v1_dense", "zaya", "remote"]) | JUNK,
        "rope_scaling": ENTRIES,
        "rope_parameters": ENTRIES,
        **dict.fromkeys(("hidden_size", "num_attention_heads", "head_dim", "qk_rope_head_dim"), NUMBERS | JUNK),
        **dict.fromkeys(("rotary_dim", "global_head_dim", "rotary_pct", "rope_local_base_freq"), NUMBERS | JUNK),
        **dict.fromkeys(("rope_theta", "max_position_embeddings", "partial_rotary_factor"), NUMBERS | JUNK),
        **dict.fromkeys(("original_max_position_embeddings", "sliding_window_pattern"), NUMBERS | JUNK),
        "layer_types": st.lists(st.sampled_from(["full_attention", "sliding_attention", 3, None])) | JUNK,
        "per_layer_config": st.dictionaries(st.sampled_from(["0", "1", "x"]), JUNK, max_size=2) | JUNK,
        "architectures": JUNK | st.lists(st.sampled_from(["LlamaForCausalLM", "DeepseekV3ForCausalLM"])),
        "rope_patch": JUNK,
    },
)
CONFIGS = FIELDS | st.fixed_dictionaries({"text_config": FIELDS | JUNK}, optional={"model_type": st.just("llava")})


@given(CONFIGS)
@example({"rope_scaling": {**YARN, "\ud800\n": {}}, "layer_types": ["\ud800"]})
@example({"rope_scaling": {**LONGROPE, "long_mscale": "x"}})
@example({"rope_scaling": {"rope_type": "dynamic", "factor": 1e9}, "max_position_embeddings": 1})
@example({"rope_scaling": {"rope_type": "default", "factor": 1, "type": []}})
@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_configs_end_in_a_report_or_in_one_line(tmp_path, fields):
    path = written(tmp_path, fields)
    report, said = outcome(path)
    if report:
        assert all(len(note) < 400 for note in report.notes)
    else:
        assert said.startswith(str(path))
        assert "\n" not in said
        assert len(said) < len(str(path)) + 400


SMALL = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 4096}
ODD = [[], [1], {}, {"a": 1}, "x", "8", True, 0, -1, 0.5, None, 1e30, float("nan"), 10**40]
OF_ONE_READER = ["max_trained_positions", "rope_dim", "alpha", "type", "long_mscale"]
AT_THE_TOP = ["rope_theta", "rope_local_base_freq", "sliding_window_pattern", "hidden_size", "num_attention_heads"]


@pytest.mark.parametrize("name", OF_ONE_READER)
def test_an_odd_value_that_one_reader_alone_takes_ends_in_a_report_or_in_one_line(tmp_path, name):
    for rope_type in ("default", "dynamic", "yarn"):
        for value in ODD:
            entry = {**YARN, "rope_type": rope_type, name: value}
            outcome(written(tmp_path, {**SMALL, "model_type": "llama", "rope_scaling": entry}))


@pytest.mark.parametrize("name", AT_THE_TOP)
def test_an_odd_value_at_the_top_that_one_reader_takes_ends_in_a_report_or_in_one_line(tmp_path, name):
    for model_type in ("gemma3_text", "llama"):
        for value in ODD:
            layers = {"layer_types": ["full_attention", "sliding_attention"]}
            outcome(written(tmp_path, {**SMALL, "model_type": model_type, **layers, name: value}))


def test_vllm_has_no_base_beyond_what_the_factor_reaches(tmp_path):
    """The base of dynamic is b (k N / L - (k - 1))^(d / (d - 2)): at k = 2 and N = 4096, L = 8192 leaves nothing."""
    entry = {"rope_type": "dynamic", "factor": 2.0}

    def of_vllm(trained):
        fields = {**SMALL, "model_type": "llama", "rope_scaling": {**entry, "max_trained_positions": trained}}
        readings = report_of(written(tmp_path, fields)).readings
        return next(reading for reading in readings if reading.reader == "vLLM")

    assert of_vllm(8192).verdict == "refuses"
    assert "negative base" in of_vllm(8192).reasons[0]
    grown = next(iter(of_vllm(8000).rotations.values()))
    assert grown.theta == pytest.approx(10000.0 * (2 * 4096 / 8000 - 1) ** (16 / 14), rel=1e-12)


def test_every_type_of_transformers_survives_a_config_of_its_name_alone(tmp_path):
    from rope_patch.doctor.architecture import _table

    read = 0
    for name in _table():
        path = written(tmp_path, {"model_type": name})
        try:
            assert rotations_of(read_source(path)).rotations
            read += 1
        except Unreadable:
            assert architecture_of(name).unread or architecture_of(name).only_if
    assert read > 250
