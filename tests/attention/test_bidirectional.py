"""Attention that sees both directions: tiles, masks of biases and their gradients, against the oracle."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rope_patch.attention import tile_kernels
from rope_patch.attention.executors import merged, reference
from rope_patch.attention.pieces import in_rows, tiles_of
from rope_patch.attention.spans import find_spans
from rope_patch.attention.terms import DistanceBias
from rope_patch.attention.tile_kernels import Dense, FlashCPU
from tests.attention.problems import supports
from tests.attention.test_segmented import gradients_of, in_double, inputs_of, pairs_of, region, run_segmented

ROWS = {
    "plain": [[0] * 45] * 2,
    "padded": [[0] * 45, [-1] * 9 + [0] * 36, [0] * 30 + [-1] * 15],
    "packed": [[0] * 20 + [1] * 25],
}
BOUND = st.one_of(st.integers(-60, 60), st.just(float("inf")))
REGIONS = st.builds(lambda a, b: region(min(-a, b), max(-a, b)), BOUND, BOUND)


@settings(max_examples=300, deadline=None)
@given(REGIONS, st.integers(1, 50), st.integers(1, 20))
def test_every_pair_of_a_region_is_in_one_tile(region, length, rows):
    m, n = torch.arange(length)[:, None], torch.arange(length)[None]
    expected = region.contains(m, n).int()
    for split in (False, True):
        counted = torch.zeros_like(expected)
        for tile in tiles_of(region, length, 0, band_rows=rows, causal=False):
            for part in in_rows(tile, 5, as_bands=True) if split else (tile,):
                assert part.distance == part.q0 - part.k0
                assert pairs_of(part).any(dim=-1).all(), "a row of a tile that sees nothing"
                counted[part.q0 : part.q1, part.k0 : part.k1] += pairs_of(part).int()
        assert torch.equal(counted, expected)


def bias_of(table):
    """A learned number for every distance up to 40 on either side, and the last beyond."""
    return DistanceBias(lambda distance: table[:, distance.clamp(-40, 40) + 40])


@pytest.fixture
def small_tiles(monkeypatch):
    for kernel in (Dense, FlashCPU):
        monkeypatch.setattr(kernel, "band_rows", lambda self, width: 7)
    monkeypatch.setattr(merged, "LARGE", 1000)
    monkeypatch.setattr(Dense, "rows", 5)


@pytest.mark.parametrize(
    "spec", ["", "rerope:window=6", "self_extend:group_size=4,window=7", "alibi", "window:window=7"]
)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("small_tiles")
def test_output_and_gradients_are_those_of_the_oracle_in_float64(spec, rows, dtype):
    inputs, kept = inputs_of(spec, ROWS[rows], 45, 45, dtype, causal=False)
    grad = torch.randn(inputs.branches[0].query.shape, generator=torch.Generator().manual_seed(1))
    expected, slopes = gradients_of(lambda x: reference.attend(x)[0], in_double(inputs), kept, grad)
    found, ours = gradients_of(run_segmented, inputs, kept, grad)
    tolerance = {torch.float64: 1e-5 if inputs.bias else 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for one, other in zip([found, *ours], [expected, *slopes], strict=True):
        assert (one.double() - other).norm() / other.norm().clamp(min=1e-9) < tolerance


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("spec", ["dca:chunk_size=9,local_window=2", "lm_infinite:local_window=7,n_global=3"])
def test_regions_that_depend_on_more_than_distance_are_for_one_direction(causal, spec):
    inputs, _ = inputs_of(spec, ROWS["plain"], 45, 45, torch.float32, causal=causal)
    spans = find_spans(inputs.query_positions, None, inputs.groups, 0, 2, causal)
    assert supports(merged, inputs, spans) == causal
    assert not supports(merged, inputs, tuple(dataclasses.replace(span, window=20) for span in spans))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("spec", ["", "rerope:window=6", "window:window=7"])
@pytest.mark.usefixtures("small_tiles")
def test_gradients_of_a_learned_bias_are_those_of_the_oracle(causal, rows, spec):
    inputs, kept = inputs_of(spec, ROWS[rows], 45, 45, torch.float32, causal=causal)
    grad = torch.randn(inputs.branches[0].query.shape, generator=torch.Generator().manual_seed(1))

    def gradient(attend, inputs):
        table = torch.randn(4, 81, generator=torch.Generator().manual_seed(2)).requires_grad_()
        out = attend(dataclasses.replace(inputs, bias=bias_of(table)))
        (out * grad * kept[:, None, :, None]).sum().backward()
        return table.grad

    expected = gradient(lambda x: reference.attend(x)[0], in_double(inputs))
    assert (gradient(run_segmented, inputs) - expected).norm() / expected.norm() < 1e-5
    unused = (torch.arange(81) < 40) if causal else torch.zeros(81, dtype=torch.bool)
    assert not expected[:, unused].any()


@settings(max_examples=200, deadline=None)
@given(REGIONS, st.integers(1, 50), st.integers(1, 20))
def test_a_window_of_flash_on_cuda_is_the_band(region, length, rows):
    for tile in tiles_of(region, length, 0, band_rows=rows, causal=False):
        if tile.kind == "band":
            window = tile_kernels._window(tile)
            queries, keys = tile.q1 - tile.q0, tile.k1 - tile.k0
            beyond = torch.arange(keys)[None] - torch.arange(queries)[:, None] - (keys - queries)
            # a negative number would mean no bound
            assert min(window.values()) >= 0
            inside = (beyond >= -window["window_size_left"]) & (beyond <= window["window_size_right"])
            assert torch.equal(inside, pairs_of(tile))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("spec", ["window:window=7", "rerope:window=6"])
def test_queries_that_see_no_key_give_zeros(spec, rows):
    """Pads beyond the window of a padded row belong to a span, but to no tile."""
    inputs, _ = inputs_of(spec, ROWS[rows], 45, 45, torch.float64, causal=False)
    found, expected = run_segmented(inputs), reference.attend(inputs)[0]
    torch.testing.assert_close(found, expected.nan_to_num(), atol=1e-5, rtol=1e-5)
