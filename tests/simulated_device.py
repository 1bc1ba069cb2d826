"""A CUDA device without a GPU: tensors say that they are on `cuda:0`, hold real values, and are computed on the CPU.

`SimulatedDevice` refuses operators on tensors of two devices, as a GPU does, and records by file and line what costs
time there: operators, synchronisations of the host, and copies from the host.
"""

from __future__ import annotations

import collections
import contextlib
import traceback
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from rope_patch.models.cached_keys import CachedKeys
from rope_patch.mounting import hooks

CUDA = torch.device("cuda:0")

aten = torch.ops.aten
SYNCHRONISING = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten.repeat_interleave.Tensor,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
}
"""Operators whose result the host reads, or whose result has a shape that the host must know."""
MOVING = {"_to_copy", "copy_"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


class Simulated(torch.Tensor):
    """A tensor of the simulated device; `held` has its values."""

    held: torch.Tensor
    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor, *_: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype
        )

    def __init__(self, held: torch.Tensor, *_: Any) -> None:
        self.held = held

    def __repr__(self, **_: Any) -> str:
        return f"Simulated({self.held!r})"

    def get_device(self) -> int:
        """Its index."""
        return 0

    def tolist(self) -> Any:
        """A read of the whole tensor."""
        return self.cpu().tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """A read of the whole tensor."""
        return self.cpu().numpy(*args, **kwargs)

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        """A read of the whole tensor."""
        SimulatedDevice.current[-1].note("synchronisations", "cpu")
        return self.held

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A conversion, or a read."""
        others = [x for x in args if isinstance(x, torch.Tensor)]
        if others:
            device, dtype = others[0].device, others[0].dtype
        else:
            device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type == "cpu":
            return self.cpu().to(dtype or self.dtype)
        return self if dtype in (None, self.dtype) else torch.Tensor.to(self, dtype=dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} outside of the simulated device")


class SimulatedKeys(CachedKeys):
    """Keys with positions on the simulated device: `CachedKeys` that hold values."""

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    __new__ = Simulated.__new__
    __torch_dispatch__ = Simulated.__torch_dispatch__

    def __init__(self, held: torch.Tensor, positions: torch.Tensor) -> None:
        self.held, self.positions = held, positions

    def plain(self) -> torch.Tensor:
        """The same values without positions."""
        return Simulated(self.held)


def values(x: torch.Tensor) -> torch.Tensor:
    """The values of a tensor on either device, for a comparison."""
    return getattr(x, "held", x).detach()


class SimulatedDevice(TorchDispatchMode):
    """While it is entered, there is a device `cuda:0`.

    Attributes:
        operators: how often each was called, by name, without views.
        prefill: how many of them a prefill took; set by who runs it.
        synchronisations, copies: how often the host waited, or sent a tensor, by `operator at file:line`.
    """

    current: list[SimulatedDevice] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self._patches = contextlib.ExitStack()
        self.prefill = 0
        self.clear()

    def clear(self) -> None:
        """Forget what was recorded."""
        self.operators: collections.Counter[str] = collections.Counter()
        self.synchronisations: collections.Counter[str] = collections.Counter()
        self.copies: collections.Counter[str] = collections.Counter()

    def note(self, what: str, name: str) -> None:
        """Count one, at the line of this package, or of Transformers, that asked for it."""
        stack = [
            frame.filename.rpartition("site-packages/")[2] + f":{frame.lineno}" for frame in traceback.extract_stack()
        ]
        for package in ("rope_patch/", "transformers/"):
            for place in reversed(stack):
                if package in place and "tests/" not in place:
                    getattr(self, what)[f"{name} at {package}{place.rpartition(package)[2]}"] += 1
                    return
        getattr(self, what)[f"{name} at the caller"] += 1

    def __enter__(self) -> SimulatedDevice:
        torch._C._ensureCUDADeviceGuardSet()
        made, of = torch.tensor, CachedKeys.of

        def tensor(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
            found = made(data, *args, **kwargs)
            if device is None or torch.device(device).type != "cuda":
                return found
            self.note("copies", "tensor")
            return Simulated(found)

        def keys(tensor: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            held = getattr(tensor, "held", None)
            return of(tensor, positions) if held is None else SimulatedKeys(held, positions)

        for owner, name, value in (
            (torch.cuda, "_lazy_init", lambda: None),
            (torch, "tensor", tensor),
            (CachedKeys, "of", staticmethod(keys)),
            (hooks, "LONG", 2**62),  # an `IdentityTable` is a plain tensor of another type; it changes no value
        ):
            self._patches.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, value)
        SimulatedDevice.current.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        SimulatedDevice.current.pop()
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        ours = [x for x in tensors if hasattr(x, "held")]
        others = [x for x in tensors if not hasattr(x, "held")]
        device = None if kwargs.get("device") is None else torch.device(kwargs["device"])
        arrives = device is not None and device.type == "cuda"
        if not ours and not arrives:
            return func(*args, **kwargs)
        if ours and device is not None and not arrives:  # autograd asks for the device of the values
            device = None
        self._judge(func, name, args, ours, others, arrives)
        if name == "_to_copy" and ours and kwargs.get("dtype") in (None, ours[0].dtype):
            return ours[0]
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        args_of, kwargs_of = tree_map(values_of, (args, kwargs))
        if func is aten.bmm.dtype:  # which a CPU has not
            func, args_of = aten.bmm.default, [x.to(args_of[2]) for x in args_of[:2]]
        result = func(*args_of, **kwargs_of)
        known = {id(x.held): x for x in ours}

        def wrapped(x: Any) -> Any:
            return known.get(id(x)) if id(x) in known else Simulated(x) if isinstance(x, torch.Tensor) else x

        found = tree_map(wrapped, result)
        return return_and_correct_aliasing(func, args, kwargs, found) if ours and device is None else found

    def _judge(self, func: Any, name: str, args: Any, ours: Any, others: Any, arrives: bool) -> None:
        """Count an operator, or refuse its devices."""
        returned = func._schema.returns
        view = bool(returned) and returned[0].alias_info is not None and not returned[0].alias_info.is_write
        self.operators[name] += not view
        by_mask = name in INDEXING and any(x is not None and x.dtype == torch.bool for x in args[1])
        if func in SYNCHRONISING or by_mask:
            self.note("synchronisations", name)
        if others and (arrives or (name == "copy_" and ours)):
            self.note("copies", name)
        from_host = [x for x in others if x.ndim > 0]
        if ours and from_host and name in INDEXING:
            self.note("copies", name)
        elif ours and from_host and name not in MOVING:
            raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got two devices")


def values_of(x: Any) -> Any:
    """A tensor of the device as one of the CPU; anything else as it is."""
    return getattr(x, "held", x) if isinstance(x, torch.Tensor) else x


def moved(model: nn.Module) -> nn.Module:
    """A model with all parameters and buffers on the simulated device."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(Simulated(parameter.detach()), parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = Simulated(buffer)
    return model
