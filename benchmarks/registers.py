"""What the fused kernels need on GPUs that are not here: compiled ahead of time, read from ptxas.

    python -m benchmarks.registers                     the table of docs/benchmarks.md (some minutes, no GPU)
    python -m benchmarks.registers --only sm_90 dca    some of its rows

Triton's wheel carries ptxas, so registers and spilled bytes are known without a device. What they cost in time is not.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rope_patch import get_scheme
from rope_patch.attention.executors import fused
from rope_patch.attention.executors.fused import Blocks
from rope_patch.attention.problem import Problem
from rope_patch.attention.turner import Fused
from rope_patch.schemes.slots import ALL_PAIRS

SHARED = {"sm_80": 101_376, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}
"""Shared memory of a program in bytes, by architecture; for sm_80 that of the smaller sm_86 and sm_89."""

SCHEMES = {"plain": "", "rerope": "rerope:window=512", "dca": "dca:chunk_size=1024,local_window=256"}
KERNELS = ("forward", "decode", "query_gradients", "key_gradients")
HEADS, KV_HEADS, LENGTH = 32, 8, 4096


class Kernel(NamedTuple):
    """One row of the table."""

    arch: str
    kernel: str
    scheme: str
    dtype: str
    head_dim: int

    @property
    def words(self) -> set[str]:
        """What `--only` compares with."""
        return {self.arch, self.kernel, self.scheme, self.dtype, str(self.head_dim)}


@dataclass(frozen=True)
class Needs:
    """What a kernel needs; on AMD only that it was compiled.

    Attributes:
        shared: memory of a program in bytes.
        registers: of a thread.
        spilled: bytes that a thread stores and loads because registers do not suffice.
        products: matrix instructions in the program by name.
    """

    shared: int
    registers: int
    spilled: int
    products: dict[str, int]


def kernels() -> Iterator[Kernel]:
    """Every row."""
    names = itertools.product(SHARED, KERNELS, SCHEMES, ("bfloat16", "float16"), (64, 128))
    yield from itertools.starmap(Kernel, names)


class Absent:
    """A driver of Triton for a device that is not there."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        """What to compile for."""
        return self._target

    def get_current_device(self) -> int:
        """A number of its own, because Triton keeps what it compiled by this number."""
        return int("".join(filter(str.isdigit, str(self._target.arch))))

    def get_current_stream(self, device: int | None = None) -> int:
        """Its stream."""
        return 0


def needs(kernel: Kernel, blocks: Blocks | None = None) -> Needs:
    """Compile a kernel. Triton keeps to the absent device afterwards: call this in a process of its own.

    Args:
        kernel: which one.
        blocks: default `fused.blocks_for`.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    nvidia = kernel.arch.startswith("sm_")
    target = GPUTarget("cuda", int(kernel.arch[3:]), 32) if nvidia else GPUTarget("hip", kernel.arch, 64)
    driver.set_active(Absent(target))
    compiled = _compiled(kernel, blocks)
    shared = compiled.metadata.shared
    return _read(compiled.asm["ptx"], kernel.arch, shared) if nvidia else Needs(shared, 0, 0, {})


