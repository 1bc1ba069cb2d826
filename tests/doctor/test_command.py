"""`rope-doctor`, and `rope-patch doctor`: help, exit statuses, errors, pairs, surveys, and what it costs to ask."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest

from rope_patch.cli import main as rope_patch_command
from rope_patch.doctor.command import OPTIONS, main

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "rope_patch" / "doctor" / "schema.json").read_text(encoding="utf-8"))

LLAMA = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4},
    **{"max_position_embeddings": 8192, "rope_theta": 500000.0},
}
INTEGER = {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 4}}
"""A factor that vLLM does not start with."""
TWICE = {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
"""One theta at the top, another in its new place."""
LISTS = {
    **{**LLAMA, "model_type": "phi3", "architectures": ["Phi3ForCausalLM"]},
    **{"original_max_position_embeddings": 4096, "max_position_embeddings": 8192},
    "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
}
"""Two lists, of which vLLM takes the second for all texts."""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes configs by name of their folder; commands run beside them."""
    monkeypatch.chdir(tmp_path)

    def written(**configs):
        for name, config in configs.items():
            (tmp_path / name).mkdir(parents=True, exist_ok=True)
            text = config if isinstance(config, str) else json.dumps(config)
            (tmp_path / name / "config.json").write_text(text)

    return written


def printed(words, capsys, status):
    capsys.readouterr()
    assert main(words) == status
    return capsys.readouterr().out


def document(words, capsys, status):
    """The JSON that a command prints, held to the schema; NaN and Infinity are no JSON."""

    def refused(constant):
        raise AssertionError(f"{constant} is no number in JSON")

    found = json.loads(printed([*words, "--json"], capsys, status), parse_constant=refused)
    jsonschema.validate(found, SCHEMA, cls=jsonschema.Draft202012Validator)
    return found


def refusal(words, capsys):
    capsys.readouterr()
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith("rope-doctor: ")
    return line


@pytest.mark.parametrize("command", [main, lambda words: rope_patch_command(["doctor", *words])])
def test_help_explains_every_option(command, capsys):
    assert command(["--help"]) == 0
    shown = capsys.readouterr().out
    program = "rope-doctor" if command is main else "rope-patch doctor"
    assert shown.startswith(f"usage: {program} ")
    assert f"\n    {program} FOLDER\n" in shown
    assert all(
        settings.get("metavar", word) in shown and len(settings["help"]) > 20 for word, settings in OPTIONS.items()
    )


def test_the_status_says_whether_readers_agree(write, capsys):
    write(fine=LLAMA, wrong=INTEGER, broken='{"rope_theta": ')
    assert "agrees" in printed(["fine"], capsys, 0)
    assert "does not load it" in printed(["wrong", "--for", "vllm"], capsys, 1)
    printed(["wrong", "--for", "llama.cpp"], capsys, 0)
    assert "broken/config.json is not JSON" in refusal(["broken"], capsys)


def test_options_may_stand_anywhere_and_readers_are_joined_by_commas(write, capsys):
    write(wrong=INTEGER)
    for words in (
        ["--for=vllm,mlx", "wrong"],
        ["wrong", "--for", "vllm", "--for", "mlx"],
        ["--for", "vllm,,mlx", "wrong"],
    ):
        assert [each["reader"] for each in document(words, capsys, 1)["readers"]] == ["vLLM", "mlx-lm"]
    assert document(["wrong", "--for", "vllm", "wrong"], capsys, 0)["differences"] == []


def test_strict_also_fails_where_some_texts_are_computed_otherwise(write, capsys):
    write(lists=LISTS)
    (reading,) = document(["lists", "--for", "vllm"], capsys, 0)["readers"]
    assert reading["verdict"] == "partly"
    printed(["lists", "--for", "vllm", "--strict"], capsys, 1)


def test_strict_also_fails_where_a_config_is_ambiguous(write, capsys):
    write(twice=TWICE, fine=LLAMA)
    assert "theta is there twice" in printed(["twice", "--for", "transformers"], capsys, 0)
    printed(["twice", "--for", "transformers", "--strict"], capsys, 1)
    printed(["fine", "--for", "transformers", "--strict"], capsys, 0)


