"""The work of the host for one call of regions on a GPU: calls of Python, operators, and what is found once."""

from __future__ import annotations

import collections
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import attention
from benchmarks.comparison import Shape
from rope_patch.attention import merging
from rope_patch.attention.cudnn_kernels import CuDNNWindows
from rope_patch.attention.executors import merged, products
from rope_patch.attention.spans import Span
from rope_patch.attention.sums import Gradient, Sum
from tests.attention.fake_cudnn import Frontend

SHAPE = Shape(1024, 2, 1, 16, "bfloat16")
ROWS, SLOTS = slice(None), 10


class Nothing(Frontend):
    """Operators that compute nothing, so that what is counted is the way to them."""

    def sdpa_fwd(self, q, k, v, *_):
        return torch.empty_like(q), q.new_empty(*q.shape[:3], 1, dtype=torch.float32)

    def sdpa_bwd(self, grad, q, k, v, *_, **__):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@pytest.fixture
def _stubs(monkeypatch):
    """The kernels of a GPU, which compute nothing here, on whatever processor."""
    Nothing().put(monkeypatch)
    monkeypatch.setattr(products, "_instructions", lambda: {"amx_bf16": True})
    monkeypatch.setattr(merged, "kernel_for", lambda *_: CuDNNWindows(least=0))
    monkeypatch.setattr(merged, "summed", lambda out: out)
    monkeypatch.setattr(merging, "_fold", lambda *_: None)
    merged._blocks_without_bias.cache_clear()


def calls_of(run):
    """How many functions of Python are called."""
    count = 0

    def follow(frame, event, argument):
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(follow)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func._schema.name.partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.unpoisoned
@pytest.mark.usefixtures("_stubs")
@pytest.mark.parametrize(("backward", "most"), [(False, 145), (True, 425)])
def test_the_host_calls_few_functions(backward, most):
    side = attention.regions(SHAPE, "rerope", backward)
    side.run()
    assert calls_of(side.run) <= most


@pytest.mark.unpoisoned
@pytest.mark.usefixtures("_stubs")
def test_gradients_are_neither_filled_nor_copied_where_a_tile_says_all():
    side = attention.regions(SHAPE, "rerope", backward=True)
    side.run()
    with Operators() as counted:
        side.run()
    names = counted.names
    # the region of far tokens has no gradient for the first queries and the last keys; values get one of each region
    assert (names["copy_"], names["zero_"], names["add_"], names["_to_copy"]) == (2, 2, 1, 2)
    assert not names["zeros"] + names["zeros_like"] + names["new_zeros"] + names["fill_"]


@pytest.mark.usefixtures("_stubs")
def test_the_tiles_of_equal_calls_are_found_once():
    found = merged._blocks_without_bias
    for _ in range(2):  # layers
        for backward in (False, True):
            attention.regions(SHAPE, "self_extend", backward).run()
    assert found.cache_info().misses == 1
    attention.regions(SHAPE, "dca").run()
    assert found.cache_info().misses == 2


def test_spans_that_are_equal_have_one_hash():
    spans = [Span(slice(0, 1), slice(2, 9), slice(0, 9), first) for first in (0, 0, 4)]
    assert len(set(spans)) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "runs",
    [
        pytest.param([(0, SLOTS)], id="one for all"),
        pytest.param([(0, 4), (4, SLOTS)], id="side by side"),
        pytest.param([(6, 9), (1, 3)], id="with gaps"),
        pytest.param([(0, SLOTS), (2, 5)], id="all first"),
        pytest.param([(2, 5), (0, SLOTS)], id="all later"),
        pytest.param([(0, 6), (4, 8)], id="overlapping"),
        pytest.param([], id="none"),
    ],
)
@pytest.mark.parametrize("heads", [slice(0, 2), slice(1, 2)], ids=["all heads", "some heads"])
@pytest.mark.parametrize("first", [0, 3])
def test_a_sum_is_that_of_all_tiles(runs, heads, first, dtype):
    random, like = torch.Generator().manual_seed(0), torch.empty(2, 2, SLOTS, 4, dtype=dtype)
    gradient, expected = Gradient(like), torch.zeros(like.shape)
    slots = [slice(start + first, stop + first) for start, stop in runs]
    total = Sum(gradient, (ROWS, heads), [(ROWS, run) for run in slots], first)
    for (start, stop), run in zip(runs, slots, strict=True):
        share = torch.randn(2, heads.stop - heads.start, stop - start, 4, generator=random).to(dtype)
        expected[:, heads, start:stop] += share
        total.add(ROWS, run, share)
    total.close()
    assert torch.equal(gradient.all(), expected.to(dtype))


def test_rows_without_a_tile_have_no_gradient():
    gradient, share = Gradient(torch.empty(2, 1, SLOTS, 4)), torch.ones(1, 1, 3, 4)
    total = Sum(gradient, (ROWS, slice(0, 1)), [(slice(1, 2), slice(2, 5))])
    total.add(slice(1, 2), slice(2, 5), share)
    total.close()
    assert gradient.all()[0].eq(0).all()
    assert gradient.all().sum() == share.numel()
