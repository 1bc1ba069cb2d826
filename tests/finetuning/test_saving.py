"""What a run leaves is the model that it trained, under its scheme."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch import patch
from rope_patch.errors import MissingPackage
from rope_patch.patching import find_handle
from rope_patch.training.checkpoints import SafeTrainer
from tests.evaluation.conftest import byte_tokenizer, tiny_llama

from .conftest import SCHEME, checkpoint_of

LATE, LEARNED = "rerope:window=8", "kerple"
METHODS = [("full", False), ("lora", False), ("lora_norms_embeddings", False), ("lora_norms_embeddings", True)]
TOKENS = torch.randint(1, 257, (2, 40), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model):
    return model.eval()(TOKENS, use_cache=False).logits


@pytest.fixture
def left(finetune, monkeypatch):
    """A run: the folder that it leaves, and the logits of the model that was saved there."""
    kept, save_model = [], SafeTrainer.save_model

    def watched(trainer, folder, **keywords):
        kept.append(logits(trainer.model))
        return save_model(trainer, folder, **keywords)

    monkeypatch.setattr(SafeTrainer, "save_model", watched)

    def make(scheme, **settings):
        chosen = finetune(scheme=[scheme], learning_rate=1e-2, **settings)
        return checkpoint_of(chosen, scheme) / "checkpoint", kept[-1]

    return make


def tied_checkpoint(folder):
    model = tiny_llama()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.one_in(2)
@pytest.mark.parametrize("scheme", [SCHEME, LATE, LEARNED])
@pytest.mark.parametrize(("method", "merge"), METHODS)
def test_it_comes_back_under_its_scheme(method, merge, scheme, left, monkeypatch, tmp_path):
    path, expected = left(scheme, method=method, merge=merge)
    monkeypatch.chdir(tmp_path)
    model = rope_patch.from_pretrained(path)
    assert isinstance(model, PeftModel) == (method != "full" and not merge)
    assert str(find_handle(model).scheme) == str(rope_patch.get_scheme(scheme))
    assert torch.equal(logits(model), expected)
    assert AutoTokenizer.from_pretrained(path)("text").input_ids == byte_tokenizer()("text").input_ids
    assert model.generate(input_ids=TOKENS[:, :20], max_new_tokens=3, do_sample=False).shape == (2, 23)
    assert json.loads((path / "training.json").read_text()) == {"scheme": scheme, "steps": 4, "merge": merge}


@pytest.mark.parametrize(("method", "merge"), [("full", False), ("lora", True)])
def test_plain_transformers_compute_the_same_under_a_rotary_scheme(method, merge, left):
    path, expected = left(SCHEME, method=method, merge=merge)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(path)), expected, rtol=1e-4, atol=1e-4)


def test_a_tied_head_stays_tied_and_is_saved_once(left, tmp_path):
    for settings in ({}, {"method": "lora_norms_embeddings", "merge": True}):
        folder = tied_checkpoint(tmp_path / f"tied{len(settings)}")
        path, expected = left(SCHEME, model=folder, output=tmp_path / f"out{len(settings)}", **settings)
        (file,) = path.glob("*.safetensors")
        with safe_open(file, "pt") as tensors:
            assert sum("embed_tokens" in name or "lm_head" in name for name in tensors.keys()) == 1  # noqa: SIM118
        loaded = rope_patch.from_pretrained(path)
        torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-4)
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_adapters_name_their_checkpoint_from_anywhere(left, given, monkeypatch):
    monkeypatch.chdir(given)
    path, expected = left(SCHEME, method="lora", model=Path("model"))
    assert json.loads((path / "adapter_config.json").read_text())["base_model_name_or_path"] == str(given / "model")
    monkeypatch.chdir("/")
    assert torch.equal(logits(rope_patch.from_pretrained(path)), expected)


def test_adapters_without_the_scheme(left, given):
    path, _ = left(SCHEME, method="lora")
    model = rope_patch.unpatch(rope_patch.from_pretrained(path)).model
    by_peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(given / "model"), path)
    assert torch.equal(logits(model), logits(by_peft))


def test_a_checkpoint_that_was_saved_under_another_scheme(left, tmp_path, capsys):
    model = tiny_llama()
    with patch(model, "pi:factor=2"):
        model.save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    for number, scheme in enumerate((SCHEME, "plain")):
        path, expected = left(scheme, method="lora", model=tmp_path / "base", output=tmp_path / f"out{number}")
        loaded = rope_patch.from_pretrained(path)
        assert torch.equal(logits(loaded), expected)
        assert (find_handle(loaded) is None) == (scheme == "plain")
    assert f"it is trained under {SCHEME} instead" in capsys.readouterr().err


def test_adapters_without_peft(left, monkeypatch):
    path, _ = left(SCHEME, method="lora")
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(MissingPackage, match=r'needs peft: pip install "\.\[finetune\]"'):
        rope_patch.from_pretrained(path)
