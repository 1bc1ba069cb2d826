"""What `doctor` says of folders that this library writes: what readers compute, and what they drop."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import rope_patch
from rope_patch.cli import main
from rope_patch.doctor import READERS, diagnose, read_source
from rope_patch.saving.export import export_checkpoint
from rope_patch.saving.loading import default_checkpoint

ROOT = Path(__file__).parents[1]
DEVIATIONS = [json.loads(row) for row in (ROOT / "docs/results/serving/deviations.jsonl").read_text().splitlines()]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 256},
}


def readings(folder):
    return {reading.reader: reading for reading in diagnose(read_source(folder)).readings}


def differing(folder):
    """Why each reader that does not agree differs."""
    return {name: "; ".join(found.reasons) for name, found in readings(folder).items() if found.verdict != "agrees"}


@pytest.fixture
def folder(tmp_path):
    """A config alone, with some keys changed; None takes one away."""

    def write(**changes):
        raw = json.loads((AutoConfig.from_pretrained(default_checkpoint())).to_json_string(use_diff=False)) | changes
        path = tmp_path / "config.json"
        path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
        return tmp_path

    return write


def test_all_readers_agree_on_a_plain_checkpoint(capsys):
    assert not differing(default_checkpoint())
    assert main(["doctor", default_checkpoint()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "  default, theta = 10000; texts up to 256 tokens"
    assert len([line for line in lines if " agrees (r" in line]) == len(READERS)


def test_a_scheme_in_the_record_alone_is_lost_everywhere(tmp_path, capsys):
    model = AutoModelForCausalLM.from_pretrained(default_checkpoint(), dtype=torch.float32)
    rope_patch.patch(model, "rerope:window=64+logn")
    model.save_pretrained(tmp_path)
    found = differing(tmp_path)
    assert found.keys() == {reader.name for reader in READERS}
    assert all("config.rope_patch records" in reasons for reasons in found.values())
    assert "unless rope_patch is installed with it" in found["vLLM"]
    assert main(["doctor", str(tmp_path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)["readers"]
    assert [reading["reader"] for reading in told] == [reader.name for reader in READERS]


def test_a_scheme_that_its_config_describes_too_is_not_lost(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(default_checkpoint(), dtype=torch.float32)
    rope_patch.patch(model, "yarn:factor=4")
    model.save_pretrained(tmp_path)
    assert "rope_patch" in json.loads((tmp_path / "config.json").read_text())
    found = differing(tmp_path)
    assert not any("config.rope_patch" in reasons for reasons in found.values())
    assert "Transformers 5" not in found


@pytest.mark.parametrize("scheme", ["pi:factor=4", "ntk:factor=4", "yarn:factor=4", "rope"])
def test_nothing_is_lost_of_an_export(tmp_path, scheme):
    export_checkpoint(default_checkpoint(), tmp_path / "out", scheme)
    found = differing(tmp_path / "out")
    dropped = scheme in ("pi:factor=4", "yarn:factor=4")
    assert found.keys() & {"ONNX Runtime GenAI"} == ({"ONNX Runtime GenAI"} if dropped else set())
    assert not found.keys() & {"Transformers 5", "Transformers 4", "vLLM", "SGLang", "llama.cpp", "mlx-lm"}


@pytest.mark.parametrize("scheme", ["yarn:factor=4,attention_factor=1.0", "yarn:factor=4,truncate=false"])
def test_llama_cpp_loses_what_its_export_says(tmp_path, scheme):
    export_checkpoint(default_checkpoint(), tmp_path / "out", scheme)
    found = differing(tmp_path / "out")
    assert "llama.cpp" in found
    assert not found.keys() & {"Transformers 5", "Transformers 4", "vLLM"}


@pytest.mark.parametrize(
    ("changes", "reader", "computed"),
    [
        ({"rope_parameters": {**YARN, "rope_theta": 1e4}}, "Transformers 4", {"rope_type": "default"}),
        (
            {"rope_parameters": {**YARN, "rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 1.0}},
            "llama.cpp",
            {"mscale": None, "attention_factor": None},
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "Transformers 4", {"theta": 1e4}),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4}}, "vLLM", None),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "llama.cpp",
            {"rope_type": "default"},
        ),
        ({"rope_parameters": LLAMA3, "max_position_embeddings": 1024}, "llama.cpp", {"original": 8192}),
        (
            {
                **{"rope_parameters": {**YARN, "rope_theta": 1e4}, "rope_scaling": None},
                "max_position_embeddings": 1024,
            },
            "mlx-lm",
            {"rope_type": "default"},
        ),
    ],
)
def test_what_a_reader_makes_of_a_config(folder, changes, reader, computed):
    found = readings(folder(**changes))[reader]
    if computed is None:
        assert found.verdict == "refuses"
        return
    assert found.verdict == "differs"
    (rotation,) = found.rotations.values()
    assert {name: getattr(rotation, name) for name in computed} == computed
    assert found.reasons


def test_a_context_that_a_reader_cuts_is_told(folder):
    found = readings(folder(rope_parameters={**YARN, "rope_theta": 1e4}))["llama.cpp"]
    assert (found.verdict, found.limit) == ("differs", 256)


def test_an_l_that_is_missing_is_noted(folder):
    entry = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    notes = diagnose(read_source(folder(rope_parameters=entry, max_position_embeddings=1024))).notes
    assert any("original_max_position_embeddings is missing" in note and "=1024" in note for note in notes)


@pytest.mark.parametrize("name", ["nowhere", "."])
def test_what_is_no_checkpoint_ends_in_one_line(name, tmp_path, capsys):
    assert main(["doctor", str(tmp_path / name)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_readers_are_chosen_and_marked(capsys):
    assert main(["doctor", default_checkpoint(), "--for", "mlx,onnx", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["readers"]
    assert [reading["reader"] for reading in told] == ["mlx-lm", "ONNX Runtime GenAI"]
    assert [reading["known"] for reading in told] == ["run", "read"]
    assert main(["doctor", default_checkpoint(), "--for", "mxl"]) == 2
    assert "did you mean 'mlx'" in capsys.readouterr().err
