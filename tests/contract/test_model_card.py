"""The card of a saved model says how to load it under its scheme."""

from __future__ import annotations

import re

import pytest
import torch
from peft import LoraConfig, get_peft_model

import rope_patch
from rope_patch import patch, save_pretrained, unpatch
from rope_patch.saving.export import export_checkpoint
from tests.families import build
from tests.runs import logits, tokens

SECTION = "<!-- rope_patch -->"


def card_of(folder):
    return (folder / "README.md").read_text(encoding="utf-8")


def code_of(card, folder):
    """The lines of the card, with the folder in their place."""
    (code,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    return code.replace("PATH OR HUB ID", str(folder))


@pytest.mark.parametrize(
    ("spec", "words"),
    [("rerope:window=6+logn", "loads it without the scheme"), ("yarn:factor=4", "reads it, too")],
)
def test_the_lines_of_a_card_load_the_model(spec, words, tmp_path):
    model = build("llama")
    patch(model, spec)
    model.save_pretrained(tmp_path)
    card = card_of(tmp_path)
    assert f"`{spec}`" in card
    assert words in card
    found = {}
    exec(code_of(card, tmp_path), found)
    assert torch.equal(logits(found["model"], tokens()), logits(model, tokens()))


def test_a_card_that_is_there_keeps_its_words_and_has_one_section(tmp_path):
    model = build("llama")
    (tmp_path / "README.md").write_text("# My model\n\nIt reads books.\n", encoding="utf-8")
    for spec in ("rerope:window=6", "yarn:factor=4"):
        patch(model, spec, replace=True)
        model.save_pretrained(tmp_path)
    card = card_of(tmp_path)
    assert card.startswith("# My model\n\nIt reads books.\n\n" + SECTION)
    assert (card.count(SECTION), card.count("rerope"), card.count("yarn:factor=4")) == (1, 0, 1)


def test_nothing_is_written_without_a_scheme_or_under_the_models_own(tmp_path):
    model = build("llama")
    patch(model, "rope")
    model.save_pretrained(tmp_path / "own")
    unpatch(model)
    model.save_pretrained(tmp_path / "plain")
    assert not list(tmp_path.glob("*/README.md"))


def test_a_card_that_is_not_text_stays(tmp_path):
    (tmp_path / "README.md").write_bytes(b"\xff\xfe card")
    model = build("llama")
    patch(model, "rerope:window=6")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_bytes() == b"\xff\xfe card"


def test_adapters_have_a_card_as_well(tmp_path):
    model = build("llama")
    model.save_pretrained(tmp_path / "base")
    model.name_or_path = model.config._name_or_path = str(tmp_path / "base")
    patch(model, "rerope:window=6")
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    adapted.save_pretrained(tmp_path / "adapters")
    save_pretrained(adapted, tmp_path / "again")
    for folder in (tmp_path / "adapters", tmp_path / "again"):
        card = card_of(folder)
        assert card.count(SECTION) == 1
        assert "library_name: peft" in card
        found = {}
        exec(code_of(card, folder), found)
        assert rope_patch.current_scheme(found["model"]) == rope_patch.current_scheme(model)


def test_an_export_has_no_lines_about_the_record_that_it_no_longer_has(tmp_path):
    model = build("llama")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "README.md").write_text("# My model\n", encoding="utf-8")
    patch(model, "pi:factor=2")
    model.save_pretrained(tmp_path / "saved")
    export_checkpoint(tmp_path / "saved", tmp_path / "exported")
    assert card_of(tmp_path / "exported") == "# My model\n"
