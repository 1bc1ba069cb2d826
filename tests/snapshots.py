"""Everything that a patch could leave behind."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rope_patch.mounting.registration import IMPLEMENTATION
from tests.runs import logits, tokens


def snapshot(
    model: nn.Module,
    run: Callable[[nn.Module], torch.Tensor] = lambda model: logits(copy.deepcopy(model), tokens()),
) -> dict[str, Any]:
    """Tensors bit for bit, attributes, hooks and configs by identity and value, registries, and what a run gives: of a
    copy, because some models keep something of every text that they are shown.
    """
    return {
        "state_dict": {name: _value(tensor) for name, tensor in model.state_dict().items()},
        "modules": {name: _attributes(module) for name, module in model.named_modules()},
        "registries": _registries(),
        "classes": {cls: dict(vars(cls)) for cls in sorted({type(m) for m in model.modules()}, key=repr)},
        "logits": _value(run(model)),
    }


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: _value(value) for name, value in vars(module).items()}


def _value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, PreTrainedConfig):
        return id(value), copy.deepcopy(vars(value))
    if isinstance(value, dict):
        return {key: _value(item) for key, item in value.items()}
    if isinstance(value, (list, set, tuple)):
        return copy.copy(value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else id(value)


def _registries() -> list[dict[Any, Any]]:
    if IMPLEMENTATION in ALL_ATTENTION_FUNCTIONS._local_mapping:
        gc.collect()  # of patched models that other tests threw away
    registries = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS, ROPE_INIT_FUNCTIONS)
    return [{key: registry[key] for key in registry} for registry in registries]
