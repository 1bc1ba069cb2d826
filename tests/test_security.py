"""Nothing that lies beside weights is run, and nothing is unpickled that was not asked for."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

import rope_patch
from rope_patch import UnsupportedModel
from rope_patch.errors import EvaluationError
from rope_patch.saving.loading import load_model, load_tokenizer
from tests.families import build

REMOTE_CODE = "import pathlib\npathlib.Path({mark!r}).touch()\n"


@pytest.fixture
def folder(tmp_path):
    """A checkpoint whose model and tokenizer are code beside the weights, which leaves a mark when it is run."""
    build("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {
        "model_type": "not_a_type",
        "architectures": ["NotAType"],
        "auto_map": {"AutoConfig": "modeling.C", "AutoModelForCausalLM": "modeling.M"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["modeling.T", null]}}')
    (tmp_path / "modeling.py").write_text(REMOTE_CODE.format(mark=str(tmp_path / "ran")))
    return tmp_path


@pytest.mark.parametrize("trust", [{}, {"trust_remote_code": True}])
def test_code_beside_the_weights_is_refused(folder, trust):
    with pytest.raises(UnsupportedModel, match="never run here"):
        rope_patch.from_pretrained(folder, **trust)
    for load in (load_model, load_tokenizer):
        with pytest.raises(EvaluationError):
            load(str(folder))
    assert not (folder / "ran").exists()


def test_pickled_weights_are_read_only_where_they_are_asked_for(tmp_path):
    model = build("llama")
    model.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    torch.save(load_file(weights), tmp_path / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(OSError, match="use_safetensors=False"):
        rope_patch.from_pretrained(tmp_path)
    loaded = rope_patch.from_pretrained(tmp_path, use_safetensors=False)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


def test_a_folder_without_weights_is_told_nothing_of_pickles(tmp_path):
    folder = tmp_path / "of-safetensors"
    build("llama").save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match="no file named") as caught:
        rope_patch.from_pretrained(folder)
    assert "use_safetensors=False" not in str(caught.value)


class Leaves:
    """What a pickle of it does to whoever reads it."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


def test_a_pickle_that_does_something_does_not(tmp_path):
    build("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Leaves(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"(?i)weights.only"):
        rope_patch.from_pretrained(tmp_path, use_safetensors=False)
    assert not (tmp_path / "ran").exists()
