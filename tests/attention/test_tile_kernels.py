"""Shapes that tiles take at full size, products in bfloat16, and keys that begin after the first slot."""

import dataclasses
import math

import pytest
import torch

from rope_patch.attention import paths, tile_kernels
from rope_patch.attention.executors import merged, products, reference
from rope_patch.attention.pieces import Tile, tiles_of
from rope_patch.attention.spans import Span, find_spans
from rope_patch.attention.table import choose
from rope_patch.attention.tile_kernels import Dense, FlashCPU, Merged, Work
from rope_patch.attention.turner import Branch
from tests.attention.problems import in_spans, supports
from tests.attention.test_bidirectional import bias_of
from tests.attention.test_segmented import (
    ROWS,
    SUMS,
    gradients_of,
    in_double,
    inputs_of,
    pairs_of,
    region,
    run_segmented,
)

TILES = [Tile(0, 24, 0, 30), Tile(0, 24, 0, 24, "causal"), Tile(8, 24, 1, 24, "band", 0, 8, distance=7)]


def random_work(tile, kv_heads, dtype=torch.float64):
    random = torch.Generator().manual_seed(0)
    q, grad = torch.randn(2, 2, 6, tile.q1 - tile.q0, 16, generator=random, dtype=dtype)
    k, v = torch.randn(2, 2, kv_heads, tile.k1 - tile.k0, 16, generator=random, dtype=dtype)
    return Work(q, k, v, tile, 0.3), grad


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.kind)
def test_query_heads_that_share_keys_see_them_as_if_they_had_their_own(tile):
    work, grad = random_work(tile, kv_heads=2)
    own = dataclasses.replace(work, k=work.k.repeat_interleave(3, dim=1), v=work.v.repeat_interleave(3, dim=1))
    found, expected = Dense().forward(work), Dense().forward(own)
    grad_q, *shared = Dense().backward(work, Merged(*found, grad))
    of_q, *of_own = Dense().backward(own, Merged(*expected, grad))
    for one, other in zip([*found, grad_q], [*expected, of_q], strict=True):
        torch.testing.assert_close(one, other)
    for one, other in zip(shared, of_own, strict=True):
        torch.testing.assert_close(one, other.unflatten(1, (2, 3)).sum(dim=2))


def test_dense_products_copy_no_keys():
    work, _ = random_work(Tile(0, 1, 0, 4096), kv_heads=1, dtype=torch.float32)
    with torch.profiler.profile(profile_memory=True) as profile:
        Dense().forward(work)
    largest = max(event.cpu_memory_usage for event in profile.events() if event.cpu_memory_usage > 0)
    assert largest < 2 * work.k.nbytes, "as many copies as there are query heads would be six times as large"


@pytest.mark.parametrize(("heads", "threads"), [(8, 2), (1, 7)])
@pytest.mark.parametrize(("q_length", "offset"), [(2500, 0), (2000, 700), (700, 1800)])
def test_blocks_of_flash_cover_a_causal_tile_once(heads, threads, q_length, offset):
    kernel = FlashCPU(heads, threads)
    counted = torch.zeros(q_length, q_length + offset, dtype=torch.int8)
    for tile in tiles_of(region(0, math.inf), q_length, offset, band_rows=kernel.band_rows(math.inf)):
        for part in kernel.cut(tile, masked=False):
            assert part.distance == offset + part.q0 - part.k0
            assert part.q1 - part.q0 <= 768 * kernel.scale
            counted[part.q0 : part.q1, part.k0 : part.k1] += pairs_of(part).to(torch.int8)
    assert torch.equal(counted, torch.ones_like(counted).tril(offset))


def test_more_threads_than_heads_get_more_queries_at_once():
    assert [FlashCPU(heads, threads).scale for heads, threads in ((8, 2), (8, 24), (8, 25), (1, 64))] == [1, 1, 2, 22]


