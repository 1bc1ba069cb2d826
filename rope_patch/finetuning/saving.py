"""The folder that a fine-tuning leaves: `rope_patch.from_pretrained` gives the model back under its scheme.

It is written aside and renamed, so that there is a whole checkpoint or none.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rope_patch.models.head import find_language_model
from rope_patch.persistence import from_pretrained

CHECKPOINT = "checkpoint"
"""Name of the folder in the folder of a run."""


def save(folder: Path, model: nn.Module, tokenizer: Any, weights: dict[str, torch.Tensor], merge: bool) -> Path:
    """Write the checkpoint.

    Args:
        folder: of the run.
        model: patched, with or without adapters; of several processes that of the main one.
        tokenizer: saved beside it.
        weights: by the names of `model`, whole.
        merge: whether adapters become part of the weights, so that PEFT is not needed to load them.

    Returns:
        its folder.

    Raises:
        OSError: it cannot be written; a checkpoint that was there before still is.
    """
    aside, final = folder / f"{CHECKPOINT}.tmp", folder / CHECKPOINT
    shutil.rmtree(aside, ignore_errors=True)
    model.save_pretrained(aside, state_dict=weights)  # type: ignore[operator]
    # beside adapters too: the config says under which scheme they were trained
    find_language_model(model).config.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    if merge:
        merged = from_pretrained(aside).merge_and_unload()  # type: ignore[operator]
        shutil.rmtree(aside)
        merged.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(aside, final)
    return final