def test_that_a_model_type_is_unknown_is_no_doubt(write, capsys):
    write(mine=LLAMA | {"model_type": "mine"})
    assert "note: model_type='mine'" in printed(["mine", "--strict", "--for", "vllm"], capsys, 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "0 checkpoints are given; give one, or two to compare, or --all"),
        (["a", "b", "c"], "3 checkpoints are given"),
        (["nowhere"], "nowhere is not there"),
        (["fine", "--nope"], "unrecognized arguments: --nope; rope-doctor --help explains all options"),
        (["fine", "--jsn"], "unrecognized arguments: --jsn; did you mean '--json'?"),
        (["fine", "--scheme", "yarn"], "`rope-patch describe --model CHECKPOINT --scheme ...` shows what a scheme"),
        (["fine", "--readers", "vllm"], "did you mean '--for'?"),
        (["someone/something"], "of a Hub ID, fetch it first: hf download someone/something config.json"),
        (["fine", "--for"], "argument --for: expected one argument"),
        (["fine", "--for", "vlm"], "there is no reader 'vlm'; did you mean 'vllm'? allowed: transformers, "),
        (["fine", "--for", "zzz==1"], "there is no reader 'zzz'; allowed: transformers, "),
        (["--all", "--for", "vlm"], "there is no reader 'vlm'"),
        (["--all", "nothing/**/*.json"], "no file matches 'nothing/**/*.json'"),
        (["fine\0"], "contains a NUL character"),
        (["fine\udcff"], "contains a NUL character or a byte that is not UTF-8"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words, said, write, capsys):
    write(fine=LLAMA)
    assert said in refusal(words, capsys)


def test_a_file_that_may_not_be_read_is_one_line(write, capsys, monkeypatch):
    write(fine=LLAMA)

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied", "fine/config.json")

    monkeypatch.setattr(Path, "open", denied)
    assert "Permission denied" in refusal(["fine/config.json"], capsys)


def test_two_checkpoints_agree_or_part(write, capsys):
    write(trained=LLAMA, same={**LLAMA, "vocab_size": 9}, other={**LLAMA, "rope_theta": 10000.0})
    assert document(["trained", "same"], capsys, 0)["agrees"]
    assert "both state the same positions" in printed(["trained", "same"], capsys, 0)
    (difference,) = document(["trained", "other"], capsys, 1)["differences"]
    assert difference["angles"].keys() == {"8192", "16384"}
    # the largest difference of an angle at L, by the definition
    angles = [8192 * abs(500000.0 ** (-i / 16) - 10000.0 ** (-i / 16)) for i in range(0, 16, 2)]
    assert difference["angles"]["8192"] == pytest.approx(max(angles), rel=1e-9)
    assert "the second differs from the first: from position " in printed(["trained", "other"], capsys, 1)


WEB = {"port": 8080, "title": "Demo", "api": {"model": "llama"}}


def test_all_checks_the_configs_of_a_repository(write, capsys):
    write(**{"models/fine": LLAMA, "models/wrong": INTEGER, "web": WEB, "node_modules/x": INTEGER, ".cache": INTEGER})
    out = printed(["--all", "--for", "vllm,llama.cpp"], capsys, 1)
    assert "models/fine/config.json: vLLM, llama.cpp agree\n" in out
    assert "models/wrong/config.json says\n" in out
    assert out.count("llama.cpp") == 1  # which agrees on both
    assert "web/config.json: skipped, no field of a text model\n" in out
    assert out.endswith("\n3 files: 1 agree, 1 differ, 1 skipped\n")
    found = document(["--all", "--for", "vllm"], capsys, 1)
    assert [report["config"] for report in found["reports"]] == ["models/fine/config.json", "models/wrong/config.json"]
    assert found["skipped"] == [{"config": "web/config.json", "why": "no field of a text model"}]
    assert not found["agrees"]
    printed(["--all", "models/f*/*.json", "web", "models/fine/config.json"], capsys, 0)
    printed(["--all", "models", "--for", "llama.cpp"], capsys, 0)


