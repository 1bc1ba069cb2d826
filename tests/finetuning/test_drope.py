"""DroPE in docs/finetuning.md: rotations are dropped at L, and what is saved is measured with log-n."""

from __future__ import annotations

import pytest

from tests.evaluation.conftest import TRAINING_LENGTH
from tests.recipes import run_recipe

from .conftest import rows, words_of

LENGTHS = [TRAINING_LENGTH, 2 * TRAINING_LENGTH]


def test_a_checkpoint_without_rotations_goes_on_under_log_n(options, tmp_path):
    settings = {"length": TRAINING_LENGTH, "steps": 6, "learning_rate": 1e-2, "windows_per_document": 2}
    chosen = options(scheme=["nope"], **settings)
    words = ["--lengths", *LENGTHS]
    assert run_recipe("finetune", [*words_of(chosen), *words]) == 0
    before, after = (
        {row["length"]: row for row in rows(chosen) if (row["line"], row["step"]) == ("nope", n)} for n in (0, 6)
    )
    assert list(after) == LENGTHS
    assert after[TRAINING_LENGTH]["nll"] < before[TRAINING_LENGTH]["nll"]
    assert after[TRAINING_LENGTH]["scored_tokens"] == 2 * chosen["targets"]

    again = {**{name: chosen[name] for name in ("targets", "windows_per_document")}, "scheme": ["nope", "nope+logn"]}
    again |= {
        "model": chosen["output"] / "nope" / "checkpoint",
        "text": chosen["eval_text"],
        "output": tmp_path / "again",
    }
    assert run_recipe("perplexity", [*words_of(again), *words, "--no-references"]) == 0
    cells = {(row["line"], row["length"]): row["nll"] for row in rows(again, "perplexity.jsonl")}
    for length in LENGTHS:
        assert cells["nope", length] == pytest.approx(after[length]["nll"], abs=1e-6)
    assert cells["nope+logn", LENGTHS[0]] == cells["nope", LENGTHS[0]]
    assert cells["nope+logn", LENGTHS[1]] != cells["nope", LENGTHS[1]]
