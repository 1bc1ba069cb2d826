"""What a fine-tuning leaves is the model that was trained, for this library and for plain Transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch import patch, unpatch
from rope_patch.errors import MissingPackage
from rope_patch.finetuning import saving
from rope_patch.finetuning.experiment import run
from rope_patch.patching import find_handle
from tests.evaluation.conftest import byte_tokenizer, tiny_llama

ROTARY, LATE, LEARNED = "yarn:factor=2", "rerope:window=8", "kerple"
METHODS = [("full", False), ("lora", False), ("lora", True), ("lora_norms_embeddings", False)]
TOKENS = torch.randint(1, 257, (2, 40), generator=torch.Generator().manual_seed(0))


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


@pytest.fixture
def left(describe, monkeypatch):
    """A run's checkpoint, and the logits of the model as it was when the training was over."""
    kept = []
    save = saving.save

    def watched(path, model, *others):
        kept.append(logits(model))
        return save(path, model, *others)

    monkeypatch.setattr(saving, "save", watched)

    def make(scheme, **settings):
        outcome = run(describe(schemes=(scheme,), learning_rate=1e-2, **settings))
        return outcome.checkpoints[scheme], kept.pop()

    return make


def tied_checkpoint(folder):
    model = tiny_llama()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("scheme", [ROTARY, LATE, LEARNED])
@pytest.mark.parametrize(("method", "merge"), METHODS)
def test_it_comes_back_under_its_scheme(method, merge, scheme, left, monkeypatch, tmp_path):
    path, expected = left(scheme, method=method, merge=merge)
    monkeypatch.chdir(tmp_path)
    model = rope_patch.from_pretrained(path)
    assert isinstance(model, PeftModel) == (method != "full" and not merge)
    handle = find_handle(model)
    assert handle is not None
    assert str(handle.scheme) == str(rope_patch.get_scheme(scheme))
    if merge:
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    else:
        assert torch.equal(logits(model), expected)
    assert AutoTokenizer.from_pretrained(path)("text").input_ids == byte_tokenizer()("text").input_ids
    assert model.generate(input_ids=TOKENS[:, :20], max_new_tokens=3, do_sample=False).shape == (2, 23)


@pytest.mark.parametrize(("method", "merge"), [("full", False), ("lora", True)])
def test_plain_transformers_say_the_same_under_a_rotary_scheme(method, merge, left):
    path, expected = left(ROTARY, method=method, merge=merge)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(path)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_merged_norms_and_embeddings_are_the_unmerged_ones(tied, describe, checkpoint, left, tmp_path):
    model = tied_checkpoint(tmp_path / "tied") if tied else str(checkpoint)
    shared = {"method": "lora_norms_embeddings", "model": model}
    unmerged, expected = left(ROTARY, **shared)
    assert torch.equal(logits(rope_patch.from_pretrained(unmerged)), expected)
    merged, _ = left(ROTARY, **shared, merge=True, output=str(tmp_path / "merged"))
    loaded = rope_patch.from_pretrained(merged)
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-4)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(merged)), expected, rtol=1e-4, atol=1e-4)


def test_a_tied_head_is_saved_once(left, tmp_path):
    path, expected = left(ROTARY, model=tied_checkpoint(tmp_path / "tied"))
    (file,) = path.glob("*.safetensors")
    with safe_open(file, "pt") as tensors:
        names = list(tensors.keys())
    assert sum("embed_tokens" in name or "lm_head" in name for name in names) == 1
    assert torch.equal(logits(rope_patch.from_pretrained(path)), expected)


def test_adapters_name_their_checkpoint_from_anywhere(left, checkpoint, monkeypatch):
    monkeypatch.chdir(Path(checkpoint).parent)
    path, expected = left(ROTARY, method="lora", model=Path(checkpoint).name)
    assert json.loads((path / "adapter_config.json").read_text())["base_model_name_or_path"] == str(checkpoint)
    monkeypatch.chdir("/")
    assert torch.equal(logits(rope_patch.from_pretrained(path)), expected)


def test_adapters_without_the_scheme(left, checkpoint):
    path, _ = left(ROTARY, method="lora")
    model = unpatch(rope_patch.from_pretrained(path))
    by_peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(checkpoint), path)
    assert torch.equal(logits(model), logits(by_peft))


def test_adapters_of_a_checkpoint_that_was_saved_under_another_scheme(left, tmp_path):
    model = tiny_llama()
    with patch(model, "pi:factor=2"):
        model.save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    for number, scheme in enumerate((ROTARY, "plain")):
        output = str(tmp_path / f"out{number}")
        path, expected = left(scheme, method="lora", model=str(tmp_path / "base"), output=output)
        loaded = rope_patch.from_pretrained(path)
        assert torch.equal(logits(loaded), expected)
        assert (find_handle(loaded) is None) == (scheme == "plain")


def test_adapters_that_others_saved_leave_the_checkpoint_under_its_scheme(left, tmp_path):
    path, _ = left(ROTARY)
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(rope_patch.from_pretrained(path), LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "adapters")
    loaded = rope_patch.from_pretrained(tmp_path / "adapters")
    assert torch.equal(logits(loaded), logits(rope_patch.from_pretrained(path)))
    assert find_handle(loaded) is not None


def test_adapters_without_peft(left, monkeypatch):
    path, _ = left(ROTARY, method="lora")
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(MissingPackage, match=r"needs peft: pip install 'rope-patch\[finetune\]'"):
        rope_patch.from_pretrained(path)


def test_how_it_was_trained_lies_beside_it(left):
    path, _ = left(ROTARY)
    facts = saving.facts_of(path)
    assert (facts["scheme"], facts["step"], facts["length"]) == (ROTARY, 4, 32)


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(describe, monkeypatch, tmp_path):
    path = run(describe()).checkpoints[ROTARY]
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    from safetensors import SafetensorError

    def full(*_):
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(saving, "_write", full)
    with pytest.raises(OSError, match="cannot be written: I/O error: No space left on device"):
        run(describe(steps=5))
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    monkeypatch.undo()
    run(describe(steps=5))
    assert saving.facts_of(path)["step"] == 5
    assert not list(path.parent.glob("checkpoint.*"))
