"""Bands by cuDNN, in one call or in squares, from what its arguments mean; no GPU."""

import dataclasses
import math

import pytest
import torch

from rope_patch import RopePatchWarning
from rope_patch.attention import kernels
from rope_patch.attention.cudnn_kernels import CuDNN, CuDNNWindows
from rope_patch.attention.executors import merged, reference
from rope_patch.attention.pieces import Tile, tiles_of
from rope_patch.attention.squares import squares_of
from rope_patch.attention.tile_kernels import Dense, FlashCUDA, Merged, Work
from rope_patch.attention.trials import Trial
from tests.attention.fake_cudnn import BY_CUDNN, BY_FLASH, Frontend, Torch
from tests.attention.test_segmented import gradients_of, in_double, inputs_of, pairs_of, region, run_segmented

WINDOW = 8
BANDS = [
    pytest.param(length, offset, low, high, id=f"{length} after {offset}, {low} to {high}")
    for length, offset, low, high in (
        (64, 0, 0, WINDOW),
        (61, 0, 0, WINDOW),
        (61, 0, 0, 7),
        (5, 0, 0, WINDOW),
        (17, 40, 0, WINDOW),
        (17, 5, 0, WINDOW),
        (3, 5, 0, WINDOW),
        (30, 11, 4, 4 + WINDOW),
        (30, 0, 4, 4 + WINDOW),
        (30, 0, 3, 4),
        (30, 11, 4, math.inf),
        (30, 11, 0, math.inf),
        (20, 0, 0, 100),
    )
]


def whole(length, offset, low, high):
    """The one tile of a region."""
    (tile,) = tiles_of(region(low, high), length, offset, whole=True)
    return tile


def tile_work(tile, batch=2, heads=4, kv_heads=2, dtype=torch.float64):
    """A tile with states, and what it is merged into: not its own result, as where there are other keys."""
    random = torch.Generator().manual_seed(0)

    def states(heads, length):
        return torch.randn(batch, length, heads, 8, generator=random, dtype=torch.float64).transpose(1, 2).to(dtype)

    rows, keys = tile.q1 - tile.q0, tile.k1 - tile.k0
    work = Work(states(heads, rows), states(kv_heads, keys), states(kv_heads, keys), tile, 0.3)
    lse = Dense().forward(work)[1].float() + 0.3
    return work, Merged(states(heads, rows), lse, states(heads, rows))


def assert_right(kernel, work, into):
    """Forward and backward of a kernel are those of plain products."""
    found, expected = (
        (*each.forward(work), *each.backward(work, into)) for each in (kernel, Dense(max(1, work.q.shape[2])))
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, check_dtype=False, rtol=2e-5, atol=2e-5)
    assert all(x.dtype == work.q.dtype for x in (found[0], *found[2:]))


@pytest.mark.parametrize(("length", "offset", "low", "high"), BANDS)
def test_squares_cover_a_band_once(length, offset, low, high):
    tile = whole(length, offset, low, high)
    if tile.kind == "causal":
        tile = dataclasses.replace(tile, kind="band", low=low, high=low + length, distance=low)
    counted = torch.zeros(tile.q1 - tile.q0, tile.k1 - tile.k0, dtype=torch.int8)
    for square in squares_of(tile):
        rows, columns = square.q1 - square.q0, square.k1 - square.k0
        assert square.kind == "full" or rows == columns
        every = torch.ones(rows, columns, dtype=torch.int8)
        pairs = {"full": every, "causal": every.tril(), "upper": every.triu()}[square.kind]
        for number in range(square.count):
            q, k = square.q0 + number * square.step, square.k0 + number * square.step
            assert min(q, k) >= 0
            counted[q : q + rows, k : k + columns] += pairs
    assert torch.equal(counted, pairs_of(tile).to(torch.int8))


def test_a_near_window_is_as_many_calls_whatever_the_length():
    counts = {len(list(squares_of(whole(WINDOW * blocks, 0, 0, WINDOW)))) for blocks in range(2, 60)}
    assert counts == {2}


