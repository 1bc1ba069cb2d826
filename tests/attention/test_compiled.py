"""Every call of the fused kernel is compiled for a GPU that is not here: Triton's interpreter accepts more."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from rope_patch.attention import merging
from tests.attention.test_fused import BOTH_DIRECTIONS, SPECS, USUAL, WAYS, Case, errors_of, needs_triton


def compiled() -> dict[str, str]:
    """The errors of the compiler for every kernel of all calls above, on an H100 that is not here."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from benchmarks.registers import Absent

    driver.set_active(Absent(GPUTarget("cuda", 90, 32)))
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
