"""Tiles cover every pair of a region once, kernels agree, and what they make together is the oracle."""

import dataclasses
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rope_patch import RopePatchWarning, get_scheme
from rope_patch.attention import tile_kernels
from rope_patch.attention.bias import KeyTerm, tile_bias
from rope_patch.attention.executors import merged, reference
from rope_patch.attention.kernels import objection
from rope_patch.attention.pieces import Tile, in_rows, tiles_of
from rope_patch.attention.problem import Problem
from rope_patch.attention.rotation import Rotation
from rope_patch.attention.spans import Span, find_spans
from rope_patch.attention.terms import DistanceBias
from rope_patch.attention.tile_kernels import Dense, FlashCPU
from rope_patch.attention.trials import Trial
from rope_patch.attention.turner import Branch
from rope_patch.schemes.slots import ALL_PAIRS, Region
from rope_patch.schemes.tools.positions import Identity
from rope_patch.schemes.tools.rotary import half_split
from tests.attention.problems import in_spans, supports

BOUND = st.one_of(st.integers(-3, 40), st.just(math.inf))


def region(start, stop, chunk=1, keys_below=math.inf):
    return Region(Identity(), Identity(), start, stop, chunk, keys_below)


REGIONS = st.one_of(
    st.builds(region, st.integers(-5, 40), BOUND),
    st.builds(region, st.integers(0, 3), st.one_of(st.integers(1, 4), st.just(math.inf)), st.integers(2, 12)),
    st.builds(region, st.integers(0, 20), st.just(math.inf), st.just(1), st.integers(0, 15)),
)


def pairs_of(tile: Tile) -> torch.Tensor:
    """Boolean `(rows, keys)` of the pairs that a tile scores."""
    if tile.kind == "band":
        return tile.mask(torch.device("cpu"))
    every = torch.ones(tile.q1 - tile.q0, tile.k1 - tile.k0, dtype=torch.bool)
    return every.tril() if tile.kind == "causal" else every


@settings(max_examples=300, deadline=None)
@given(
    REGIONS,
    st.integers(1, 50),
    st.integers(0, 30),
    st.integers(-3, 20),
    st.integers(1, 20),
    st.booleans(),
    st.booleans(),
)
def test_every_visible_pair_of_a_region_is_in_one_tile(region, q_length, offset, first_position, rows, as_bands, whole):
    m = torch.arange(q_length)[:, None] + offset + first_position
    n = torch.arange(q_length + offset)[None] + first_position
    assume(first_position >= 0 or region.chunk == 1)
    expected = (region.contains(m, n) & (m >= n)).int()
    for split in (False, True):
        counted = torch.zeros_like(expected)
        tiles = list(tiles_of(region, q_length, offset, first_position, band_rows=rows, whole=whole))
        assert not whole or len(tiles) <= 1 or region.keys_below < math.inf or region.chunk > 1
        for tile in tiles:
            for part in in_rows(tile, rows, as_bands) if split else (tile,):
                assert part.q1 > part.q0
                assert part.distance == offset + part.q0 - part.k0
                counted[part.q0 : part.q1, part.k0 : part.k1] += pairs_of(part).int()
                assert pairs_of(part).any(dim=-1).all(), "a row of a tile that sees nothing"
                if split:
                    assert part.q0 // rows == (part.q1 - 1) // rows
        assert torch.equal(counted, expected)


@settings(max_examples=200, deadline=None)
@given(REGIONS, st.integers(1, 50), st.integers(0, 30), st.booleans())
def test_a_window_of_flash_on_cuda_is_the_band(region, q_length, offset, whole):
    rows = tile_kernels.FlashCUDA().band_rows(math.inf)
    for tile in tiles_of(region, q_length, offset, band_rows=rows, whole=whole):
        if tile.kind != "band":
            assert tile_kernels._window(tile) == {}
            continue
        window = tile_kernels._window(tile)
        rows, keys = tile.q1 - tile.q0, tile.k1 - tile.k0
        # a negative number would mean no bound
        assert min(window.values()) >= 0
        beyond = torch.arange(keys)[None] - torch.arange(rows)[:, None] - (keys - rows)
        inside = (beyond >= -window["window_size_left"]) & (beyond <= window["window_size_right"])
        assert torch.equal(inside, pairs_of(tile))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [16, 64])
def test_flash_agrees_with_plain_products(dtype, head_dim):
    assert objection(FlashCPU(), torch.device("cpu"), dtype, head_dim) == ""


