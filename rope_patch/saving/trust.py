"""Settings of a checkpoint that would run code or read other files: the user may ask for them, the checkpoint's files
may not.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from rope_patch.errors import InvalidField

_OF_PYTORCH = {
    "attn_implementation": ("eager", "sdpa", "flex_attention"),
    "experts_implementation": ("eager", "grouped_mm", "batched_mm"),
}
"""The implementations in PyTorch and Transformers themselves. Transformers may fetch any other from the Hub and run it:
`owner/kernel`, but also `flash_attention_2` where the package flash_attn is missing."""

_REACHING = {
    "megatron_config": "it lets PEFT import the module that megatron_core names",
    "tokenizer_kwargs": "it lets PEFT load a tokenizer from elsewhere, with any arguments",
    "prompt_tuning_init_state_dict_path": "it lets PEFT read a file anywhere on this computer",
    "adapters": "it lets PEFT load other adapters, whose settings nobody checked",
    "shadow_model": "it lets PEFT load another checkpoint",
}
"""Fields of `adapter_config.json` with which PEFT runs code, or reads more than the adapters, and what each does."""

_HARMLESS = {"shadow_model": "mirror"}
"""Values of these fields that are harmless, because they build from the base model alone."""


def drop_implementations(config: Any) -> dict[str, Any]:
    """Reset the implementations of attention and experts that a config asks for, also in nested configs, unless they
    are PyTorch's own. Transformers then takes its default, which computes the same.

    Returns:
        the dropped values: for each field, the first value found.
    """
    dropped: dict[str, Any] = {}
    held = config if isinstance(config, dict) else vars(config)
    for field, known in _OF_PYTORCH.items():
        for name in (field, f"_{field}", f"_{field}_internal"):
            if (value := held.get(name)) is not None and value not in known:
                dropped.setdefault(field, value)
                held[name] = None
    for value in held.values():
        for inner in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(inner, (dict, PreTrainedConfig)):
                dropped = {**drop_implementations(inner), **dropped}
    return dropped


def check_adapter(settings: Mapping[str, Any], file: str | Path) -> None:
    """Refuse settings of adapters that let PEFT run code or read other files, before PEFT sees them.

    Args:
        settings: content of the `file`, an `adapter_config.json`.

    Raises:
        InvalidField: there is such a setting; null and empty values are allowed.
    """
    for field, reason in _REACHING.items():
        if (value := settings.get(field)) and value != _HARMLESS.get(field):
            raise InvalidField(
                f"{file}: {field}={value!r:.200} is not allowed: {reason}. Set it to null, or load the adapters with "
                "PEFT yourself if you trust them"
            )
