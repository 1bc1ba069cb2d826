"""The folder that a fine-tuning leaves: `rope_patch.from_pretrained` gives the model back under its scheme.

It is written aside and renamed, so that there is a whole checkpoint or none.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from rope_patch.models.head import find_language_model
from rope_patch.saving.loading import from_pretrained

CHECKPOINT = "checkpoint"
"""Name of the folder in the folder of a run."""

LAST_GOOD = "checkpoint-last-good"
"""Name of the folder that a run leaves whose loss became infinite or no number."""

FACTS = "training.json"
"""In that folder: how it was trained."""


def save(
    path: Path, model: nn.Module, tokenizer: Any, weights: dict[str, torch.Tensor], merge: bool, facts: dict[str, Any]
) -> Path:
    """Write a checkpoint.

    Args:
        path: of its folder.
        model: patched, with or without adapters; of several processes that of the main one.
        tokenizer: saved beside it.
        weights: by the names of `model`, whole, of any shape.
        merge: whether adapters become part of the weights, so that PEFT is not needed to load them.
        facts: how it was trained, for `FACTS`.

    Returns:
        the path.

    Raises:
        OSError: it cannot be written; a checkpoint that was there before still is.
    """
    aside, old = path.with_name(f"{path.name}.tmp"), path.with_name(f"{path.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    try:
        _write(aside, model, weights)
        if merge:
            merged = from_pretrained(aside).merge_and_unload()  # type: ignore[operator]
            shutil.rmtree(aside)
            merged.save_pretrained(aside)
    except SafetensorError as error:  # what it makes of a full disk
        raise OSError(f"{path} cannot be written: {error}") from error
    tokenizer.save_pretrained(aside)
    (aside / FACTS).write_text(json.dumps(facts, indent=2) + "\n")
    if path.exists():
        os.replace(path, old)
    os.replace(aside, path)
    shutil.rmtree(old, ignore_errors=True)
    return path


def facts_of(path: Path) -> dict[str, Any]:
    """How the checkpoint in a folder was trained; nothing where there is none."""
    found = path / FACTS
    return json.loads(found.read_text()) if found.exists() else {}


def _write(folder: Path, model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    model.save_pretrained(folder, state_dict=weights)  # type: ignore[operator]
    # beside adapters too: the config says under which scheme they were trained
    find_language_model(model).config.save_pretrained(folder)
