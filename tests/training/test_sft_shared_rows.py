"""The recipe with TRL: packed rows that two processes share, with windows of the scheme and of the checkpoint."""

from __future__ import annotations

import json
import os
import warnings

import pytest
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

import rope_patch
from rope_patch.mounting.handle import find_handle
from rope_patch.saving.loading import default_checkpoint
from tests.processes import run_one, run_two
from tests.recipes import load_recipe

pytest.importorskip("trl")


def train(rank, folder, checkpoint, scheme, sharing):
    """Run the recipe on short rows, in a folder of its own."""
    warnings.simplefilter("ignore")
    os.chdir(folder)
    recipe = load_recipe("sft_shared_rows")
    recipe.LENGTH, recipe.STEPS, recipe.CHECKPOINT = 192, 2, checkpoint
    recipe.SCHEME = scheme or recipe.SCHEME
    recipe.OUTPUT = f"{sharing} to a row"
    recipe.main()


def with_windows(folder):
    """A checkpoint with a layer of a sliding window, and the tokenizer of the embedded one."""
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    windows = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 40}
    config = Qwen3Config(vocab_size=2048, num_key_value_heads=2, max_position_embeddings=256, **size, **windows)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(default_checkpoint()).save_pretrained(folder)
    return str(folder)


def logged(folder):
    """The losses and norms of gradients of all steps."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [(row["loss"], row["grad_norm"], row["num_tokens"]) for row in history if "loss" in row]


@pytest.mark.parametrize(
    ("windows", "scheme"),
    [
        (False, None),
        pytest.param(True, "yarn:factor=2", marks=pytest.mark.nightly),
        pytest.param(False, "dca:chunk_size=96", marks=pytest.mark.nightly),
    ],
)
def test_packed_rows_of_two_processes_have_the_losses_of_one(windows, scheme, tmp_path):
    checkpoint = with_windows(tmp_path / "windows") if windows else str(default_checkpoint())
    assert run_one(train, 0, tmp_path, checkpoint, scheme, 1) == 0
    assert run_two(train, tmp_path, checkpoint, scheme, 2) == [0, 0]
    alone, shared = (logged(tmp_path / f"{number} to a row") for number in (1, 2))
    assert len(alone) == len(shared) == 2
    for found, expected in zip(shared, alone, strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
    saved = rope_patch.from_pretrained(tmp_path / "2 to a row")
    assert find_handle(saved) is not None
