"""Tables of an identity rotation that also skip its computation, and act as plain tensors elsewhere."""

from __future__ import annotations

from typing import Any

import torch

_PRODUCTS = {"mul", "__mul__", "__rmul__", "multiply"}
_SUMS = {"add", "__add__", "__radd__", "sub", "__sub__"}
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
            if name in _PRODUCTS | _SUMS and (spared := _spared(name, *args)) is not None:
                return spared
            result = func(*args, **(kwargs or {}))
            if name not in _SHAPING or not isinstance(args[0], cls):
                return result
            number = args[0].number
            if isinstance(result, torch.Tensor):
                return cls.from_tensor(result, number)
            return [cls.from_tensor(x, number) for x in result]


def _spared(name: str, *args: Any) -> torch.Tensor | None:
    """The result of a product or a sum, if it follows without computing; else None."""
    if len(args) != 2 or not all(isinstance(x, torch.Tensor) for x in args) or isinstance(args[0], IdentityTable):
        return None
    x, table = args
    if torch.result_type(x, table) != x.dtype or torch.broadcast_shapes(x.shape, table.shape) != x.shape:
        return None
    if table.number == (1 if name in _PRODUCTS else 0):
        return x
    return IdentityTable.from_tensor(table.as_subclass(torch.Tensor).expand(x.shape), 0) if name in _PRODUCTS else None
