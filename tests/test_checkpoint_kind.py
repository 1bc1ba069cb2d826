"""What is at a path is told alike wherever it is asked: by loading, by the commands, by export."""

from __future__ import annotations

import json
import shutil

import pytest

import rope_patch
from rope_patch.errors import EvaluationError, NoCheckpoint
from rope_patch.saving.checkpoint_kind import kind_of_checkpoint
from rope_patch.saving.export import describe_serving
from rope_patch.saving.loading import (
    default_checkpoint,
    load_config,
    load_model,
    load_tokenizer,
    quiet_transformers,
    trained_length,
)

ASKED = [
    rope_patch.from_pretrained,
    load_model,
    load_tokenizer,
    load_config,
    trained_length,
    describe_serving,
]


@pytest.fixture
def places(tmp_path):
    """Folders and files of every kind, by name."""
    files = {
        "model/config.json": "{}",
        "adapters/adapter_config.json": "{}",
        "adapters/config.json": "{}",
        "trained/checkpoint-5/config.json": "{}",
        "trained/checkpoint-20/config.json": "{}",
        "model.gguf": "GGUF",
        "notes.txt": "mine",
        "empty/notes.txt": "mine",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "kind"),
    [("model", "model"), ("adapters", "adapters"), ("model.gguf", "gguf"), ("trained/checkpoint-20", "model")],
)
def test_kinds(places, name, kind):
    assert kind_of_checkpoint(places / name) == kind_of_checkpoint(str(places / name)) == kind


def test_a_name_that_is_not_here_is_one_for_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert kind_of_checkpoint("owner/name") == kind_of_checkpoint("gpt2") == "hub"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert kind_of_checkpoint("model") == kind_of_checkpoint(".", subfolder="model") == "model"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere", "no folder or file has this name"),
        ("empty", "the folder has no config.json"),
        ("notes.txt", "is not a checkpoint: it is neither a folder nor a GGUF file"),
        ("trained", "it is a Trainer's output, whose newest checkpoint is '.*checkpoint-20'"),
    ],
)
@pytest.mark.parametrize("ask", ASKED, ids=lambda ask: ask.__name__)
def test_everyone_who_asks_is_told_the_same(places, ask, name, said):
    with quiet_transformers(), pytest.raises(NoCheckpoint, match=said) as caught:
        ask(str(places / name))
    assert isinstance(caught.value, OSError)  # of Transformers' own `from_pretrained`
    assert isinstance(caught.value, EvaluationError)  # ... and of a measurement
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ask", [each for each in ASKED if each is not load_tokenizer], ids=lambda ask: ask.__name__)
def test_a_config_that_is_none_is_one_line_for_everyone(tmp_path, ask):
    folder = tmp_path / "model"
    shutil.copytree(default_checkpoint(), folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "no_such_type"}))
    with quiet_transformers(), pytest.raises(NoCheckpoint, match=r"cannot be loaded") as caught:
        ask(str(folder))
    assert "\n" not in str(caught.value)