@pytest.mark.parametrize("spec", ["", "rerope:window=300", "dca:chunk_size=900,local_window=100"])
@pytest.mark.parametrize(("kv_heads", "q_length"), [(2, 1700), (1, 900)])
def test_blocks_of_full_size_are_the_oracle(spec, kv_heads, q_length):
    inputs, kept = inputs_of(spec, [[0] * 1700], q_length, 1700, torch.float32, kv_heads=kv_heads, heads=2, dim=8)
    inputs = dataclasses.replace(inputs, value=inputs.value[..., :8])
    grad = torch.randn(1, 2, q_length, 8, generator=torch.Generator().manual_seed(1))
    expected, slopes = gradients_of(lambda x: reference.attend(x)[0], in_double(inputs), kept, grad)
    found, ours = gradients_of(run_segmented, inputs, kept, grad)
    for one, other in zip([found, *ours], [expected, *slopes], strict=True):
        assert (one.double() - other).norm() / other.norm() < 2e-6


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("first", [0, 7, 14])
def test_keys_may_begin_where_the_first_query_begins_to_see(first, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(FlashCPU, "band_rows", lambda self, width: 7)
    window, start = 6, 20
    inputs, kept = inputs_of(f"rerope:window={window}", ROWS[:1], 45 - start, 45, dtype)
    grad = torch.randn(inputs.branches[0].query.shape, generator=torch.Generator().manual_seed(1))
    near = next(i for i, branch in enumerate(inputs.branches) if branch.region.stop == window)
    assert first <= start - window

    def cut(inputs):
        branches = list(inputs.branches)
        near_branch = branches[near]
        branches[near] = dataclasses.replace(near_branch, key=near_branch.key[:, :, first:], first=first)
        return dataclasses.replace(inputs, branches=tuple(branches))

    expected, slopes = gradients_of(run_segmented, inputs, kept, grad)
    found, ours = gradients_of(lambda whole: run_segmented(cut(whole)), inputs, kept, grad)
    for one, other in zip([found, *ours], [expected, *slopes], strict=True):
        assert (one.double() - other.double()).norm() <= tolerance * other.double().norm()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_a_bias_of_few_heads_at_a_time_gets_the_gradient_of_all(causal, kv_heads, monkeypatch):
    inputs, kept = inputs_of("", [[0] * 45] * 2, 45, 45, torch.float32, causal=causal, kv_heads=kv_heads)
    grad = torch.randn(inputs.branches[0].query.shape, generator=torch.Generator().manual_seed(1))

    def gradients(attend, inputs):
        table = torch.randn(4, 81, generator=torch.Generator().manual_seed(2)).requires_grad_()
        out, slopes = gradients_of(lambda x: attend(dataclasses.replace(x, bias=bias_of(table))), inputs, kept, grad)
        return [out, table.grad, *slopes]

    expected = gradients(lambda x: reference.attend(x)[0], in_double(inputs))
    monkeypatch.setattr(merged, "LARGE", 100)
    monkeypatch.setattr(tile_kernels, "LEAST_ROWS", 4)
    monkeypatch.setattr(tile_kernels, "SCORES_IN_CACHE", 45 * 8 * 11)
    for one, other in zip(gradients(run_segmented, inputs), expected, strict=True):
        assert (one.double() - other).norm() / other.norm() < 2e-5


SPECS = [
    "",
    "rerope:window=6",
    "self_extend:group_size=4,window=7",
    "dca:chunk_size=9,local_window=2",
    "lm_infinite:local_window=7,n_global=3",
]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("rows", [ROWS, ROWS[:1] * 2, [[0] * 20 + [1] * 25]], ids=["padded", "plain", "packed"])
@pytest.mark.parametrize("q_length", [45, 20])
@pytest.mark.parametrize("in_block", [5, 256])
def test_products_in_bfloat16_are_the_oracle_up_to_their_rounding(spec, rows, q_length, in_block, monkeypatch):
    if rows[0][-1] == 1 and (q_length < 45 or "dca" in spec or "infinite" in spec):
        pytest.skip("packed rows have no cache, and their positions start again")
    monkeypatch.setattr(Dense, "rows", in_block)
    inputs, kept = inputs_of(spec, rows, q_length, 45, torch.bfloat16)
    kept = kept[:, None, :, None]
    spans = find_spans(inputs.query_positions, None, inputs.groups, inputs.query_start, len(rows))
    expected = reference.attend(in_double(inputs))[0] * kept
    found = in_spans(products, inputs, spans)
    assert found.dtype == torch.bfloat16
    assert not (found * ~kept).any()
    assert (found.double() - expected).norm() / expected.norm() < 6e-3


@pytest.mark.parametrize("means", [(256, 1, 1), (1, 256, 1), (1, 1, 256)])
def test_products_in_bfloat16_add_regions_in_float32(means):
    """The shares of three regions, whose sum bfloat16 has a number for, but none for the sum of two."""
    inputs, _ = inputs_of("dca:chunk_size=10,local_window=2", [[0] * 32], 1, 32, torch.bfloat16)
    branches = tuple(Branch(b.region, torch.zeros_like(b.query), b.key) for b in inputs.branches)  # equal weights
    earlier, previous, own = ([mean * 32 / keys] * keys for mean, keys in zip(means, (16, 8, 8), strict=True))
    value = torch.tensor(earlier + previous + own)[:, None].expand_as(inputs.value).bfloat16()
    spans = find_spans(inputs.query_positions, None, inputs.groups, inputs.query_start, 1)
    found = in_spans(products, dataclasses.replace(inputs, branches=branches, value=value), spans)
    assert found.unique().tolist() == [258]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_products_are_for_bfloat16(dtype, monkeypatch):
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: True)
    assert not supports(products, inputs_of("rerope:window=6", ROWS, 45, 45, dtype)[0])


