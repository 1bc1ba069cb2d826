"""Recognising what Baichuan published: its checkpoint folders and its remote code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

_REMOTE = "transformers_modules."


def is_baichuan_folder(path: str | Path, **kwargs: Any) -> bool:
    """Whether a checkpoint is of the model type `baichuan`.

    Args:
        path: a folder with a `config.json`, or a hub id.
        **kwargs: where to find it, for `PreTrainedConfig.get_config_dict` (`revision`, `token`, ...).

    Returns:
        False also where there is no readable config: whoever loads the checkpoint says so better.
    """
    try:
        config, _ = PreTrainedConfig.get_config_dict(path, **kwargs)
    except (OSError, ValueError):
        return False
    return config.get("model_type") == "baichuan"


def published_remote_code(module: nn.Module) -> str | None:
    """What to do instead, where a model runs the code of 2023 that Baichuan put beside its checkpoints.

    That code takes its positions from tables of its own, outside the attention interface of Transformers, so no scheme
    can be mounted on it, be it all of `module` or a part.

    Returns:
        a sentence for the user; None for any other model.
    """
    for part in module.modules():
        cls = type(part)
        if cls.__module__.startswith(_REMOTE) and "modeling_baichuan" in cls.__module__ and hasattr(part, "W_pack"):
            return (
                f"{type(module).__name__} runs Baichuan's published remote code ({cls.__module__}), whose attention "
                "does not go through Transformers; load the same folder with rope_patch.from_pretrained(path), or call "
                "register_baichuan() and leave out trust_remote_code=True"
            )
    return None