def test_one_config_that_cannot_be_read_does_not_hide_the_others(write, capsys):
    write(fine=LLAMA, broken='{"rope_theta": ', wrong=INTEGER)
    found = document(["--all", "--for", "vllm"], capsys, 2)
    assert [each["config"] for each in found["unreadable"]] == ["broken/config.json"]
    assert len(found["reports"]) == 2
    assert "broken/config.json: unreadable, " in printed(["--all"], capsys, 2)


@pytest.mark.parametrize(
    "content",
    [
        WEB,
        "[1, 2]",
        "// comments\n{port: 80}",
        "",
        {"word_embedding_dimension": 384, "pooling_mode_mean_tokens": True},
        {"_class_name": "FluxTransformer2DModel", "_diffusers_version": "0.36.0", "num_attention_heads": 24},
        {"model_type": "xgboost", "max_depth": 6},
    ],
    ids=["web", "list", "comments", "empty", "pooling", "diffusers", "another model"],
)
def test_configs_of_other_programs_are_skipped_and_named(content, write, capsys):
    write(other=content)
    assert document(["--all", "--strict"], capsys, 0)["skipped"][0]["config"] == "other/config.json"


def test_a_file_with_a_sign_of_patterns_in_its_name_is_a_file(write, capsys):
    write(**{"odd[1]": LLAMA})
    assert len(document(["--all", "odd[1]/config.json"], capsys, 0)["reports"]) == 1
    assert len(document(["--all", "odd[1]"], capsys, 0)["reports"]) == 1


def test_a_gguf_file_is_surveyed_too(write, tmp_path, capsys):
    def text(value):
        return struct.pack("<Q", len(value)) + value.encode()

    entries = {"llama.context_length": 8192, "llama.embedding_length": 64, "llama.attention.head_count": 4}
    header = b"".join(text(key) + struct.pack("<II", 4, value) for key, value in entries.items())
    header = text("general.architecture") + struct.pack("<I", 8) + text("llama") + header
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries) + 1) + header)
    assert document(["--all", "*.gguf"], capsys, 0)["reports"][0]["config"] == "m.gguf"


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "yarn", "factor": 1e9},
        {"rope_type": "dynamic", "factor": 1e9},
        {"rope_type": "linear", "factor": 1e-9},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1e-9, "original_max_position_embeddings": 2},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 32},
        {"rope_type": "yarn", "factor": 1e300},
        {"rope_type": "dynamic", "factor": 1e300},
        {"rope_type": "linear", "factor": 1e-300},
        {"rope_type": "linear", "factor": float("inf")},
        {"rope_type": "linear", "factor": float("nan")},
    ],
    ids=str,
)
def test_huge_and_tiny_numbers_are_finite_json_or_refused(scaling, write, capsys):
    write(huge={**LLAMA, "rope_scaling": scaling}, fine=LLAMA)
    for words in (["huge"], ["fine", "huge"]):
        capsys.readouterr()
        status = main([*words, "--json"])
        shown = capsys.readouterr()
        if status == 2:
            assert len(shown.err.splitlines()) == 1
        else:
            document(words, capsys, status)


def test_who_closes_stdout_is_told_nothing(write, tmp_path):
    write(fine=LLAMA)
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "rope_patch.doctor", "fine"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, cwd=tmp_path, env=environment)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


SEEN = """
import sys
from rope_patch.cli import main
status = main(["doctor", *sys.argv[1:]])
assert status == 0, status
heavy = {"torch", "transformers", "tyro", "numpy", "yaml", "rich"} & sys.modules.keys()
assert not heavy, heavy
"""


@pytest.mark.parametrize("words", [["--help"], ["fine", "--json"], ["--all"], ["fine", "fine"]])
def test_it_is_quick_and_imports_nothing_of_the_library(words, write, tmp_path):
    write(fine=LLAMA)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        command = [sys.executable, "-c", SEEN, *words]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        seconds.append(time.perf_counter() - began)
        assert done.returncode == 0, done.stderr
    assert min(seconds) < 0.3  # 0.1 on a machine that is quiet
