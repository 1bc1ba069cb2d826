"""Ceilings of the fused kernels as compiled for GPUs that are not here: registers, memory and matrix instructions."""

from __future__ import annotations

import importlib.util
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from benchmarks import registers

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason='Triton is not installed: pip install ".[triton]"'
)

SPILLED = {"sm_80": 64, "sm_90": 0, "sm_100": 0, "gfx942": 0}
"""Most spilled bytes of a thread."""

TENSOR = {"sm_90": "wgmma", "sm_100": "tcgen05"}
"""The instructions of whole warp groups, for products of at least 64 rows."""


def beyond(kernel: registers.Kernel) -> list[str]:
    """What exceeds a ceiling."""
    needed, newest = registers.needs(kernel), TENSOR.get(kernel.arch)
    found = []
    if needed.shared > registers.SHARED[kernel.arch]:
        found.append(f"{needed.shared} bytes of shared memory")
    if needed.spilled > SPILLED[kernel.arch]:
        found.append(f"{needed.spilled} spilled bytes")
    if newest and kernel.kernel != "decode" and list(needed.products) != [newest]:
        found.append(f"products by {needed.products}")
    return [f"{' '.join(map(str, kernel))}: {text}" for text in found]


@pytest.fixture(scope="module")
def pool():
    """A process of its own: the absent device stays the active one there."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        yield process


@needs_triton
@pytest.mark.nightly
@pytest.mark.parametrize("name", registers.KERNELS)
@pytest.mark.parametrize("arch", registers.SHARED)
def test_kernels_fit_their_ceilings(pool, arch, name):
    chosen = [kernel for kernel in registers.kernels() if (kernel.arch, kernel.kernel) == (arch, name)]
    assert len(chosen) == 12
    assert not [text for texts in pool.map(beyond, chosen) for text in texts]


def rotate(first: int | torch.Tensor) -> None:
    """Compile the rotation of some keys from a slot on."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from rope_patch.attention import triton_kernels as kernels

    driver.set_active(registers.Absent(GPUTarget("cuda", 90, 32)))
    states = kernels.States.from_tensor(torch.empty(1, 4, 300, 64, dtype=torch.bfloat16))
    places = (states,), (states,), ((states, states),), torch.arange(64), first, 300
    kernels.rotate.warmup(*places, False, 32, 64, grid=(10, 4, 1))


@needs_triton
@pytest.mark.nightly
@pytest.mark.parametrize("first", [0, 1, 230, torch.tensor(3)], ids=str)
def test_a_rotation_compiles_from_any_slot(pool, first):
    pool.submit(rotate, first).result()  # Triton makes a constant of 1, which has no dtype


@needs_triton
@pytest.mark.nightly
def test_blocks_that_are_too_large_are_seen_to_spill(pool):
    kernel = registers.Kernel("sm_90", "key_gradients", "rerope", "bfloat16", 128)
    assert pool.submit(registers.needs, kernel, registers.Blocks(64, 128, 8, 2)).result().spilled > 500
