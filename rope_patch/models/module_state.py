"""State that a module computes itself: saved and restored, and computed for a rotary module on the meta device, whose
buffers no checkpoint contains.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from rope_patch.errors import UnsupportedModel
from rope_patch.graphs import traced


class ModuleState:
    """A snapshot of the buffers, tensors and numbers of one module, without its submodules.

    A rotary embedding of type `dynamic` or `longrope` changes its buffers with every text.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._kept = {
            name: (value, value.detach().clone() if isinstance(value, torch.Tensor) else value)
            for name, value in _attributes(module).items()
        }

    def restore(self) -> None:
        """Restore the snapshot; tensors follow a model that was moved or cast in the meantime."""
        current = _attributes(self.module)
        for name in current.keys() - self._kept.keys():
            delattr(self.module, name)
        for name, (value, copied) in self._kept.items():
            now = current.get(name)
            if isinstance(copied, torch.Tensor) and isinstance(now, torch.Tensor):
                moved = copied.to(now.device, self._dtype_by_now(copied, current))
                if now is value and (now.is_meta or torch.equal(now, moved)):
                    continue  # unchanged: keep the same object
                setattr(self.module, name, moved)
            else:
                setattr(self.module, name, copied)

    def _dtype_by_now(self, copied: torch.Tensor, current: dict[str, Any]) -> torch.dtype:
        """The tensor's own dtype, or the one that the model was cast to, read from tensors that no forward
        recomputes.
        """
        for name, (_, kept) in self._kept.items():
            now = current.get(name)
            if name.endswith("original_inv_freq") and isinstance(now, torch.Tensor) and now.dtype != kept.dtype:
                return now.dtype
        return copied.dtype


def remove_hook(module: nn.Module, hook: Any) -> None:
    """Remove a pre-hook of a module's forward or state dict, if present."""
    for hooks in (module._forward_pre_hooks, module._state_dict_pre_hooks):
        for key in [key for key, registered in hooks.items() if registered is hook]:
            del hooks[key]
            if hooks is module._forward_pre_hooks:
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def _attributes(module: nn.Module) -> dict[str, Any]:
    named = {**vars(module), **module._buffers}
    kinds = (torch.Tensor, int, float)
    return {name: value for name, value in named.items() if isinstance(value, kinds) and not isinstance(value, bool)}


class EmptyTables:
    """The buffers of a rotary module that are on the meta device, if any; its `stack` may have weights."""

    def __init__(self, module: nn.Module, stack: nn.Module) -> None:
        self.module = module
        self.stack = stack
        self.is_without_weights = _without_weights(stack)
        self._empty = {name: tensor for name, tensor in module.named_buffers(recurse=False) if tensor.is_meta}

    def __bool__(self) -> bool:
        return bool(self._empty)

    def fill(self) -> None:
        """Compute the buffers on the device of the weights, or on the CPU without weights.

        Raises:
            UnsupportedModel: the module's class cannot compute them from the config.
        """
        family = type(self.module).__name__
        device = next((weight.device for weight in self.stack.parameters() if not weight.is_meta), torch.device("cpu"))
        try:
            with torch.device(device):
                rebuilt = cast(Any, type(self.module))(cast(Any, self.module).config)
            filled = {name: rebuilt.get_buffer(name).to(device, tensor.dtype) for name, tensor in self._empty.items()}
            if any(filled[name].shape != tensor.shape for name, tensor in self._empty.items()):
                raise ValueError("its config leads to tensors of other shapes")
        except Exception as error:  # a family's class may need other arguments
            raise UnsupportedModel(
                f"{family}: its frequencies have no values yet (device meta) and cannot be computed from its config "
                f"({type(error).__name__}: {error}); load the model before you patch it"
            ) from error
        for name, tensor in filled.items():
            setattr(self.module, name, tensor)

    def restore(self) -> None:
        """Empty the buffers again, unless weights were loaded in the meantime."""
        if _without_weights(self.stack) == self.is_without_weights:
            for name, tensor in self._empty.items():
                setattr(self.module, name, tensor)


class Refilling:
    """Pre-hook of a rotary module that got its tables before its stack had weights: it writes them again, because
    `to_empty` drops their values.

    The first forward restores them, and removes this hook unless a compiler is tracing.
    """

    def __init__(self, module: nn.Module) -> None:
        self._tables = {name: tensor.clone() for name, tensor in module.named_buffers(recurse=False)}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Restore the tables; the arguments stay unchanged."""
        for name, tensor in self._tables.items():
            module.get_buffer(name).copy_(tensor)
        if not traced():
            remove_hook(module, self)


def _without_weights(stack: nn.Module) -> bool:
    return all(weight.is_meta for weight in stack.parameters())