@pytest.mark.parametrize(("length", "offset", "low", "high"), BANDS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("fake", "kernel"), [(Torch, CuDNN), (Frontend, CuDNNWindows)])
def test_a_band_is_the_definition(length, offset, low, high, kv_heads, fake, kernel, monkeypatch):
    called = fake().put(monkeypatch)
    work, into = tile_work(whole(length, offset, low, high), kv_heads=kv_heads)
    assert_right(kernel(least=0, narrowest=0), work, into)
    assert called.calls


@pytest.mark.parametrize(
    ("length", "offset", "low", "high", "bounds"),
    [
        # the near window of a prefill, with and without cached keys, and one longer than the text
        (64, 0, 0, 8, (True, False, 8, -1)),
        (64, 128, 0, 8, (True, True, 8, -1)),
        (64, 0, 0, 70, (True, False, -1, -1)),
        # what is far
        (64, 0, 8, math.inf, (True, False, -1, -1)),
        (64, 128, 8, math.inf, (True, True, -1, -1)),
    ],
)
def test_the_window_counts_the_keys_that_a_query_sees(length, offset, low, high, bounds, monkeypatch):
    called = Frontend().put(monkeypatch)
    CuDNNWindows(least=0).forward(tile_work(whole(length, offset, low, high))[0])
    assert [call[1] for call in called.calls] == [bounds]


@pytest.mark.parametrize("tile", [Tile(0, 40, 0, 30), Tile(0, 40, 0, 40, "causal")], ids=lambda tile: tile.kind)
@pytest.mark.parametrize(("fake", "kernel"), [(Torch, CuDNN), (Frontend, CuDNNWindows)])
def test_other_tiles_are_padded_without_a_trace(tile, fake, kernel, monkeypatch):
    called = fake().put(monkeypatch)
    assert_right(kernel(least=0), *tile_work(tile))
    rows = {call[0][0] if fake is Frontend else call[0][2] for call in called.calls}
    assert rows == {64}


@pytest.mark.parametrize(("offset", "low", "high"), [(0, 0, 8), (0, 8, math.inf), (100, 0, 8), (100, 8, math.inf)])
def test_other_lengths_find_the_same_plan(offset, low, high, monkeypatch):
    called = Frontend().put(monkeypatch)
    for length in (210, 213, 217):
        for run in ("forward", "backward"):
            work, into = tile_work(whole(length, offset, low, high), batch=1)
            getattr(CuDNNWindows(least=0), run)(*((work,) if run == "forward" else (work, into)))
    assert len(set(called.calls)) == 1, called.calls


@pytest.mark.parametrize(
    ("length", "padded"), [(1, 64), (64, 64), (65, 128), (1000, 1024), (4096, 4096), (4097, 4352), (65536, 65536)]
)
def test_a_sixteenth_of_the_length_at_most_is_added(length, padded, monkeypatch):
    called = Frontend().put(monkeypatch)
    tile = Tile(0, length, 0, length, "band", 0, 4)
    states, seen = torch.zeros(1, 1, length, 8), []

    def sdpa_fwd(q, k, v, *_, **__):
        seen.extend(x.shape[2] for x in (q, k, v))
        return q, q[..., :1]

    monkeypatch.setattr(called, "sdpa_fwd", sdpa_fwd)
    out, lse = CuDNNWindows(least=0).forward(Work(states, states, states, tile, 1.0))
    assert seen == [padded] * 3
    assert (out.shape[2], lse.shape[2]) == (length, length)