def test_a_kernel_is_tried_once_and_not_at_every_call():
    compared = []

    def compare(*arguments):
        compared.append(arguments)
        yield from objection.compare(*arguments)

    trial = Trial("A kernel of tiles", compare, 0.03)
    with pytest.warns(
        RopePatchWarning, match=r"A kernel of tiles is not used \(FlashCUDA\(.*\), cpu, .*does not run here"
    ):
        reasons = {trial(tile_kernels.FlashCUDA(), torch.device("cpu"), torch.bfloat16, 16) for _ in range(3)}
    assert len(reasons) == 1
    assert len(compared) == 2  # an error is tried once more


def test_a_lack_of_memory_is_no_verdict():
    ones, memory = torch.ones(3), [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\n2 GiB"), None]

    def compare():
        if error := memory.pop(0):
            raise error
        yield "output", ones, ones

    trial = Trial("A kernel", compare, 0.03)
    with pytest.warns(RopePatchWarning, match="Tried to allocate; the next call tries it again"):
        assert trial() == "there was no memory to try it: CUDA out of memory. Tried to allocate"
    assert trial() == trial() == ""


def test_a_result_that_is_no_number_is_an_objection():
    trial = Trial("A kernel", lambda: iter([("output", torch.tensor([1.0, torch.nan]), torch.ones(2))]), 0.03)
    with pytest.warns(RopePatchWarning, match="its output differed from the definition by nan"):
        assert trial()


@dataclasses.dataclass(frozen=True)
class Wrong(FlashCPU):
    """Differs from flash in one of its results."""

    place: int = 0

    def forward(self, *args):
        return tuple(1.2 * x if i == self.place else x for i, x in enumerate(super().forward(*args)))

    def backward(self, *args):
        return tuple(1.2 * x if i + 2 == self.place else x for i, x in enumerate(super().backward(*args)))


class Missing(FlashCPU):
    def forward(self, *args):
        raise RuntimeError("no such operator")


@pytest.mark.parametrize("kernel", [*(Wrong(place=place) for place in range(5)), Missing()])
def test_a_kernel_that_is_wrong_or_missing_is_not_trusted(kernel):
    with pytest.warns(RopePatchWarning, match="is not used"):
        assert objection(kernel, torch.device("cpu"), torch.float32, 16)


def inputs_of(
    spec, mask_rows, q_length, kv_length, dtype=torch.float64, kv_heads=2, heads=4, dim=16, value_dim=16, causal=True
):
    """A random call, and the rows of queries that are no pads; `spec` may end in `SUMS` for a bias of running sums."""
    spec, has_sums = (spec or "").removesuffix(SUMS), (spec or "").endswith(SUMS)
    scheme = get_scheme(spec) if spec else None
    random = torch.Generator().manual_seed(0)

    def states(heads, length, dim=dim):
        return torch.randn(len(mask_rows), heads, length, dim, generator=random, dtype=torch.float64).to(dtype)

    regions = scheme.segments() if scheme and "segments" in scheme.slots else (ALL_PAIRS,)
    regions = [region for region in regions if region.stop > 0 or not causal]
    branches = tuple(Branch(region, states(heads, q_length), states(kv_heads, kv_length)) for region in regions)
    groups = torch.tensor(mask_rows)
    positions = torch.arange(groups.shape[-1]) - (groups >= 0).int().argmax(dim=-1, keepdim=True)
    start = kv_length - q_length
    bias = None
    if scheme and "bias" in scheme.slots:
        bias = DistanceBias(lambda distance: scheme.bias(distance, heads), scheme.linear)
    pads_before = (groups >= 0).int().argmax(dim=-1, keepdim=True)
    keys = torch.arange(kv_length) - pads_before
    inputs = Problem(
        branches,
        states(kv_heads, kv_length, value_dim),
        positions[:, start:],
        keys,
        None,
        causal,
        start,
        0.3,
        bias,
        groups=groups,
        running_bias=-states(heads, kv_length, 1)[..., 0].abs().double().cumsum(dim=-1) if has_sums else None,
    )
    return inputs, groups[:, start:] >= 0


SUMS = " and sums"
ROWS = [[0] * 45, [-1] * 9 + [0] * 36]
SPECS = [
    "",
    "rerope:window=6",
    "self_extend:group_size=4,window=7",
    "dca:chunk_size=9,local_window=2",
    "lm_infinite:local_window=7,n_global=3",
    "alibi",
    "sandwich:embedding_dim=16,base=100",
    "alibi+window:window=7",
    "sandwich+rerope:window=9",
    SUMS,
    "rerope:window=6" + SUMS,
    "alibi+window:window=7" + SUMS,
]


def gradients_of(attend, inputs, kept, grad):
    leaves = [inputs.value, *(x for branch in inputs.branches for x in (branch.query, branch.key))]
    leaves += [] if inputs.running_bias is None else [inputs.running_bias]
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    branches = tuple(
        Branch(branch.region, leaves[2 * i + 1], leaves[2 * i + 2]) for i, branch in enumerate(inputs.branches)
    )
    running = None if inputs.running_bias is None else leaves[-1]
    out = attend(dataclasses.replace(inputs, value=leaves[0], branches=branches, running_bias=running))
    (out * grad * kept[:, None, :, None]).sum().backward()
    return out.detach() * kept[:, None, :, None], [leaf.grad for leaf in leaves]


def run_segmented(inputs):
    rows = len(inputs.groups)
    spans = find_spans(inputs.query_positions, None, inputs.groups, inputs.query_start, rows, inputs.causal)
    assert supports(merged, inputs, spans)
    return in_spans(merged, inputs, spans)


def in_double(inputs):
    return in_dtype(inputs, torch.float64)


def in_dtype(inputs, dtype):
    branches = tuple(Branch(branch.region, branch.query.to(dtype), branch.key.to(dtype)) for branch in inputs.branches)
    return dataclasses.replace(inputs, value=inputs.value.to(dtype), branches=branches)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("q_length", [45, 20, 1])
@pytest.mark.parametrize("rows", [ROWS, ROWS[:1] * 2, [[0] * 20 + [1] * 25]], ids=["padded", "plain", "packed"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_output_and_gradients_are_those_of_the_oracle_in_float64(spec, q_length, rows, dtype, monkeypatch):
    if rows[0][-1] == 1 and (q_length < 45 or "dca" in spec or "infinite" in spec):
        pytest.skip("packed rows have no cache, and their positions start again")
    for kernel in (Dense, FlashCPU):
        monkeypatch.setattr(kernel, "band_rows", lambda self, width: 7)
    monkeypatch.setattr(merged, "LARGE", 1000)
    monkeypatch.setattr(Dense, "rows", 5)
    monkeypatch.setattr(KeyTerm, "rows", 15)
    inputs, kept = inputs_of(spec, rows, q_length, 45, dtype)
    grad = torch.randn(inputs.branches[0].query.shape, generator=torch.Generator().manual_seed(1))
    expected, slopes = gradients_of(lambda x: reference.attend(x)[0], in_double(inputs), kept, grad)
    found, ours = gradients_of(run_segmented, inputs, kept, grad)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    if inputs.bias is not None or inputs.running_bias is not None:
        tolerance = max(tolerance, 1e-5)  # a bias is computed in float32
    for one, other in zip([found, *ours], [expected, *slopes], strict=True):
        assert one is found or one.dtype == (torch.float64 if one.ndim == 3 else dtype)  # sums are float64
        error = (one.double() - other).norm() / other.norm().clamp(min=1e-9)
        assert error < tolerance


STEEP = "alibi:slopes=[3.0,1.5,0.001,6.0]"
"""Heads of different reach: about 15, 30, all, and 8 tokens."""


@pytest.mark.parametrize("spec", [STEEP, STEEP + "+rerope:window=9", STEEP + "+window:window=20", STEEP + SUMS])
@pytest.mark.parametrize("q_length", [45, 20])
@pytest.mark.parametrize(
    "rows",
    [ROWS, [[0] * 45], [[0] * 20 + [1] * 25], [[0] * 33 + [-1] * 12, [0] * 45]],
    ids=["padded", "plain", "packed", "pads behind"],
)
def test_keys_beyond_the_reach_of_a_head_weigh_nothing(spec, q_length, rows, monkeypatch):
    reached = []
    within = Span.within
    monkeypatch.setattr(Span, "within", lambda span, reach: reached.append(reach) or within(span, reach))
    monkeypatch.setattr(FlashCPU, "band_rows", lambda self, width: 7)
    inputs, kept = inputs_of(spec, rows, q_length, 45, torch.float32)
    grad = torch.randn(inputs.branches[0].query.shape, generator=torch.Generator().manual_seed(1))
    expected, theirs = gradients_of(lambda x: reference.attend(x)[0], in_double(inputs), kept, grad)
    found, ours = gradients_of(run_segmented, inputs, kept, grad)
    assert min(reached) < 12
    assert len(set(reached)) == 4
    assert SUMS in spec or max(reached) == 45
    for one, other in zip([found, *ours], [expected, *theirs], strict=True):
        assert (one.double() - other).norm() / other.norm() < 1e-5


@pytest.mark.parametrize("spec", [STEEP, STEEP + "+window:window=20", STEEP + SUMS])
def test_pads_behind_a_text_see_its_end_though_it_is_beyond_the_reach(spec):
    """A reach counts from the last token of the text: the pads are up to 25 tokens behind it."""
    inputs, _ = inputs_of(spec, [[0] * 20 + [-1] * 25, [0] * 45], 45, 45, torch.float32)
    expected = reference.attend(in_double(inputs))[0]
    assert expected[0, :, 20:].abs().amax(dim=(1, 2)).min() > 0.1
    torch.testing.assert_close(run_segmented(inputs).double(), expected, atol=1e-5, rtol=1e-5)


def test_a_learned_slope_that_rises_or_is_flat_has_no_reach():
    slopes = torch.tensor([3.0, -0.5, 0.0, 6.0], requires_grad=True)
    inputs, kept = inputs_of("alibi", ROWS, 45, 45, torch.float32)
    bias = DistanceBias(lambda distance: -slopes.view(-1, *[1] * distance.ndim) * distance, linear=True)
    assert merged._reaches(inputs, tile_bias(dataclasses.replace(inputs, bias=bias)))[1:3] == [45, 45]
    grad, results = torch.randn(2, 4, 45, 16, generator=torch.Generator().manual_seed(1)), []
    for attend, call in ((run_segmented, inputs), (lambda x: reference.attend(x)[0], in_double(inputs))):
        slopes.grad = None
        out, gradients = gradients_of(attend, dataclasses.replace(call, bias=bias), kept, grad)
        results.append([out, *gradients, slopes.grad])
    for one, other in zip(*results, strict=True):
        assert (one.double() - other.double()).norm() / other.double().norm() < 1e-5


@pytest.mark.parametrize("largest", [0.0, 1.0, 20.0, 300.0])
@pytest.mark.parametrize("slope", [0.5, 6.0])
def test_keys_beyond_the_reach_weigh_nothing_even_if_they_alone_suit_the_query(slope, largest):
    """The query's own key has the lowest product and all the others have the highest."""
    slots = 2000
    term = KeyTerm(-slope * torch.arange(slots, dtype=torch.float64).expand(1, 1, slots))
    (reach,) = term.reaches(torch.tensor([largest]))
    beyond = [2 * largest - slope * distance for distance in range(reach, slots)]  # above the query's own score
    assert sum(math.exp(max(-700, score)) for score in beyond) <= 2.0**-32
    assert reach == slots or slots * math.exp(2 * largest - slope * (reach - 1)) > 2.0**-32  # and no farther


def test_states_that_are_not_finite_end_no_reach():
    term = KeyTerm(-torch.arange(9.0, dtype=torch.float64).expand(1, 3, 9) * 30)
    assert term.reaches(torch.tensor([1.0, math.inf, math.nan])) == [1, 9, 9]


@pytest.mark.parametrize("value_dim", [8, 24])
def test_heads_of_values_may_have_another_width(value_dim):
    inputs, kept = inputs_of("rerope:window=6", ROWS, 45, 45, torch.float32, value_dim=value_dim)
    grad = torch.randn(2, 4, 45, value_dim, generator=torch.Generator().manual_seed(1))
    expected, slopes = gradients_of(lambda x: reference.attend(x)[0], in_double(inputs), kept, grad)
    found, ours = gradients_of(run_segmented, inputs, kept, grad)
    for one, other in zip([found, *ours], [expected, *slopes], strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("spec", ["rerope:window=40", "dca:chunk_size=64,local_window=16"])
def test_gradients_in_bfloat16_are_no_worse_than_those_of_plain_flash(spec):
    inputs, kept = inputs_of(spec, [[0] * 256], 256, 256, torch.bfloat16)
    grad = torch.randn(inputs.branches[0].query.shape, generator=torch.Generator().manual_seed(1))

    def worst_error(attend, inputs):
        _, expected = gradients_of(lambda x: reference.attend(x)[0], in_double(inputs), kept, grad)
        _, found = gradients_of(attend, inputs, kept, grad)
        return max((a.double() - b).norm() / b.norm() for a, b in zip(found, expected, strict=True))

    def plain_flash(inputs):
        (branch,) = inputs.branches
        return torch.nn.functional.scaled_dot_product_attention(
            branch.query, branch.key, inputs.value, is_causal=True, scale=inputs.scaling, enable_gqa=True
        )

    one_region = dataclasses.replace(inputs, branches=(dataclasses.replace(inputs.branches[0], region=ALL_PAIRS),))
    assert worst_error(run_segmented, inputs) < 1.1 * worst_error(plain_flash, one_region)


@pytest.mark.parametrize("shared", ["query", "key"])
@pytest.mark.parametrize("spec", ["rerope:window=6", "dca:chunk_size=9,local_window=2", "lm_infinite:local_window=7"])
def test_branches_with_the_same_states_add_to_one_gradient(spec, shared, monkeypatch):
    monkeypatch.setattr(merged, "LARGE", 1000)
    inputs, _ = inputs_of(spec, ROWS[:1], 45, 45, torch.bfloat16)
    grad, taken, found = torch.randn(1, 4, 45, 16), [], []
    backward = merged.backward
    monkeypatch.setattr(merged, "backward", lambda *args: taken.append(backward(*args)) or taken[-1])
    for dtype, attend in ((torch.double, lambda x: reference.attend(x)[0]), (torch.bfloat16, run_segmented)):
        state = getattr(inputs.branches[0], shared).to(dtype).requires_grad_()
        branches = [dataclasses.replace(branch, **{shared: state}) for branch in in_dtype(inputs, dtype).branches]
        out = attend(dataclasses.replace(in_dtype(inputs, dtype), branches=tuple(branches)))
        for again in (True, False):
            found += torch.autograd.grad(out, state, grad.to(dtype), retain_graph=True, create_graph=again)
    for gradient in found[1:]:
        assert (gradient - found[0]).norm() < 0.01 * found[0].norm()
    assert sum(gradient is None for gradient in taken[0]) == len(inputs.branches) - 1


@pytest.mark.parametrize("spec", ["rerope:window=6", "dca:chunk_size=9,local_window=2"])
@pytest.mark.parametrize("rows", [ROWS, ROWS[:1] * 2], ids=["padded", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_are_rotated_in_blocks_where_they_are_scored(spec, rows, dtype, monkeypatch):
    monkeypatch.setattr(merged, "LARGE", 1000)
    monkeypatch.setattr(FlashCPU, "band_rows", lambda self, width: 7)
    inputs, kept = inputs_of(spec, rows, 45, 45, dtype)
    query, layout = inputs.branches[0].query.requires_grad_(), half_split(16)
    angles = torch.randn(len(inputs.branches), 2, 1, 45, 8, generator=torch.Generator().manual_seed(1))
    tables = [(angle.cos().to(dtype), angle.sin().to(dtype)) for angle in angles]
    turns = [Rotation(layout, layout.wide(cos, 16), sin) for cos, sin in tables]
    in_blocks = [dataclasses.replace(b, query=query, turn=turn) for b, turn in zip(inputs.branches, turns, strict=True)]
    exact = in_double(inputs)
    rotated = [layout.rotate(query.double(), cos.double(), sin.double()) for cos, sin in tables]
    by_oracle = [dataclasses.replace(b, query=q) for b, q in zip(exact.branches, rotated, strict=True)]
    seen = kept[:, None, :, None]
    expected = reference.attend(dataclasses.replace(exact, branches=tuple(by_oracle)))[0] * seen
    found = run_segmented(dataclasses.replace(inputs, branches=tuple(in_blocks))) * seen
    grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    (slope,) = torch.autograd.grad(expected, query, grad.double())
    slopes = [torch.autograd.grad(found, query, grad.to(dtype), True, again)[0] for again in (True, False)]
    for one, other in ((found, expected), (slopes[0], slope), (slopes[1], slope)):
        assert (one.double() - other).norm() < {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype] * other.norm()


def test_a_span_with_a_window_is_a_band_of_every_region():
    inputs, _ = inputs_of("rerope:window=6", [[0] * 45], 45, 45)
    span = Span(slice(0, 1), slice(0, 45), slice(0, 45), 0, window=11)
    mask = torch.ones(45, 45, dtype=torch.bool).tril().triu(-10)[None, None]
    expected = reference.attend(dataclasses.replace(inputs, mask=mask, groups=None))[0]
    torch.testing.assert_close(in_spans(merged, inputs, (span,)), expected)
    chunks, _ = inputs_of("dca:chunk_size=9,local_window=2", [[0] * 45], 45, 45)
    assert not supports(merged, chunks, (span,))
