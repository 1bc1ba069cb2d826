"""Save and restore the state that a module computes itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class ModuleState:
    """A snapshot of the buffers, tensors and numbers of one module, without its submodules.

    A rotary embedding of type `dynamic` or `longrope` changes them with every text.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._kept = {name: (value, _copied(value)) for name, value in _own(module).items()}

    def restore(self) -> None:
        """Restore the snapshot; tensors follow a model that was moved or cast in the meantime."""
        current = _own(self.module)
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
        """Its own dtype, or the one that the model was cast to, read from tensors that no forward recomputes."""
        for name, (_, kept) in self._kept.items():
            now = current.get(name)
            if name.endswith("original_inv_freq") and isinstance(now, torch.Tensor) and now.dtype != kept.dtype:
                return now.dtype
        return copied.dtype


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Restore the state of a module after the block, so that it can be tried out."""
    state = ModuleState(module)
    try:
        yield
    finally:
        state.restore()


def remove_hook(module: nn.Module, hook: Any) -> None:
    """Remove a pre-hook of a module's forward or state dict, if present."""
    for hooks in (module._forward_pre_hooks, module._state_dict_pre_hooks):
        for key in [key for key, registered in hooks.items() if registered is hook]:
            del hooks[key]
            if hooks is module._forward_pre_hooks:
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def _own(module: nn.Module) -> dict[str, Any]:
    named = {**vars(module), **module._buffers}
    kinds = (torch.Tensor, int, float)
    return {name: value for name, value in named.items() if isinstance(value, kinds) and not isinstance(value, bool)}


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
