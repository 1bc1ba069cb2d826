"""How many kernels a decoding step launches, how often it waits for one, and how many graphs a compiler makes of it:
what a small model's time consists of.
"""

from __future__ import annotations

import functools
import gc
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
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
    """Kernels a layer of one step: how many more than unpatched, and those of the unpatched model."""
    return _a_layer(scheme, lambda scheme, layers: sum(_counted(shape, scheme, layers)[0].values()))


def operators(shape: Shape, scheme: str) -> tuple[float, float]:
    """Operators a layer of one step that PyTorch dispatches, views included, likewise."""
    return _a_layer(scheme, lambda scheme, layers: _counted(shape, scheme, layers)[2])


def calls(shape: Shape, scheme: str) -> tuple[float, float]:
    """Calls of Python functions a layer of one step, likewise."""
    return _a_layer(scheme, lambda scheme, layers: _called(shape, scheme, layers))


def host_time(shape: Shape, scheme: str) -> tuple[float, float]:
    """Microseconds a layer of one step on one thread, likewise. States are so small that this is the time of Python
    and of the dispatcher: what a GPU waits for.
    """
    sides = {(name, layers): decoding(shape, name, layers=layers) for name in (scheme, None) for layers in (4, 16)}
    times: dict[tuple[str | None, int], list[int]] = {key: [] for key in sides}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(_STEPS):
            for key, side in sides.items():
                start = time.process_time_ns()
                side.run()
                times[key].append(time.process_time_ns() - start)
    finally:
        torch.set_num_threads(threads)
    quartile = {key: statistics.quantiles(found)[0] for key, found in times.items()}
    ours, plain = ((quartile[name, 16] - quartile[name, 4]) / 12 / 1000 for name in (scheme, None))
    return ours - plain, plain


_STEPS = 100
"""Timed tokens of each model: the lower quartile leaves out those that something disturbed."""


def _a_layer(scheme: str, count: Callable[[str | None, int], float]) -> tuple[float, float]:
    """The count of four layers minus that of two, halved, so that work once a forward is apart: under a scheme beyond
    the unpatched model, and of the unpatched model.
    """
    ours, plain = ((count(name, 4) - count(name, 2)) / 2 for name in (scheme, None))
    return ours - plain, plain


def waits(shape: Shape, scheme: str) -> tuple[float, float]:
    """How often the host waits for the device in one step, likewise."""

    def found(scheme: str | None) -> int:
        kernels, read, _ = _counted(shape, scheme, 2)
        return sum(kernels[name] for name in _WAITS) + read

    return found(scheme) - found(None), found(None)


def graphs(shape: Shape, scheme: str) -> tuple[float, float]:
    """Graphs that Dynamo traces for tokens after a static cache: those under a scheme, and of the unpatched model."""
    return _traced(shape, scheme)[0], _traced(shape, None)[0]


def breaks(shape: Shape, scheme: str) -> tuple[float, float]:
    """The number of breaks in the graphs of the same call, likewise of both sides."""
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


def _counted(shape: Shape, scheme: str | None, layers: int) -> tuple[Counter[str], int, int]:
    """Kernels by name, reads of the host, and all operators."""
    side = decoding(shape, scheme, layers=layers)
    side.run()
    with _Reads() as reads, _Kernels() as kernels:
        side.run()
    return kernels.names, reads.count, kernels.operators


def _called(shape: Shape, scheme: str | None, layers: int) -> int:
    side, count = decoding(shape, scheme, layers=layers), 0

    def follow(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    side.run()
    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # objects that earlier work left would be deleted in between, by functions of their own
    sys.setprofile(follow)
    try:
        side.run()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return count


class _Kernels(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
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
