"""`rope-patch doctor`: what readers understand of a folder, and what they drop."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import rope_patch
from rope_patch.cli import main
from rope_patch.saving.doctor import READERS, diagnose
from rope_patch.saving.export import export_checkpoint
from rope_patch.saving.loading import default_checkpoint

ROOT = Path(__file__).parents[1]
DEVIATIONS = [json.loads(row) for row in (ROOT / "docs/results/serving/deviations.jsonl").read_text().splitlines()]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


def losses(folder):
    return {reading.reader: "; ".join(reading.lost) for reading in diagnose(folder)}


@pytest.fixture
def folder(tmp_path):
    """A config alone, with some keys changed; None takes one away."""

    def write(**changes):
        raw = json.loads((AutoConfig.from_pretrained(default_checkpoint())).to_json_string(use_diff=False)) | changes
        path = tmp_path / "config.json"
        path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
        return tmp_path

    return write


def test_nothing_is_lost_of_a_plain_checkpoint(capsys):
    assert set(losses(default_checkpoint()).values()) == {""}
    assert main(["doctor", default_checkpoint()]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "Transformers 5      default, rope_theta = 10000.0 (run, 5.23)"


def test_a_scheme_in_the_record_alone_is_lost_everywhere(tmp_path, capsys):
    model = AutoModelForCausalLM.from_pretrained(default_checkpoint(), dtype=torch.float32)
    rope_patch.patch(model, "rerope:window=64+logn")
    model.save_pretrained(tmp_path)
    found = losses(tmp_path)
    assert all("rerope:window=64+logn" in found[reader] for reader in READERS)
    assert "unless rope_patch is installed with it" in found["vLLM"]
    assert main(["doctor", str(tmp_path), "--json"]) == 1
    assert [reading["reader"] for reading in json.loads(capsys.readouterr().out)] == list(READERS)


def test_a_scheme_that_its_config_describes_too_is_not_lost(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(default_checkpoint(), dtype=torch.float32)
    rope_patch.patch(model, "yarn:factor=4")
    model.save_pretrained(tmp_path)
    assert "rope_patch" in json.loads((tmp_path / "config.json").read_text())
    found = losses(tmp_path)
    assert not any("config.rope_patch" in lost for lost in found.values())
    assert found["Transformers 5"] == ""


@pytest.mark.parametrize("scheme", ["pi:factor=4", "ntk:factor=4", "yarn:factor=4", "rope"])
def test_nothing_is_lost_of_an_export(tmp_path, scheme):
    export_checkpoint(default_checkpoint(), tmp_path / "out", scheme)
    found = losses(tmp_path / "out")
    assert bool(found.pop("ONNX Runtime GenAI")) == (scheme in ("pi:factor=4", "yarn:factor=4"))
    assert set(found.values()) == {""}


@pytest.mark.parametrize(
    ("scheme", "lost"),
    [
        ("yarn:factor=4,attention_factor=1.0", "computes the temperature"),
        ("yarn:factor=4,truncate=false", "rounds the ends"),
    ],
)
def test_llama_cpp_loses_what_its_export_says(tmp_path, scheme, lost):
    export_checkpoint(default_checkpoint(), tmp_path / "out", scheme)
    found = losses(tmp_path / "out")
    assert lost in found.pop("llama.cpp")
    assert found["Transformers 5"] == found["Transformers 4"] == found["vLLM"] == ""


@pytest.mark.parametrize(
    ("changes", "reader", "lost"),
    [
        (
            {"rope_parameters": {**YARN, "rope_theta": 10000.0}},
            "Transformers 4",
            "it reads only rope_scaling and rope_theta",
        ),
        ({"rope_parameters": {**YARN, "rope_theta": 10000.0}}, "llama.cpp", "beyond max_position_embeddings=256"),
        ({"rope_parameters": {**YARN, "rope_theta": 1e4, "mscale": 0.7}}, "llama.cpp", "computes the temperature"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "Transformers 4", "rope_theta = 500000.0"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4}}, "vLLM", "must be a float"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "llama.cpp", "it keeps the"),
        (
            {
                "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
                "max_position_embeddings": 1024,
            },
            "Transformers 5",
            "original_max_position_embeddings is missing; max_position_embeddings=1024",
        ),
        (
            {
                "rope_parameters": {
                    **{"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0},
                    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 256},
                },
                "max_position_embeddings": 1024,
            },
            "llama.cpp",
            "8192 is used instead",
        ),
    ],
)
def test_what_a_config_loses(folder, changes, reader, lost):
    assert lost in losses(folder(**changes))[reader]


@pytest.mark.parametrize("name", ["nowhere", "."])
def test_what_is_no_checkpoint_ends_in_one_line(name, tmp_path, capsys):
    assert main(["doctor", str(tmp_path / name)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_readers_are_chosen_and_marked(capsys):
    assert main(["doctor", default_checkpoint(), "--for", "mlx,onnx"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["mlx-lm", "ONNX Runtime GenAI"]
    assert ("(run, 0.32.2)" in lines[0], "(read, 0.18.0)" in lines[1]) == (True, True)
    assert main(["doctor", default_checkpoint(), "--for", "mxl"]) == 2


def test_mlx_lm_does_not_read_the_words_of_transformers_5(folder):
    place = folder(rope_parameters=YARN | {"rope_theta": 10000.0}, max_position_embeddings=1024, rope_scaling=None)
    assert "it reads only rope_scaling and rope_theta" in losses(place)["mlx-lm"]


@pytest.mark.parametrize(
    "row",
    # that mlx-lm's code for Phi reads no scaling is in docs/serving.md alone
    [row for row in DEVIATIONS if not row["agrees"] and not row["vector"].startswith("partial")],
    ids=lambda row: f"{row['reader']}-{row['vector']}",
)
def test_what_a_reader_was_seen_to_misread_is_told(tmp_path, row):
    config = json.loads((ROOT / "vectors" / f"{row['vector']}.json").read_text())["config"]
    entry = config.get("rope_parameters", {})
    if row["reader"].startswith("mlx") and entry.get("rope_type", "default") != "default":
        config |= {"rope_scaling": entry, "rope_theta": entry["rope_theta"]}  # the words that it reads
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    (reading,) = [each for each in diagnose(tmp_path) if each.reader == row["reader"].rpartition(" ")[0]]
    assert reading.lost or reading.partly
