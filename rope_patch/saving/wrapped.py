"""Save a patched model inside any wrapper: wrappers for training and compiling, and PEFT's adapters."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME

from rope_patch.errors import InvalidField, UnsupportedModel
from rope_patch.models.adapter_record import ADAPTERS, write_adapter_record
from rope_patch.models.find_stacks import find_stacks
from rope_patch.models.record import Record
from rope_patch.mounting.saved import OF_PROMPTS
from rope_patch.patching import PatchHandle, find_handles, loaded


def save_pretrained(model: nn.Module | PatchHandle, folder: str | Path, **kwargs: Any) -> None:
    """Save a model, inside any wrapper, so that `from_pretrained` loads it under its scheme.

    A model inside `DistributedDataParallel`, `torch.compile` or a module of yours is saved as if it were alone. PEFT's
    adapters and learned prompts are saved without the model. The scheme is recorded in every case, even if
    `model.save_pretrained` cannot know it: behind learned prompts, and in a model that was built around a patched one.
    A model without a scheme is saved unchanged.

    Args:
        model: a model, patched or not, or its handle.
        folder: the folder to write, which is created if it is missing.
        **kwargs: arguments for `save_pretrained` of Transformers or PEFT, such as `state_dict` or `is_main_process`.

    Raises:
        UnsupportedModel: `model` contains no model of Transformers, only a part of it carries a scheme, or its weights
            are sharded and you give no `state_dict`.
        InvalidField: `push_to_hub` is requested.
    """
    if isinstance(folder, nn.Module):
        raise UnsupportedModel(f"the model comes first: write save_pretrained(model, {str(model)!r})")
    whole = loaded(model)
    inner, handles = _saved_part(whole), find_handles(whole)
    if kwargs.get("push_to_hub"):
        raise InvalidField(
            "push_to_hub=True is not allowed here; save to a folder, and upload that: hf upload NAME FOLDER"
        )
    if "state_dict" not in kwargs and _is_sharded(whole):
        raise UnsupportedModel(
            f"each process has a part of the weights of {type(inner).__name__}; collect them on all processes first: "
            "save_pretrained(model, folder, state_dict=accelerator.get_state_dict(model))"
        )
    record = _record_of(inner, handles) if handles else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", OF_PROMPTS)
        inner.save_pretrained(folder, **kwargs)
    if record is not None and kwargs.get("is_main_process", True):
        for file in _settings_in(Path(folder), inner, kwargs):
            if file.name == ADAPTERS:
                write_adapter_record(file.parent, record.scheme)
                continue
            fields = json.loads(file.read_text(encoding="utf-8"))
            if Record.read(fields) is None:
                record.write(fields)
                file.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _is_sharded(model: nn.Module) -> bool:
    """Whether a part of the model is sharded by `FullyShardedDataParallel`, which alone can collect its weights."""
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    from torch.distributed.fsdp import FullyShardedDataParallel

    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def _saved_part(model: nn.Module) -> Any:
    """The outermost module that Transformers or PEFT saves."""
    kinds: tuple[type, ...] = (PreTrainedModel,)
    if "peft" in sys.modules:
        from peft import PeftModel

        kinds += (PeftModel,)
    if (found := next((module for module in model.modules() if isinstance(module, kinds)), None)) is None:
        raise UnsupportedModel(f"{type(model).__name__} has no model of Transformers in it, so it cannot be saved")
    return found


def _record_of(model: nn.Module, handles: tuple[PatchHandle, ...]) -> Record | None:
    """The record of a model, if all of its stacks carry one scheme.

    Raises:
        UnsupportedModel: the stacks carry different schemes, and a config has only one record.
    """
    mounted = {stack.module for handle in handles for stack, _ in handle.mounted}
    schemes = {str(handle.scheme) for handle in handles}
    if len(schemes) > 1 or mounted != {module for _, module in find_stacks(model)}:
        raise UnsupportedModel(
            f"only a part of {type(model).__name__} carries {' or '.join(sorted(schemes))}, and a config records a "
            "scheme of the whole model; patch the whole model, or save the patched part alone"
        )
    return Record.find(model)


def _settings_in(folder: Path, model: Any, kwargs: dict[str, Any]) -> list[Path]:
    """The saved settings files: a config, or the settings of adapters."""
    adapters = getattr(model, "peft_config", None)
    if not adapters:
        return [folder / CONFIG_NAME]
    names = kwargs.get("selected_adapters") or list(adapters)
    places = [folder if name == "default" else folder / name for name in names]
    return [place / ADAPTERS for place in (folder, *places) if (place / ADAPTERS).is_file()]
