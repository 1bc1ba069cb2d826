"""End points of intervals are the region and the visibility of a call; the executor of intervals is the definition."""

import collections
import dataclasses
from types import SimpleNamespace

import pytest
import torch

from rope_patch import RopePatchWarning, get_scheme
from rope_patch.attention import engine
from rope_patch.attention.executors import intervals, reference
from rope_patch.attention.intervals import MOST, end_points, runs_of
from rope_patch.attention.problem import Problem
from rope_patch.attention.table import choose
from rope_patch.attention.trials import Trial
from rope_patch.attention.visibility import Visibility
from tests.attention import problems
from tests.attention.fake_cudnn import Flex
from tests.attention.problems import AXES, draw, regions_of, whole
from tests.attention.test_every_executor import TOLERANCES, defined, error_of, with_gradients


def expanded(points, length):
    """Boolean `(q_len of all rows, length)` of the slots in the intervals."""
    assert points.dtype == torch.int32
    assert points.is_contiguous()
    assert points.shape[:2] == (1, points.shape[1] // 2 * 2 + 1)
    assert (points.diff(dim=1) >= 0).all()
    slots = torch.arange(length)
    first, *others = points[0][..., None]
    seen = slots < first
    for start, stop in zip(others[::2], others[1::2], strict=True):
        seen |= (slots >= start) & (slots < stop)
    return seen


def tokens_of(kind, length, random):
    """Groups and positions of two rows; pads have positions of their own, which nothing may read."""
    groups, slots = torch.zeros(2, length, dtype=torch.long), torch.arange(length)
    cuts = sorted(torch.randint(0, length, (3,), generator=random).tolist())
    positions = slots.expand(2, -1).clone()
    if kind in ("left pads", "both pads"):
        groups[1, : cuts[0]] = -1
        positions[1] = (slots - cuts[0]).clamp(min=0)
    if kind in ("right pads", "both pads"):
        groups[0, cuts[2] :] = -1
    if kind == "packed":
        groups[:] = (slots[:, None] >= torch.tensor(cuts[:2])).sum(-1)
        groups[1, cuts[2] :] = -1  # pads behind documents see all of them
        positions = torch.stack([slots - torch.searchsorted(row.contiguous(), row) for row in groups])
    if kind == "skipping":
        skips = torch.rand(2, length, generator=random) < 0.2
        positions = (1 + 11 * skips.long()).cumsum(dim=-1) - 1
    if kind == "restarting":  # one group whose positions begin again, as after a long cache is cut
        positions[:, cuts[1] :] -= cuts[1]
    return groups, positions


KINDS = ("full", "left pads", "right pads", "both pads", "packed", "skipping", "restarting")
REGIONS = ("all pairs", "near and far", "grouped", "chunks", "first keys", "window", "window beyond the text")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_intervals_are_the_region_of_every_query(kind, causal, seed):
    random = torch.Generator().manual_seed(seed)
    length = 40 + seed
    groups, positions = tokens_of(kind, length, random)
    for start in (0, 17) if causal else (0,):
        runs = runs_of(positions, length - start, start, None, groups, causal)
        visible = Visibility(None, groups, causal, start, length - start, length).pairs(torch.device("cpu"))[:, 0]
        m, n = positions[:, start:, None], positions[:, None]
        for name in REGIONS:
            for region in regions_of(name, length):
                expected = region.contains(m, n) & visible
                found = expanded(end_points(region, runs, positions[:, start:], 2), length)
                assert torch.equal(found, expected.flatten(0, 1)), (name, region, start)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_mask_of_a_window_is_intervals(rows):
    length, start, window = 30, 11, 6
    positions = torch.arange(length)[None]
    distance = positions[0, start:, None] - positions
    mask = ((distance >= 0) & (distance < window)).expand(rows, 1, -1, -1).clone()
    mask[-1, :, :4] = False  # sees nothing
    runs = runs_of(positions, length - start, start, mask, None, True)
    for region in regions_of("near and far", length)[:2]:
        expected = region.contains(positions[:, start:, None], positions[:, None]) & mask[:, 0]
        found = expanded(end_points(region, runs, positions[:, start:], rows), length)
        assert torch.equal(found, expected.flatten(0, 1))


def test_keys_that_begin_later_are_counted_from_there():
    positions = torch.arange(20)[None]
    (region,) = regions_of("window", 20)
    runs = runs_of(positions, 8, 12, None, None, True)
    whole, later = (end_points(region, runs, positions[:, 12:], 1, first) for first in (0, 6))
    assert torch.equal(later, (whole - 6).clamp(min=0))


def test_what_is_not_made_of_few_runs_has_no_intervals():
    positions = torch.arange(20)[None]
    holes = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()
    holes[..., 10, 3] = False
    by_head = torch.ones(1, 2, 20, 20, dtype=torch.bool).tril()
    for mask in (holes, by_head, holes.float()):
        assert runs_of(positions, 20, 0, mask, None, True) is None
    assert runs_of(positions, 20, 0, torch.ones_like(holes), None, False) is None
    alternating = torch.arange(20)[None] % 2  # of two documents in turn
    assert runs_of(positions, 20, 0, None, alternating, True) is None
    few = 2 * MOST
    assert runs_of(positions[:, :few], few, 0, None, alternating[:, :few], True) is not None
    assert runs_of(positions, 20, 0, None, torch.full((1, 20), -1), True) is None


@pytest.fixture
def flex(monkeypatch):
    """The kernels of interval masks, as if this were a GPU that has them."""
    monkeypatch.setattr(intervals, "missing", lambda device: "")
    monkeypatch.setattr(intervals, "objection", lambda *_: "")
    return Flex().put(monkeypatch)


SERVED = {
    "length": (3, 73),
    "rows": AXES["rows"][:-1],
    "terms": ("none",),
    "scores": ("products",),
    "mask": ("none", "none", "sliding"),
    "decay": (False,),
    "dtype": (torch.bfloat16, torch.float16),
    "compiling": (False,),
    "width": (16, 40, 256),
    "value_width": ("as keys",),
}
"""Limits of the axes of random calls."""


def test_random_calls_are_the_definition(flex, monkeypatch):
    monkeypatch.setattr(problems, "STRATA", (SERVED,))
    computed = collections.Counter()
    for seed in range(40):
        drawn = draw(seed)
        leaves = drawn.fresh()
        with torch.set_grad_enabled(drawn.gradient):
            problem = drawn.problem(leaves=leaves)
            if reason := intervals.supports(problem):
                assert "in many places" in reason
                continue
            found = with_gradients(drawn, leaves, intervals.attend(problem)[0])
        leaves = {name: leaf.double().clone().requires_grad_(drawn.gradient) for name, leaf in drawn.leaves.items()}
        expected = with_gradients(drawn, leaves, defined(drawn, leaves))
        for part, one, other in zip(("output", *leaves), found, expected, strict=False):
            assert error_of(one, other) < TOLERANCES[drawn.dtype], f"{part}, {drawn.drawn}"
        computed.update((drawn.rows, drawn.drawn["regions"], drawn.mask is None))
    assert set(computed) == {*SERVED["rows"], *AXES["regions"], True, False}, computed
    assert computed.total() > 3 * 30, computed


REASONS = {
    "scores are more": {"scores": "softcap"},
    "scores have a bias": {"terms": "linear"},
    "heads keep different keys": {"rows": "keys of each head"},
    "half precision": {"dtype": torch.float32},
    "widths": {"width": 256, "value_width": "half"},
    "in many places": {"mask": "boolean"},
    "a compiler traces": {"compiling": True},
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_the_kernels_do_not_compute_is_left_to_others(reason, flex, monkeypatch):
    ordinary = {
        "length": 73,
        "rows": "left pads",
        "queries": "few",
        "causal": True,
        "regions": "chunks",
        "terms": "none",
        "scores": "products",
        "mask": "none",
        "decay": False,
        "dtype": torch.bfloat16,
        "gradient": False,
        "compiling": False,
        "width": 40,
        "value_width": "as keys",
    }

    def asked(changes):
        axes = {axis: (value,) for axis, value in (ordinary | changes).items()}
        monkeypatch.setattr(problems, "AXES", AXES | axes)
        monkeypatch.setattr(problems, "STRATA", ({},))
        return intervals.supports(draw(0).problem())

    assert asked({}) == ""
    assert reason in asked(REASONS[reason])


def test_the_kernels_are_for_some_gpus(monkeypatch):
    cuda = torch.device("cuda", 0)
    assert "for GPUs" in intervals.missing(torch.device("cpu"))
    monkeypatch.setattr(intervals.importlib.util, "find_spec", lambda name: None)
    assert "extra `gpu`" in intervals.missing(cuda)
    monkeypatch.setattr(intervals.importlib.util, "find_spec", lambda name: object())
    for capability, serves in (((8, 0), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert (intervals.missing(cuda) == "") is serves


class Inclusive(Flex):
    """Intervals that include their end."""

    def create_mask_plan(self, mask_func, *states, build_backward):
        shifted = mask_func.clone()
        shifted[:, 2::2] += 1
        return super().create_mask_plan(shifted, *states, build_backward=build_backward)


@pytest.mark.parametrize("fake", [Flex, Inclusive])
def test_a_trial_sees_intervals_that_mean_something_else(fake, monkeypatch):
    fake().put(monkeypatch)
    trial = Trial("Intervals", intervals.objection.compare, intervals.objection.tolerance)
    given = torch.device("cpu"), torch.bfloat16, 16, 24
    if fake is Flex:
        assert trial(*given) == ""
        return
    with pytest.warns(RopePatchWarning, match="differed from the definition"):
        assert trial(*given)


def in_chunks(**changes):
    """A call of two rows, one padded, under DCA."""
    positions = torch.arange(45)[None]
    groups = torch.tensor([[0] * 45, [-1] * 9 + [0] * 36])
    random = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, 45, 16, generator=random, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    )
    regions = tuple(get_scheme("dca:chunk_size=12,local_window=3").segments())
    inputs = Problem((), value, positions, positions, None, True, 0, 0.3, groups=groups)
    return whole(inputs, query, key, regions=regions, **changes), (query, key, value)


def test_layers_of_a_forward_share_plans(flex):
    first, _ = in_chunks()
    second, _ = in_chunks()
    second = second.replaced(
        turner=first.turner,
        query_positions=first.query_positions,
        key_positions=first.key_positions,
        groups=first.groups,
    )
    for problem in (first, second):
        intervals.attend(problem)
        assert flex.plans == 3  # as many as regions
    assert flex.calls == 6
    with torch.no_grad():  # plans without a backward are others
        intervals.attend(second)
    assert flex.plans == 6


def test_a_second_derivative_is_that_of_the_definition(flex):
    results = []
    for attend in (intervals.attend, reference.attend):
        problem, leaves = in_chunks()
        out = attend(problem)[0]
        first = torch.autograd.grad(out.pow(2).sum(), leaves, create_graph=True)
        results.append(torch.autograd.grad(sum(x.pow(2).sum() for x in first), leaves))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "documents", "gradients", "in_runs", "name"),
    [
        ("dca:chunk_size=12,local_window=3", 1, True, False, "intervals"),
        ("dca:chunk_size=12,local_window=3", 1, True, True, "merged"),
        ("dca:chunk_size=12,local_window=3", 20, True, True, "intervals"),
        ("dca:chunk_size=12,local_window=3", 1, False, False, "merged"),
        ("rerope:window=6", 1, True, False, "merged"),
        ("rerope:window=6", 20, True, False, "intervals"),
        ("rerope:window=6", 20, False, False, "merged"),
    ],
)
def test_who_scores_many_tiles_on_a_gpu(spec, documents, gradients, in_runs, name, monkeypatch):
    kernel = SimpleNamespace(batches=lambda query: in_runs)
    monkeypatch.setattr(intervals, "kernel_for", lambda *given, masked: kernel)
    length = 300
    groups = (torch.arange(length) * documents // length)[None]
    positions = torch.arange(length)[None] - torch.searchsorted(groups[0], groups[0])
    states = [torch.randn(1, heads, length, 8, requires_grad=gradients) for heads in (4, 2, 2)]
    regions = tuple(region for region in get_scheme(spec).segments() if region.stop > 0)
    inputs = Problem((), states[2], positions, positions, None, True, 0, 0.3, groups=groups)
    able, unable = (lambda problem: ""), (lambda problem: "it was told so")
    rows = [
        dataclasses.replace(row, executor=dataclasses.replace(row.executor, supports=supports))
        for row in engine.TABLE["cuda"]
        for supports in [able if row.executor.name in ("intervals", "merged", "chunked") else unable]
    ]
    assert choose(rows, whole(inputs, *states[:2], regions=regions)).name == name
