"""How many kernels a decoding step launches, how often it waits for one, and how many graphs a compiler makes of it:
what a small model's time consists of.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.comparison import Shape
from benchmarks.models import decoding, generated

_WAITS = {"_local_scalar_dense", "equal", "masked_select", "nonzero"}
"""Operators whose result the host reads, or needs for a shape."""
_NO_KERNEL = {"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"""Operators that compute nothing and are no views by their schema."""


def per_layer(shape: Shape, scheme: str) -> tuple[float, float]:
    """Kernels a layer of one step: how many more than unpatched, and those of the unpatched model.

    It is what four layers have beyond two, halved, so that work once a forward is apart.
    """

    def found(scheme: str | None) -> float:
        two, four = (sum(_counted(shape, scheme, layers)[0].values()) for layers in (2, 4))
        return (four - two) / 2

    return found(scheme) - found(None), found(None)


def waits(shape: Shape, scheme: str) -> tuple[float, float]:
    """How often the host waits for the device in one step, likewise."""

    def found(scheme: str | None) -> int:
        kernels, read = _counted(shape, scheme, 2)
        return sum(kernels[name] for name in _WAITS) + read

    return found(scheme) - found(None), found(None)


def graphs(shape: Shape, scheme: str) -> tuple[float, float]:
    """Graphs that Dynamo traces for tokens after a static cache: those under a scheme, and of the unpatched model."""
    return _traced(shape, scheme)[0], _traced(shape, None)[0]


def breaks(shape: Shape, scheme: str) -> tuple[float, float]:
    """Its breaks, likewise."""
    return _traced(shape, scheme)[1], _traced(shape, None)[1]


@functools.lru_cache  # both are read from one run
def _traced(shape: Shape, scheme: str | None) -> tuple[int, int]:
    from torch._dynamo.utils import counters

    side = generated(shape, scheme, new=4, layers=2, backend="eager")
    side.reset()
    torch.compiler.reset()
    counters.clear()
    side.run()
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def _counted(shape: Shape, scheme: str | None, layers: int) -> tuple[Counter[str], int]:
    side = decoding(shape, scheme, layers=layers)
    side.run()
    with _Reads() as reads, _Kernels() as kernels:
        side.run()
    return kernels.names, reads.count


class _Kernels(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        returned = func._schema.returns
        view = bool(returned) and returned[0].alias_info is not None and not returned[0].alias_info.is_write
        self.names[name] += not view and name not in _NO_KERNEL
        return func(*args, **(kwargs or {}))


class _Reads(TorchFunctionMode):
    """Of whole tensors, which no operator shows on CPU."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in ("tolist", "numpy", "cpu")
        return func(*args, **(kwargs or {}))
