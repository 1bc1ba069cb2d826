"""Which kernel scores what on a GPU, decided without one; `tests/test_cuda.py` has their results."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from rope_patch import get_scheme
from rope_patch.attention import engine, kernels
from rope_patch.attention.cudnn_kernels import CuDNN, CuDNNWindows
from rope_patch.attention.executors import fused as fused_executor
from rope_patch.attention.executors import joined
from rope_patch.attention.pieces import Tile
from rope_patch.attention.problem import Problem
from rope_patch.attention.table import choose
from rope_patch.attention.terms import DistanceBias
from rope_patch.attention.tile_kernels import Dense, FlashCUDA, Merged, Work
from rope_patch.schemes.slots import ALL_PAIRS
from tests.attention.fake_cudnn import BY_CUDNN, BY_FLASH, Torch
from tests.attention.problems import spans_of, whole

LENGTH, DIM = 24, 16
OPERATIONS = 2 * 4 * DIM * LENGTH**2
"""Of a causal tile of four heads."""


@pytest.fixture
def called(monkeypatch):
    """Calls of cuDNN and of flash, which compute what `Dense` does."""
    calls, chosen, cudnn = [], {"backend": BY_CUDNN}, Torch()

    def by_cudnn(call):
        def noted(*given, **options):
            calls.append("cuDNN")
            return call(*given, **options)

        return noted

    def by_flash(name):
        def call(self, *given):
            calls.append("flash")
            return getattr(Dense(), name)(*given)

        return call

    cudnn.forward, cudnn.backward = by_cudnn(cudnn.forward), by_cudnn(cudnn.backward)
    cudnn.put(monkeypatch)
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *given, **options: chosen["backend"])
    for name in ("forward", "backward"):
        monkeypatch.setattr(FlashCUDA, name, by_flash(name))
    return calls, chosen


@pytest.mark.parametrize(
    ("tile", "least", "backend", "dim", "by"),
    [
        (Tile(0, LENGTH, 0, LENGTH, "causal"), OPERATIONS, BY_CUDNN, DIM, "cuDNN"),
        (Tile(0, LENGTH, 0, LENGTH), 2 * OPERATIONS, BY_CUDNN, DIM, "cuDNN"),
        (Tile(0, LENGTH, 0, LENGTH, "causal"), OPERATIONS + 1, BY_CUDNN, DIM, "flash"),
        (Tile(0, LENGTH, 0, LENGTH, "causal"), 0, BY_FLASH, DIM, "flash"),
        (Tile(0, LENGTH, 0, LENGTH, "band", 0, 8, distance=0), 0, BY_CUDNN, DIM, "flash"),
        (Tile(0, LENGTH, 0, LENGTH, "causal"), 0, BY_CUDNN, 136, "flash"),
    ],
)
def test_cudnn_scores_large_tiles_and_wide_bands(called, tile, least, backend, dim, by):
    calls, chosen = called
    chosen["backend"] = backend
    q, k, v = (torch.randn(1, heads, LENGTH, dim) for heads in (4, 2, 2))
    work = Work(q, k, v, tile, 0.1)
    merged = Merged(*Dense().forward(work), torch.randn(1, 4, LENGTH, dim))
    kernel = CuDNN(least=least)
    found = (*kernel.forward(work), *kernel.backward(work, merged))
    assert calls == [by, by]
    for one, other in zip(found, (merged.out, merged.lse, *Dense().backward(work, merged)), strict=True):
        torch.testing.assert_close(one, other)


def test_cudnn_is_taken_only_where_it_agrees(monkeypatch):
    states = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, shape=(1, 4, LENGTH, DIM))
    of_cudnn = CuDNNWindows, CuDNN
    for wrong, kind in (
        ((), CuDNNWindows),
        ((CuDNNWindows,), CuDNN),
        (of_cudnn, FlashCUDA),
        ((FlashCUDA,), Dense),
    ):
        monkeypatch.setattr(kernels, "_of_cudnn", lambda: of_cudnn)
        monkeypatch.setattr(kernels, "objection", lambda kernel, *_, wrong=wrong: type(kernel) in wrong)
        assert type(kernels.kernel_for(states, states, masked=False)) is kind
    monkeypatch.setattr(kernels, "objection", lambda kernel, *_: "" if type(kernel) is FlashCUDA else "it differed")
    assert kernels.account(states, states, masked=False) == "flash; " + "; ".join(
        f"not {name}: it differed" for name in ("cuDNN with windows", "cuDNN")
    )
    assert kernels.account(states, states, masked=True).endswith("not flash: tiles have masks")


PLAIN = (ALL_PAIRS,)
REROPE = tuple(region for region in get_scheme("rerope:window=6").segments() if region.stop > 0)
DCA = tuple(get_scheme("dca:chunk_size=12,local_window=3").segments())


@pytest.mark.parametrize(
    ("regions", "queries", "kernel", "changes", "planned", "gradients", "fused"),
    [
        pytest.param(REROPE, 30, FlashCUDA(), {}, False, False, False, id="flash per region"),
        pytest.param(REROPE, 30, CuDNN(), {}, False, True, False, id="also by cuDNN"),
        pytest.param(DCA, 30, FlashCUDA(), {}, False, False, True, id="chunks without gradients"),
        pytest.param(DCA, 30, FlashCUDA(), {}, False, True, False, id="chunks with gradients"),
        pytest.param(DCA, 30, CuDNN(), {}, False, False, True, id="chunks by torch's cuDNN, without gradients"),
        pytest.param(DCA, 30, CuDNNWindows(least=0), {}, False, False, False, id="chunks in runs"),
        pytest.param(DCA, 30, CuDNNWindows(), {}, False, False, True, id="chunks too small for cuDNN"),
        pytest.param(PLAIN, 30, Dense(), {"bias": DistanceBias(torch.neg)}, False, True, True, id="a bias"),
        pytest.param(REROPE, 30, Dense(), {}, False, True, True, id="float32"),
        pytest.param(REROPE, 30, FlashCUDA(), {"softcap": 2.0}, False, True, True, id="a softcap"),
        pytest.param(REROPE, 1, FlashCUDA(), {}, True, False, False, id="a token with a plan of slots"),
        pytest.param(DCA, 1, FlashCUDA(), {}, True, False, False, id="a token under chunks, likewise"),
        pytest.param(DCA, 8, FlashCUDA(), {}, True, False, False, id="a few tokens under chunks, likewise"),
        pytest.param(REROPE, 1, FlashCUDA(), {}, False, False, True, id="a token of padded rows"),
        pytest.param(
            PLAIN, 1, Dense(), {"bias": DistanceBias(torch.neg)}, True, False, False, id="a token under a bias"
        ),
        pytest.param(
            PLAIN, 8, Dense(), {"bias": DistanceBias(torch.neg)}, True, False, True, id="a few tokens under a bias"
        ),
    ],
)
def test_what_the_fused_kernel_scores(regions, queries, kernel, changes, planned, gradients, fused, monkeypatch):
    positions = torch.arange(30)[None]
    inputs = Problem((), torch.randn(1, 2, 30, 8), positions[:, -queries:], positions, None, True, 30 - queries, 1)
    inputs = dataclasses.replace(inputs, **changes)
    states = torch.randn(1, 4, queries, 8), torch.randn(1, 2, 30, 8)
    monkeypatch.setattr(engine, "kernel_for", lambda *_, masked: kernel)
    monkeypatch.setattr(CuDNNWindows, "batches", lambda *_: True)
    yes, no = (lambda problem: ""), (lambda problem: "it was told so")
    rows = {
        executor: dataclasses.replace(executor, supports=yes if does else no)
        for executor, does in ((joined.EXECUTOR, planned), (fused_executor.EXECUTOR, True))
    }
    table = [dataclasses.replace(row, executor=rows.get(row.executor, row.executor)) for row in engine.TABLE["cuda"]]
    with torch.set_grad_enabled(gradients):
        taken = choose(table, whole(inputs, *states, regions=regions, find_spans=spans_of))
    assert (taken.name == "fused") == fused


def test_running_sums_leave_a_stage_less():
    """Three stages took 263,168 bytes of the 232,448 that a program has on an H100, as Triton 3.6 compiles them."""
    forward, *others = fused_executor.blocks_for(torch.bfloat16, 128, 4096, 1, "sm_90")
    of_sums = fused_executor.blocks_for(torch.bfloat16, 128, 4096, 1, "sm_90", sums=True)
    assert (forward.stages, of_sums[0]) == (3, forward._replace(stages=2))
    assert list(of_sums[1:]) == others
