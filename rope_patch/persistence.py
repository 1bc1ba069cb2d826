"""Saving is Transformers' own; loading finds the scheme that the config names and applies it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rope_patch.errors import NotPatched
from rope_patch.patch import PatchHandle, patch
from rope_patch.schemes.registry import scheme_from_dict

_RECORD = "rope_patch"


def from_pretrained(path: str | Path, **kwargs: Any) -> nn.Module:
    """Load a checkpoint and, where it was saved under a scheme, patch it again.

    Args:
        path: a folder written by `save_pretrained`, or a hub id.
        **kwargs: for `AutoModelForCausalLM.from_pretrained`.

    Returns:
        the model; `unpatch` gives the checkpoint without the scheme.

    Raises:
        OSError: from Transformers, when there is no checkpoint.
    """
    config = kwargs.pop("config", None)
    if config is None:
        known = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
        config = AutoConfig.from_pretrained(path, **{key: kwargs[key] for key in known if key in kwargs})
    record = vars(config).pop(_RECORD, None)
    if record is not None:
        config.rope_parameters = record["rope_parameters"]
    model = AutoModelForCausalLM.from_pretrained(path, config=config, **kwargs)
    if record is not None:
        patch(model, scheme_from_dict(record["scheme"]))
    return model


def repatch(model: nn.Module) -> PatchHandle:
    """Apply the scheme that a model's config names, after plain Transformers loaded it.

    Raises:
        NotPatched: when the config names none.
        AlreadyPatched: when the model carries a scheme.
    """
    configs = (vars(module).get("config") for module in model.modules())
    record = next((found for config in configs if (found := getattr(config, _RECORD, None))), None)
    if record is None:
        raise NotPatched(f"the config of {type(model).__name__} has no `rope_patch`: it was not saved under a scheme")
    return patch(model, scheme_from_dict(record["scheme"]))
