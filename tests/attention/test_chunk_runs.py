"""Chunks of a region as the batch of one call: what runs cover, what they give, and how many calls they are; no GPU."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rope_patch import RopePatchWarning, get_scheme
from rope_patch.attention import chunk_runs, cudnn_kernels, tile_kernels
from rope_patch.attention.chunk_runs import in_runs
from rope_patch.attention.cudnn_kernels import CuDNN, CuDNNWindows
from rope_patch.attention.executors import merged, reference
from rope_patch.attention.pieces import Tile, clipped, tiles_of
from rope_patch.attention.spans import Span
from rope_patch.attention.tile_kernels import FlashCUDA
from rope_patch.attention.trials import Trial
from rope_patch.attention.turner import Branch
from tests.attention.fake_cudnn import Frontend, Torch
from tests.attention.test_flash_implementations import Flash
from tests.attention.test_segmented import gradients_of, in_double, inputs_of, pairs_of, region, run_segmented


def pairs_counted(tiles, queries, keys):
    """How many of the tiles, those of runs included, score each pair."""
    counted = torch.zeros(queries, keys, dtype=torch.int8)
    for tile in tiles:
        for number in range(tile.count):
            q = tile.q0 + number * tile.step
            rows = tile.q1 - tile.q0 - (tile.short if number == tile.count - 1 else 0)
            k0 = tile.k0 + (0 if tile.kind == "stairs" else number * tile.step)
            k1 = min(tile.k1 + number * tile.step, tile.keys.stop)
            seen = pairs_of(Tile(0, rows, 0, k1 - k0, "causal" if tile.kind == "causal" else "full"))
            assert min(seen.shape) > 0
            counted[q : q + rows, k0:k1] += seen
    return counted


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 3),
    st.sampled_from([1, 2, float("inf")]),
    st.integers(2, 9),
    st.integers(1, 90),
    st.integers(0, 30),
    st.integers(0, 20),
    st.integers(0, 12),
    st.booleans(),
    st.booleans(),
)
def test_runs_cover_the_pairs_of_a_region_once(start, more, chunk, q_length, offset, first, hidden, climbs, pads):
    some = region(start, start + more, chunk)
    keys = q_length + offset - hidden
    assume(keys > 0)
    tiles = [part for tile in tiles_of(some, q_length, offset, first) for part in clipped(tile, 0, keys)]
    before = chunk_runs.WASTED
    try:
        chunk_runs.WASTED = 1 if pads else before
        runs = list(in_runs(tiles, climbs))
    finally:
        chunk_runs.WASTED = before
    m = torch.arange(q_length)[:, None] + offset + first
    n = torch.arange(keys)[None] + first
    assert torch.equal(pairs_counted(runs, q_length, keys), (some.contains(m, n) & (m >= n)).to(torch.int8))
    assert len(runs) <= len(tiles)
    assert all(run.distance == offset + run.q0 - run.k0 for run in runs)


def branches_of(length, start=0, spec="dca:chunk_size=2048,local_window=512"):
    """Queries and keys without memory: 32 heads and 8 of keys, of 128."""
    query, key = (torch.empty(1, n, size, 128, device="meta") for n, size in ((32, length - start), (8, length)))
    return [Branch(region, query, key) for region in get_scheme(spec).segments()]


@pytest.mark.parametrize(
    ("length", "start", "stairs", "forward", "calls"),
    [
        (8192, 0, True, True, 3),
        (8192, 0, False, True, 5),
        (8192, 0, True, False, 5),
        (32768, 0, True, True, 5),
        (32768, 0, False, True, 9),
        (32768, 0, True, False, 9),
        (1536 * 16, 0, True, True, 3),
        (131072, 0, True, False, 12),
        (32768, 16384, True, True, 9),
    ],
)
def test_how_many_calls_chunks_take(length, start, stairs, forward, calls, monkeypatch):
    monkeypatch.setattr(CuDNNWindows, "batches", lambda *_: True)
    monkeypatch.setattr(CuDNNWindows, "climbs", lambda *_: stairs)
    span = Span(slice(0, 1), slice(0, length - start), slice(0, length), 0)
    blocks = merged.blocks_of([span], branches_of(length, start), CuDNNWindows(), None, forward)
    assert sum(len(block.parts) for block in blocks) == calls
    assert len(blocks) == 1 + (start > 0), "what lies in several blocks is copied"


@pytest.fixture
def trusted(monkeypatch):
    """Trials that stubs of this test passed, and no others; every padding is allowed."""
    for owner, name in ((tile_kernels, "objection_to_runs"), (cudnn_kernels, "objection_to_stairs")):
        known = getattr(owner, name)
        monkeypatch.setattr(owner, name, Trial(known.name, known.compare, known.tolerance))
    monkeypatch.setattr(chunk_runs, "WASTED", 1)


class WithoutZeroStrides(Frontend):
    """A cuDNN that refuses keys shared by a batch."""

    def sdpa_fwd(self, q, k, v, *given, **options):
        if 0 in k.stride():
            raise RuntimeError("CUDNN_STATUS_BAD_PARAM")
        return super().sdpa_fwd(q, k, v, *given, **options)


ROWS = {
    "one row": lambda length: [[0] * length],
    "equal rows": lambda length: [[0] * length] * 2,
    "a padded row": lambda length: [[0] * length, [-1] * 9 + [0] * (length - 9)],
    "a row padded behind": lambda length: [[0] * length, [0] * (length - 7) + [-1] * 7],
}


def assert_is_the_oracle(inputs, kept, kernel, monkeypatch, tolerance=1e-5):
    """Output and gradients by a kernel are those of the definition."""
    monkeypatch.setattr(merged, "kernel_for", lambda *_: kernel)
    heads, length, value_dim = (
        inputs.branches[0].query.shape[1],
        *inputs.query_positions.shape[1:],
        inputs.value.shape[3],
    )
    grad = torch.randn(len(inputs.value), heads, length, value_dim, generator=torch.Generator().manual_seed(1))
    expected, slopes = gradients_of(lambda x: reference.attend(x)[0], in_double(inputs), kept, grad)
    found, ours = gradients_of(run_segmented, inputs, kept, grad)
    for one, other in zip([found, *ours], [expected, *slopes], strict=True):
        assert (one.double() - other).norm() <= tolerance * other.norm().clamp(min=1e-9)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("length", "q_length"), [(90, 90), (83, 83), (91, 91), (90, 41), (83, 3), (83, 70), (18, 18)])
@pytest.mark.parametrize(
    "spec", ["dca:chunk_size=12,local_window=3", "dca:chunk_size=7,constants=paper,local_window=3"]
)
@pytest.mark.parametrize(
    ("fake", "kernel"), [(Torch, CuDNN), (Frontend, CuDNNWindows), (WithoutZeroStrides, CuDNNWindows)]
)
def test_chunks_are_the_oracle(rows, length, q_length, spec, fake, kernel, trusted, monkeypatch):
    called = fake().put(monkeypatch)
    inputs, kept = inputs_of(spec, ROWS[rows](length), q_length, length, torch.float32)
    assert_is_the_oracle(inputs, kept, kernel(least=0, narrowest=0), monkeypatch)
    if fake is Frontend and rows == "one row" and q_length > 40:
        assert called.stairs[1:], "stairs were scored beyond their trial"


@pytest.mark.parametrize("fake", [Frontend, WithoutZeroStrides])
def test_packed_rows_and_other_widths_are_the_oracle(fake, trusted, monkeypatch):
    fake().put(monkeypatch)
    kernel = CuDNNWindows(least=0, narrowest=0)
    for groups, kv_heads, value_dim in (
        ([[0] * 50 + [1] * 40], 2, 16),
        ([[0] * 50 + [1] * 40, [0] * 90], 4, 24),
        ([[0] * 90], 1, 8),
    ):
        inputs, kept = inputs_of(
            "dca:chunk_size=12,local_window=3", groups, 90, 90, torch.float32, kv_heads, value_dim=value_dim
        )
        begin = torch.tensor([[row.index(group) for group in row] for row in groups])
        positions = torch.arange(90) - begin
        inputs = dataclasses.replace(inputs, query_positions=positions, key_positions=positions)
        assert_is_the_oracle(inputs, kept, kernel, monkeypatch)


def test_chunks_by_flash_are_the_oracle(trusted, monkeypatch):
    flash = Flash(windows=True).register()
    try:
        inputs, kept = inputs_of("dca:chunk_size=12,local_window=3", ROWS["equal rows"](83), 83, 83, torch.float32)
        assert_is_the_oracle(inputs, kept, FlashCUDA(), monkeypatch)
    finally:
        flash.remove()
    assert len(flash.asked) == 2 + 6, "two kinds of runs in their trial, and the gradients of those of the text"


def test_bfloat16_is_as_near_as_tiles(trusted, monkeypatch):
    Frontend().put(monkeypatch)
    inputs, kept = inputs_of("dca:chunk_size=12,local_window=3", [[0] * 90], 90, 90, torch.bfloat16)
    assert_is_the_oracle(inputs, kept, CuDNNWindows(least=0, narrowest=0), monkeypatch, tolerance=1.2e-2)


def test_one_row_is_not_copied(monkeypatch):
    for layout in (lambda x: x, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)):
        x = layout(torch.randn(1, 4, 60, 8))
        tile = Tile(0, 12, 0, 12, "causal", count=5, step=12)
        view = chunk_runs.queries_of(x, tile)
        assert view.shape == (5, 4, 12, 8)
        assert view.data_ptr() == x.data_ptr()
        assert torch.equal(view[2], x[0, :, 24:36])
        result = torch.empty_like(view)  # in the layout of the queries, as cuDNN's
        assert chunk_runs.in_one(result, tile, 1, 60, 0.0).data_ptr() == result.data_ptr()


@pytest.mark.parametrize("wrong", ["runs", "stairs"])
def test_a_kernel_that_is_wrong_on_runs_scores_every_chunk(wrong, trusted, monkeypatch):
    called = Frontend().put(monkeypatch)
    forward = called.sdpa_fwd

    def sdpa_fwd(q, *given, **options):
        out, lse = forward(q, *given, **options)
        bad = options.get("seq_len_q") is not None if wrong == "stairs" else len(q) > 1
        return (out * 1.1 if bad else out), lse

    monkeypatch.setattr(called, "sdpa_fwd", sdpa_fwd)
    inputs, kept = inputs_of("dca:chunk_size=12,local_window=3", [[0] * 90], 90, 90, torch.float32)
    with pytest.warns(RopePatchWarning, match="differed from the definition"):
        assert_is_the_oracle(inputs, kept, CuDNNWindows(least=0, narrowest=0), monkeypatch)
    last = called.batches[-5:]
    assert (max(last) == 1) == (wrong == "runs")


def test_plans_serve_every_text_of_as_many_chunks(trusted, monkeypatch):
    called, texts = Frontend().put(monkeypatch), []
    kernel = CuDNNWindows(least=0, narrowest=0)
    monkeypatch.setattr(merged, "kernel_for", lambda *_: kernel)
    for length in (86, 84, 90):
        inputs, _ = inputs_of("dca:chunk_size=12,local_window=3", [[0] * length], length, length, torch.float32)
        tokens_first = [
            dataclasses.replace(b, **{name: getattr(b, name).transpose(1, 2).contiguous().transpose(1, 2)})
            for b, name in itertools.product(inputs.branches, ("query",))
        ]
        run_segmented(dataclasses.replace(inputs, branches=tuple(tokens_first)))
        texts.append([call[:2] for call in called.calls[-3:]])
        called.calls.clear()
    assert texts[0] == texts[1] == texts[2]