def test_products_see_both_ways():
    inputs, _ = inputs_of("rerope:window=6", [[0] * 45], 45, 45, torch.bfloat16, causal=False)
    span = Span(slice(0, 1), slice(0, 45), slice(0, 45), 0, causal=False)
    expected = reference.attend(in_double(inputs))[0]
    assert (in_spans(products, inputs, (span,)).double() - expected).norm() / expected.norm() < 6e-3


def test_products_serve_bfloat16_without_gradient_or_bias_where_the_processor_has_them(monkeypatch):
    inputs, _ = inputs_of("rerope:window=6", ROWS, 45, 45, torch.bfloat16)
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: True)
    assert supports(products, inputs)
    for bias in ("alibi", SUMS):
        assert not supports(products, inputs_of(bias, ROWS, 45, 45, torch.bfloat16)[0])
    learned = dataclasses.replace(inputs, value=inputs.value.clone().requires_grad_())
    assert not supports(products, learned)
    with torch.no_grad():
        assert supports(products, learned)
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: False)
    assert not supports(products, inputs)


@pytest.mark.parametrize(
    ("known", "multiplies", "taken"),
    [
        ({"avx512_bf16": True}, True, "products"),
        ({"bf16": True}, True, "products"),
        ({"avx512_bf16": True, "amx_bf16": True}, True, "merged"),
        ({"avx512_f": True}, False, "merged"),
        ({}, False, "merged"),
    ],
)
def test_instructions_for_bfloat16_are_read_from_the_processor(known, multiplies, taken, monkeypatch):
    monkeypatch.setattr(products, "_instructions", lambda: known)
    assert products.multiplies_bfloat16() is multiplies
    inputs, _ = inputs_of("rerope:window=6", [[0] * 200], 200, 200, torch.bfloat16)
    spans = find_spans(inputs.query_positions, None, inputs.groups, 0, 1)
    with torch.no_grad():
        assert choose(paths.ROWS, inputs.replaced(find_spans=lambda _: spans)).name == taken


def test_branches_that_begin_later_serve_products_too():
    inputs, _ = inputs_of("rerope:window=6", ROWS[:1], 25, 45, torch.bfloat16)
    spans = find_spans(inputs.query_positions, None, inputs.groups, inputs.query_start, 1)
    cut = tuple(Branch(b.region, b.query, b.key[:, :, 14:], 14) if b.region.stop == 6 else b for b in inputs.branches)
    expected = in_spans(products, inputs, spans)
    assert torch.equal(in_spans(products, inputs.replaced(branches=cut), spans), expected)
