"""Every call of the fused kernel is compiled for a GPU that is not here: Triton's interpreter accepts more."""

import itertools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from benchmarks import registers
from rope_patch import get_scheme
from rope_patch.attention import merging
from rope_patch.attention.executors import fused
from rope_patch.attention.problem import Problem
from rope_patch.attention.turner import Fused
from tests.attention.test_fused import BOTH_DIRECTIONS, SPECS, USUAL, WAYS, Case, errors_of, needs_triton


def compiled() -> dict[str, str]:
    """The errors of the compiler for every kernel of all calls above, on an H100 that is not here."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(registers.Absent(GPUTarget("cuda", 90, 32)))
    JITFunction.__getitem__ = lambda kernel, grid: partial(kernel.run, grid=grid, warmup=True)
    torch.cuda.device_of = lambda _: nullcontext()
    in_half = {f"{name}, half": Case(spec, dtype="bfloat16", head_dim=64, value_dim=64) for name, spec in SPECS.items()}
    found = {}
    for name, case in (USUAL | WAYS | BOTH_DIRECTIONS | in_half).items():
        try:
            errors_of(case)
        except Exception as error:
            found[name] = str(error)
    out, lse = torch.zeros(1, 2, 40, 64).half(), torch.zeros(1, 2, 40)
    merging._fold(out, lse, out.clone(), lse.clone())
    return found


@needs_triton
@pytest.mark.nightly
def test_every_call_compiles():
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(compiled).result() == {}


A100 = 166_912
"""Shared memory of its programs in bytes. On smaller devices of compute capability 8 float32 of width 128 does not
start, which the trial before its use sees.
"""


def compiled_at_all_widths(arch: str) -> dict[str, str]:
    """What is wrong with each kernel as it is launched on a GPU that is not here: the error of its compiler, or more
    shared memory than a program has.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(registers.Absent(GPUTarget("cuda", int(arch[3:]), 32)))
    torch.cuda.device_of = lambda _: nullcontext()
    found, names, what = {}, set(), ""

    def compile(kernel: JITFunction, *arguments: object, **options: object) -> None:
        names.add(kernel.fn.__name__)
        shared = kernel.run(*arguments, warmup=True, **options).metadata.shared
        if shared > (A100 if arch == "sm_80" and dtype == torch.float32 else registers.SHARED[arch]):
            found[f"{kernel.fn.__name__} of {what}"] = f"{shared} bytes of shared memory"

    JITFunction.__getitem__ = lambda kernel, grid: partial(compile, kernel, grid=grid)
    for dtype, width in itertools.product((torch.float16, torch.bfloat16, torch.float32), (64, 128, 256)):
        for queries, terms in itertools.product((300, 1), (False, True)):
            what = f"{queries} queries, {dtype}, width {width}, {terms=}"
            try:
                call_of(arch, dtype, width, queries, terms)
            except Exception as error:
                found[what] = str(error)
        if dtype != torch.float32:
            out, lse = torch.zeros(1, 2, 40, width).to(dtype), torch.zeros(1, 2, 40)
            merging._fold(out, lse, out.clone(), lse.clone())
    if names != {"rotate", "forward", "gradients", "merge", "fold"}:
        found["kernels"] = f"only {names} were launched"
    return found


def call_of(arch: str, dtype: torch.dtype, width: int, queries: int, terms: bool) -> None:
    """A call of two regions, of which one rotates keys, with running sums and sinks if `terms`: forward and, of several
    queries, backward.
    """
    heads, kv_heads, length = 8, 2, 300
    query, key, value = (
        torch.zeros(1, number, n, width, dtype=dtype, requires_grad=queries > 1)
        for number, n in ((heads, queries), (kv_heads, length), (kv_heads, length))
    )
    regions = tuple(region for region in get_scheme("rerope:window=70").segments() if region.stop > 0)
    tables = [(torch.ones(n, width),) * 2 for n in (queries, length)]
    call = Fused(query, key, regions, (tables[0],) * 2, (tables[1], None), torch.arange(width).roll(width // 2))
    positions = torch.arange(length)[None]
    problem = Problem((), value, positions[:, -queries:], positions, None, queries > 1, length - queries, 0.1)
    if terms:
        sums = torch.zeros(1, heads, length, dtype=torch.float64, requires_grad=queries > 1)
        problem = problem.replaced(running_bias=sums, sinks=torch.zeros(heads, dtype=dtype))
    blocks = fused.blocks_for(dtype, width, heads // kv_heads * queries, len(regions), arch, sums=terms)
    fused.PROGRAMS = 1 if queries > 1 else 264  # keys of one query are split
    out = fused.launched(problem, call, blocks)
    if queries > 1:
        out.sum().backward()


@needs_triton
@pytest.mark.nightly
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_every_kernel_compiles_for_a_gpu_in_every_dtype_and_width(arch):
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(compiled_at_all_widths, arch).result() == {}
