"""Time, taken in turn, and peak memory, taken in a process that did nothing else before."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.comparison import Maker, Shape, Side

T = TypeVar("T")

_M_MMAP_THRESHOLD = -3  # from malloc.h


@dataclass(frozen=True)
class Patience:
    """How long to repeat: until the time is over, within the bounds on rounds.

    Attributes:
        seconds: for all rounds of one comparison together.
        least, most: rounds.
    """

    seconds: float = 3.0
    least: int = 3
    most: int = 200


def in_turn(sides: Sequence[Side], device: str, patience: Patience) -> list[list[float]]:
    """Seconds of each side in each round; a round runs every side once, in the given order.

    The first round warms up and is thrown away, unless it alone took several times as long as all should: on a GPU
    always, where kernels are compiled and shapes are planned in it.
    """
    rounds = [_round(sides, device)]
    if device == "cuda" or sum(rounds[0]) <= 3 * patience.seconds:
        rounds.clear()
        end = time.perf_counter() + patience.seconds
        while len(rounds) < patience.least or (len(rounds) < patience.most and time.perf_counter() < end):
            rounds.append(_round(sides, device))
    return [list(times) for times in zip(*rounds, strict=True)]


def _round(sides: Sequence[Side], device: str) -> list[float]:
    return [_seconds(side, device) for side in sides]


def _seconds(side: Side, device: str) -> float:
    side.reset()
    _wait(device)
    start = time.perf_counter()
    result = side.run()
    _wait(device)
    seconds = time.perf_counter() - start
    del result  # freeing it is not part of the work
    return seconds


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def matmul_tflops(dtype: str, device: str) -> float:
    """What one large matrix product of this dtype reaches here: the ceiling for everything else."""
    size = 8192 if device == "cuda" else 1024
    shape = Shape(size, dtype=dtype, device=device)
    a, b = shape.random(size, size), shape.random(size, size)
    times = sorted(in_turn([Side(lambda: a @ b)], device, Patience(seconds=0.5, least=5))[0])
    return 2 * size**3 / times[len(times) // 2] / 1e12


def peak_bytes(maker: Maker, shape: Shape) -> int:
    """How much memory one run takes at its peak beyond its inputs, its results included."""
    if shape.device == "cuda":
        return _cuda_peak(maker, shape)
    return peak_and_seconds(maker, shape)[0]


def peak_and_seconds(maker: Maker, shape: Shape) -> tuple[int, float]:
    """The same of one run in a process of its own on CPU, with the time that it took."""
    return in_fresh_process(partial(resident_peak, maker, shape))


def in_fresh_process(function: Callable[[], T]) -> T:
    """What a function returns in a process that has computed nothing before."""
    context = multiprocessing.get_context("forkserver")
    # the server has imported everything and computed nothing, so its children start clean and at once
    context.set_forkserver_preload(["benchmarks.catalogue"])
    with ProcessPoolExecutor(1, mp_context=context) as fresh:
        return fresh.submit(function).result()


def _cuda_peak(maker: Maker, shape: Shape) -> int:
    side = _warm(maker, shape)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    side.run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def resident_peak(maker: Maker, shape: Shape) -> tuple[int, float]:
    """The same in this process, which has done nothing else yet."""
    _return_freed_blocks()
    side = _warm(maker, shape)
    peak = _resident_meter()
    before, start = peak(), time.perf_counter()
    side.run()
    seconds = time.perf_counter() - start
    return max(0, peak() - before), seconds


def _return_freed_blocks() -> None:
    """Let glibc give back every block above 128 KiB when it is freed.

    Left alone it learns from the past to keep them, and what is resident then depends on what ran before; like this
    it is the memory that is in use. Times are measured under the allocator as it was found.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, 2**17)


def _warm(maker: Maker, shape: Shape) -> Side:
    """The side at its full shape, after a small run has loaded code and started threads."""
    small = maker(shape.small())
    small.reset()
    small.run()
    del small
    side = maker(shape)
    side.reset()
    gc.collect()
    return side


def _resident_meter() -> Callable[[], int]:
    """Reads the highest resident memory of this process from now on; from its start where Linux does not help."""
    status = Path("/proc/self/status")
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the mark starts again from what is resident now
    except OSError:
        return lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def read() -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    return read
