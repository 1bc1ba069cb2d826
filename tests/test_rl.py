"""One scheme in trainer and rollout."""

from __future__ import annotations

import pytest
import torch

import rope_patch
from rope_patch.patching import find_handle
from tests.runs import logits
from tests.test_docs import ROOT, python_blocks

pytest.importorskip("trl")


@pytest.mark.slow
def test_tokens_have_the_probability_in_training_that_they_were_drawn_with(tmp_path, monkeypatch, capfd):
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    names = {}
    for code in python_blocks(ROOT / "docs" / "how-to" / "rl.md"):
        exec(code, names)
    trainer, tokenizer = names["trainer"], names["tokenizer"]
    again = rope_patch.from_pretrained("runs/grpo/last")
    assert find_handle(again).scheme == find_handle(trainer.model).scheme
    ids = torch.randint(3, 2048, (1, 600))
    assert torch.equal(logits(again, ids), logits(trainer.model, ids))

    prompts = tokenizer(list(names["prompts"]["prompt"]), return_tensors="pt", padding=True, padding_side="left")
    counts = prompts["attention_mask"].sum(1)
    assert counts.max() > 256 > counts.min()  # beyond L, and within
    rollout = {"max_new_tokens": 16, "do_sample": True, "output_logits": True, "return_dict_in_generate": True}
    drawn = trainer.model.eval().generate(**prompts, **rollout, pad_token_id=tokenizer.pad_token_id, min_new_tokens=16)
    new = drawn.sequences[:, -16:]
    expected = torch.stack(drawn.logits, 1).log_softmax(-1).gather(-1, new[..., None])[..., 0]
    mask = torch.cat([prompts["attention_mask"], torch.ones_like(new)], 1)
    with torch.no_grad():
        found = trainer._get_per_token_logps_and_entropies(trainer.model, drawn.sequences, mask, 16)[0]
        rope_patch.unpatch(trainer.model)
        plain = trainer._get_per_token_logps_and_entropies(trainer.model, drawn.sequences, mask, 16)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert (plain - expected).abs().max() > 0.1  # a trainer without the scheme trains on other numbers
