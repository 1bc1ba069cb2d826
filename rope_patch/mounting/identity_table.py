"""Tables of an identity rotation. They skip its computation, and act as plain tensors elsewhere."""

from __future__ import annotations

from typing import Any

import torch

_PRODUCTS = {"mul", "__mul__", "__rmul__", "multiply"}
_SPARED = _PRODUCTS | {"add", "__add__", "__radd__", "sub", "__sub__"}
_SHAPING = {"__getitem__", "unsqueeze", "squeeze", "expand", "view", "reshape", "transpose", "to", "float", "half"}
_SHAPING |= {"bfloat16", "type", "chunk", "split", "contiguous", "repeat_interleave", "narrow"}


class IdentityTable(torch.Tensor):
    """A tensor full of ones, the cosines of an identity rotation, or of zeros, its sines.

    Attributes:
        number: 1 or 0.
    """

    number: int

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, number: int) -> IdentityTable:
        """Mark `tensor`, of any shape and full of one `number`, as an `IdentityTable`."""
        table = tensor.as_subclass(cls)
        table.number = number
        return table

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if name in _SPARED and (spared := _spared(name, *args)) is not None:
                return spared
            result = func(*args, **(kwargs or {}))
            if name not in _SHAPING or not isinstance(args[0], cls):
                return result
            number = args[0].number
            if isinstance(result, torch.Tensor):
                return cls.from_tensor(result, number)
            return [cls.from_tensor(x, number) for x in result]


def _spared(name: str, *args: Any) -> torch.Tensor | None:
    """The result of a product or a sum that needs no computation; else None."""
    if len(args) != 2:
        return None
    x, table = args
    if not (isinstance(x, torch.Tensor) and isinstance(table, IdentityTable)) or isinstance(x, IdentityTable):
        return None
    wider = x.dtype != table.dtype and torch.result_type(x, table) != x.dtype
    if wider or not _expands(table.shape, x.shape):
        return None
    if table.number == (1 if name in _PRODUCTS else 0):
        return x
    return IdentityTable.from_tensor(table.as_subclass(torch.Tensor).expand(x.shape), 0) if name in _PRODUCTS else None


def _expands(shape: torch.Size, to: torch.Size) -> bool:
    """Whether a tensor of this shape expands to another; on a GPU `torch.broadcast_shapes` takes as long as the
    operator that it would save.
    """
    for size, wanted in zip(reversed(shape), reversed(to), strict=False):
        if size not in (1, wanted):
            return False
    return len(shape) <= len(to)
