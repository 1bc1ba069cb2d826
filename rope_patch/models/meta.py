"""Rotary modules on the meta device: their buffers have no values yet, and no checkpoint contains any.

Before a scheme is mounted, the buffers get the values that their class computes from the config, as when Transformers
loads weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from rope_patch.errors import UnsupportedModel
from rope_patch.models.module_state import remove_hook


class EmptyTables:
    """The buffers of a rotary module on the meta device, if any; its `stack` may have weights."""

    def __init__(self, module: nn.Module, stack: nn.Module) -> None:
        self.module = module
        self.stack = stack
        self.is_without_weights = _without_weights(stack)
        self._empty = {name: tensor for name, tensor in module.named_buffers(recurse=False) if tensor.is_meta}

    def __bool__(self) -> bool:
        return bool(self._empty)

    def fill(self) -> None:
        """Compute them on the device of the weights, or on the CPU without weights.

        Raises:
            UnsupportedModel: their class cannot compute them from the config.
        """
        family = type(self.module).__name__
        device = next((weight.device for weight in self.stack.parameters() if not weight.is_meta), torch.device("cpu"))
        try:
            with torch.device(device):
                made = cast(Any, type(self.module))(cast(Any, self.module).config)
            filled = {name: made.get_buffer(name).to(device, tensor.dtype) for name, tensor in self._empty.items()}
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
        """Empty them again, unless weights were loaded in the meantime."""
        if _without_weights(self.stack) == self.is_without_weights:
            for name, tensor in self._empty.items():
                setattr(self.module, name, tensor)


@contextmanager
def filled(module: nn.Module, stack: nn.Module) -> Iterator[None]:
    """Within the block, give a rotary module the values that it should have."""
    tables = EmptyTables(module, stack)
    try:
        if tables:
            tables.fill()
        yield
    finally:
        tables.restore()


class Refilling:
    """Pre-hook of a rotary module that got its tables before its stack had weights: `to_empty` drops their values.

    The first forward restores them, and removes this hook unless a compiler is tracing.
    """

    def __init__(self, module: nn.Module) -> None:
        self._tables = {name: tensor.clone() for name, tensor in module.named_buffers(recurse=False)}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Restore the tables; the arguments stay unchanged."""
        for name, tensor in self._tables.items():
            module.get_buffer(name).copy_(tensor)
        if not torch.compiler.is_compiling():
            remove_hook(module, self)


def _without_weights(stack: nn.Module) -> bool:
    return all(weight.is_meta for weight in stack.parameters())