@pytest.mark.parametrize(
    ("kernel", "tile", "enabled"),
    [
        pytest.param(CuDNN(least=0), Tile(0, 64, 0, 64, "band", 0, 8), True, id="a narrow band without windows"),
        pytest.param(CuDNN(least=0), Tile(0, 64, 0, 64, "causal"), False, id="switched off"),
        pytest.param(CuDNNWindows(least=0), Tile(0, 64, 0, 64, "causal"), False, id="switched off, with windows"),
        pytest.param(CuDNNWindows(), Tile(0, 64, 0, 64, "causal"), True, id="a small tile"),
        pytest.param(
            CuDNNWindows(least=0), Tile(0, 20, 0, 14, "band", 0, 8, distance=0), True, id="keys end before the queries"
        ),
        pytest.param(
            CuDNNWindows(least=0), Tile(0, 20, 0, 20, "band", -3, 8, distance=0), True, id="keys after the query"
        ),
    ],
)
def test_what_is_left_to_flash(kernel, tile, enabled, monkeypatch):
    called = [fake().put(monkeypatch) for fake in (Torch, Frontend)]
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *given, **options: BY_CUDNN if enabled else BY_FLASH)
    for name in ("forward", "backward"):
        monkeypatch.setattr(FlashCUDA, name, lambda self, *given, name=name: getattr(Dense(), name)(*given))
    assert_right(kernel, *tile_work(tile))
    assert not any(fake.calls for fake in called)


class Exclusive(Frontend):
    """Windows that do not count the query's own key, as those of FlashAttention."""

    def seen(self, q, k, is_causal, causal_bottom_right, window_left, window_right):
        return super().seen(q, k, is_causal, causal_bottom_right, window_left + (window_left > 0), window_right)


class TopLeft(Frontend):
    """Every diagonal begins at the first query and the first key."""

    def seen(self, q, k, is_causal, causal_bottom_right, window_left, window_right):
        return super().seen(q, k, is_causal, False, window_left, window_right)


@pytest.mark.parametrize("fake", [Torch, Frontend, Exclusive, TopLeft])
def test_a_trial_sees_windows_that_mean_something_else(fake, monkeypatch):
    kernel = (CuDNN if fake is Torch else CuDNNWindows)(least=0, narrowest=0)
    fake().put(monkeypatch)
    trial = Trial("A kernel of tiles", kernels.objection.compare, kernels.objection.tolerance)
    given = kernel, torch.device("cpu"), torch.bfloat16, 16
    if fake in (Torch, Frontend):
        assert trial(*given) == ""
        return
    with pytest.warns(RopePatchWarning, match="differed from the definition"):
        assert trial(*given)


@pytest.mark.parametrize(
    "spec", ["rerope:window=6", "self_extend:group_size=4,window=7", "dca:chunk_size=9,local_window=2"]
)
@pytest.mark.parametrize("q_length", [45, 20])
@pytest.mark.parametrize("rows", [[[0] * 45] * 2, [[0] * 45, [-1] * 9 + [0] * 36]], ids=["plain", "padded"])
@pytest.mark.parametrize(("fake", "kernel"), [(Torch, CuDNN), (Frontend, CuDNNWindows)])
def test_a_scheme_by_cudnn_is_the_oracle(spec, q_length, rows, fake, kernel, monkeypatch):
    called = fake().put(monkeypatch)
    monkeypatch.setattr(merged, "kernel_for", lambda *_: kernel(least=0, narrowest=0))
    inputs, kept = inputs_of(spec, rows, q_length, 45, torch.float32)
    grad = torch.randn(inputs.branches[0].query.shape, generator=torch.Generator().manual_seed(1))
    expected, slopes = gradients_of(lambda x: reference.attend(x)[0], in_double(inputs), kept, grad)
    found, ours = gradients_of(run_segmented, inputs, kept, grad)
    for one, other in zip([found, *ours], [expected, *slopes], strict=True):
        assert (one.double() - other).norm() / other.norm() < 1e-5
    if kernel is CuDNNWindows and rows[0] == rows[1] and "dca" not in spec:
        assert len(called.calls) == 4, "one call of each region, forward and backward"


def test_the_package_is_tried_first_where_it_is_installed(monkeypatch):
    for found, expected in ((None, (CuDNN,)), (object(), (CuDNNWindows, CuDNN))):
        monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name, found=found: found)
        kernels._of_cudnn.cache_clear()
        assert kernels._of_cudnn() == expected
    kernels._of_cudnn.cache_clear()
