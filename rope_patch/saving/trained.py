"""The trained frequencies of a checkpoint, and its weights without the parameters of a scheme, for other programs."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from rope_patch.errors import NotExpressible
from rope_patch.saving.checkpoint_kind import read_json
from rope_patch.saving.own_files import shards_of
from rope_patch.saving.resuming import is_learned, saved_parameters
from rope_patch.schemes.base import Scheme
from rope_patch.typing import Weights


def trained_weights(folder: Path, scheme: Scheme) -> Weights:
    """The learned parameters of a scheme in a checkpoint folder, by their names; empty if it has none.

    Raises:
        NotExpressible: the trained parameters differ between layers.
    """
    by_holder: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in saved_parameters(folder).items():
        holder, _, parameter = name.rpartition(".")
        by_holder.setdefault(holder, {})[parameter] = value
    first, *others = by_holder.values() or [{}]
    if any(not torch.equal(value, each[name]) for each in others for name, value in first.items()):
        raise NotExpressible(
            f"{scheme}: {len(by_holder)} layers of {folder} trained frequencies of their own, and a config holds one "
            "list for all of them; learned_rope:per_layer=false trains one"
        )
    return first


def copy_without_learned(file: Path, target: Path) -> bool:
    """Copy weights, or their index, without learned parameters of schemes, which other programs refuse to load. If the
    file has none, copy nothing and return False.
    """
    if file.name == SAFE_WEIGHTS_INDEX_NAME:
        shards = shards_of(file)
        kept = {name: shard for name, shard in shards.items() if not is_learned(name)}
        if len(kept) == len(shards):
            return False
        target.write_text(json.dumps({**read_json(file), "weight_map": kept}, indent=2), encoding="utf-8")
        return True
    if file.suffix != ".safetensors":
        return False
    with safe_open(file, "pt") as tensors:
        metadata, has_learned = tensors.metadata(), any(map(is_learned, tensors.keys()))
    if has_learned:
        others = {name: value for name, value in load_file(file).items() if not is_learned(name)}
        save_file(others, target, metadata)
    return has_learned
