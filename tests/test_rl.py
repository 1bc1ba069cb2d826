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
    for spec in (None, "rerope:window=128+logn", "self_extend:window=64,group_size=4", "dca:chunk_size=192", "ssmax"):
        if spec is not None:  # whose numbers depend on positions, and not on distances alone
            rope_patch.unpatch(trainer.model)
            rope_patch.patch(trainer.model, spec)
        new, expected = rollout(trainer.model.eval(), prompts)
        torch.testing.assert_close(trained(trainer, prompts, new), expected, rtol=0, atol=1e-4, msg=str(spec))
    rope_patch.unpatch(trainer.model)
    plain = trained(trainer, prompts, new)
    assert (plain - expected).abs().max() > 0.1  # a trainer without the scheme trains on other numbers


def rollout(model, prompts):
    """16 tokens drawn for each prompt, `(rows, 16)`, and their log-probabilities."""
    options = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": True, "pad_token_id": 0}
    drawn = model.generate(**prompts, **options, output_logits=True, return_dict_in_generate=True)
    new = drawn.sequences[:, -16:]
    return new, torch.stack(drawn.logits, 1).log_softmax(-1).gather(-1, new[..., None])[..., 0]


@torch.no_grad()
def trained(trainer, prompts, new):
    """Log-probabilities of the drawn tokens, as the trainer computes them: padded, without `position_ids`."""
    ids = torch.cat([prompts["input_ids"], new], 1)
    mask = torch.cat([prompts["attention_mask"], torch.ones_like(new)], 1)
    return trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 16)[0]