def _compiled(kernel: Kernel, blocks: Blocks | None) -> Any:
    from rope_patch.attention import triton_kernels

    length, dtype, dim = 1 if kernel.kernel == "decode" else LENGTH, getattr(torch, kernel.dtype), kernel.head_dim
    query = torch.empty(1, HEADS, length, dim, dtype=dtype)
    key = torch.empty(1, KV_HEADS, LENGTH, dim, dtype=dtype)
    positions = torch.arange(LENGTH)[None]
    regions = get_scheme(SCHEMES[kernel.scheme]).segments() if SCHEMES[kernel.scheme] else (ALL_PAIRS,)
    start = LENGTH - length
    inputs = Problem((), key, positions[:, start:], positions, None, length > 1, start, 0.1)
    call = Fused(query, key, regions, (None,) * len(regions), (None,) * len(regions))
    defaults = fused.blocks_for(dtype, dim, HEADS // KV_HEADS * length, len(regions), kernel.arch)
    blocks = blocks or dict(zip(("query_gradients", "key_gradients"), defaults[1:], strict=True)).get(kernel.kernel)
    blocks = blocks or defaults[0]
    call = call.past() if inputs.causal else call
    given, how = fused.described(inputs, call, blocks, (query, key, key, None, None, None))
    if not kernel.arch.startswith("sm_"):
        how = how._replace(products="ieee")
    states, numbers = triton_kernels.States.from_tensor, triton_kernels.States.from_tensor(torch.empty(query.shape[:3]))
    out, of_q, of_k = states(query), (states(query),) * len(how.areas), (states(key),) * len(how.areas)
    options = {**blocks.options, "grid": (1, 1, 1)}
    if kernel.kernel.endswith("gradients"):
        own = (of_k, states(key)) if kernel.kernel == "key_gradients" else (of_q, None)
        places = given, out, out, numbers, numbers, *own, None, None
        return triton_kernels.gradients.warmup(*places, kernel.kernel == "key_gradients", how, **options)
    parts, splits, span = (states(query.float()), 8, 512) if kernel.kernel == "decode" else (out, 1, LENGTH)
    return triton_kernels.forward.warmup(given, parts, numbers, splits, span, how, **options)


def _read(ptx: str, arch: str, shared: int) -> Needs:
    """Registers and spills by ptxas."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as work:
        source = Path(work) / "kernel.ptx"
        source.write_text(ptx)
        name = arch + ("a" if arch in ("sm_90", "sm_100") else "")
        options = ["-v", "-lineinfo", "--regAllocOptLevel=2", f"--gpu-name={name}"]  # those of Triton
        words = [get_ptxas(int(arch[3:])).path, *options, source, "-o", "/dev/null"]
        log = subprocess.run(words, capture_output=True, text=True, check=True).stderr
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.search(r"Used (\d+) registers", log)
    assert spilled is not None, log  # for the type checker
    assert registers is not None, log
    patterns = {"wgmma": r"wgmma\.mma_async", "tcgen05": r"tcgen05\.mma", "mma.sync": r"\bmma\.sync"}
    counts = {name: len(re.findall(pattern, ptx)) for name, pattern in patterns.items()}
    products = {name: count for name, count in counts.items() if count}
    return Needs(shared, int(registers[1]), int(spilled[1]) + int(spilled[2]), products)


def table(found: dict[Kernel, Needs]) -> Iterator[str]:
    """For each kernel and width the most registers and spilled bytes of all schemes and dtypes, in Markdown."""
    every = [arch for arch in SHARED if any(kernel.arch == arch for kernel in found)]
    yield f"| kernel | {' | '.join(every)} |"
    yield "|---|" + "---|" * len(every)
    for name in sorted({kernel.kernel for kernel in found}):
        cells = []
        for arch in every:
            here = {kernel: x for kernel, x in found.items() if (arch, name) == (kernel.arch, kernel.kernel)}
            products = sorted({product for x in here.values() for product in x.products})
            figures = []
            for dim in sorted({kernel.head_dim for kernel in here}):
                needed = [x for kernel, x in here.items() if kernel.head_dim == dim]
                figures.append(f"{max(x.registers for x in needed)} / {max(x.spilled for x in needed)}")
            cells.append(f"{'; '.join(figures)}, {' and '.join(products)}" if products else "compiles")
        yield f"| `{name}` | {' | '.join(cells)} |"


def main() -> None:
    """Print every row to the standard error, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="rows with all of these words")
    only, found = set(parser.parse_args().only), {}
    for kernel in kernels():
        if only <= kernel.words:
            found[kernel] = needs(kernel)
            print(*kernel, found[kernel], file=sys.stderr, flush=True)
    print(*table(found), sep="\n")


if __name__ == "__main__":
    main()
