"""FlexAttention against the definition: gradients by a dense stand-in for its kernel, which has none on a CPU."""

import dataclasses
import math

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from rope_patch.attention import engine
from rope_patch.attention.decay import Decay
from rope_patch.attention.executors import flex, reference
from rope_patch.attention.problem import Problem
from rope_patch.attention.table import choose
from rope_patch.attention.terms import Content, DistanceBias
from rope_patch.attention.trials import Trial
from rope_patch.attention.visibility import Visibility
from rope_patch.schemes.slots import Region
from rope_patch.schemes.tools.positions import Identity
from rope_patch.schemes.tools.rotary import half_split
from tests.attention.problems import draw, whole
from tests.attention.test_every_executor import OF_SUMS, SEEDS, TOLERANCES, defined, error_of, with_gradients

CPU = torch.device("cpu")
GRADIENTS = [seed for seed in SEEDS if draw(seed).gradient]
KINDS = [
    flex.Kind(bias, sums, softcap, True, True)
    for bias, sums, softcap in (
        ("", False, False),
        ("slopes", True, False),
        ("table", False, True),
        ("table", True, True),
    )
]


def dense(query, key, value, score_mod, mask, scaling):
    """What FlexAttention is documented to compute, one score after another, with gradients."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    scores = query.float() @ key.float().mT * scaling
    axes = torch.eye(4, dtype=torch.bool)
    places = [
        torch.arange(n).view(torch.where(axis, n, 1).tolist()) for n, axis in zip(scores.shape, axes, strict=True)
    ]
    if score_mod is not None:
        scores = score_mod(scores, *places)
    if mask is not None:
        scores = scores.masked_fill(~mask.mask_mod(*places), -math.inf)
    sees = (scores > -math.inf).any(dim=-1)
    lse = scores.clamp(min=-1e30).logsumexp(dim=-1).where(sees, -math.inf)
    weights = (scores - lse.where(sees, 0)[..., None]).exp()
    return weights.to(value.dtype) @ value, lse


@pytest.fixture
def by_dense(monkeypatch):
    monkeypatch.setattr(flex, "_by_flex", dense)


@pytest.mark.parametrize("seed", GRADIENTS)
def test_gradients_are_those_of_the_definition(seed, by_dense):
    drawn = draw(seed)
    leaves = drawn.fresh()
    problem = drawn.problem("flex", leaves=leaves)
    if (reason := flex.supports(problem)) != flex.NO_GRADIENTS:
        assert reason
        return
    exact = {name: leaf.double().clone().requires_grad_() for name, leaf in drawn.leaves.items()}
    expected = with_gradients(drawn, exact, defined(drawn, exact))
    found = with_gradients(drawn, leaves, flex.attend(problem)[0])
    for part, one, other in zip(("output", *leaves), found, expected, strict=True):
        largest = TOLERANCES[drawn.dtype] * (OF_SUMS if part == "slopes" else 1)
        assert (error := error_of(one, other)) < largest, f"{part}: {error:.1e}, {drawn.drawn}"


def test_many_random_calls_have_gradients():
    problems = [draw(seed).problem("flex") for seed in GRADIENTS]
    taken = [problem for problem in problems if flex.supports(problem) == flex.NO_GRADIENTS]
    assert len(taken) > 20
    assert {flex.Kind.from_problem(problem).bias for problem in taken} == {"", "slopes", "table"}
    assert any(problem.running_bias is not None for problem in taken)
    assert any(problem.sinks is not None for problem in taken)


def test_running_sums_keep_small_differences_of_large_numbers(by_dense):
    """Float32 numbers near 1e6 are a sixteenth apart."""
    sums = -1e6 - torch.rand(1, 4, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64).cumsum(dim=-1)
    problem = call(running_bias=sums)
    torch.testing.assert_close(flex.attend(problem)[0], reference.attend(problem)[0], atol=1e-5, rtol=1e-5)


# --- which keys a query sees ---


@pytest.mark.parametrize("seed", SEEDS[::3])
def test_blocks_that_are_left_out_have_no_pair_and_whole_ones_have_all(seed, monkeypatch):
    monkeypatch.setattr(flex, "BLOCK", 16)
    drawn = draw(seed)
    if drawn.mask is not None and drawn.mask.dtype != torch.bool:
        return
    call, heads = drawn.problem(), drawn.leaves["queries"].shape[1]
    for region in drawn.regions:
        own = flex.block_mask(call.query_positions, call.key_positions, call.visibility, region, 0, 2, heads)
        if own is None:
            continue
        made = create_block_mask(own.mask_mod, 2, heads, call.q_length, call.kv_length, device="cpu", BLOCK_SIZE=16)
        ours, theirs = (_in_full(mask).broadcast_to(2, heads, -1, -1) for mask in (own, made))
        assert ((ours > 0) >= (theirs > 0)).all()
        assert ((ours == 2) <= (theirs == 2)).all()


def _in_full(mask):
    """2 in whole blocks, 1 in others that are read, 0 in those that are left out."""
    found = torch.zeros(*mask.kv_indices.shape[:3], mask.kv_indices.shape[-1], dtype=torch.long)
    for kind, (numbers, places) in enumerate(
        ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)), start=1
    ):
        first = torch.arange(places.shape[-1]) < numbers[..., None]
        found += torch.zeros_like(found).scatter_(-1, places.long(), first.long()) * kind
    return found


@pytest.mark.parametrize(
    "region", [None, Region(Identity(), Identity(), stop=300), Region(Identity(), Identity(), 300)]
)
def test_blocks_of_a_text_in_order_are_the_fewest(region):
    positions = torch.arange(1000)[None]
    sees = Visibility(None, None, True, 0, 1000, 1000)
    own = flex.block_mask(positions, positions, sees, region, 0, 1, 1)
    made = create_block_mask(own.mask_mod, 1, 1, 1000, 1000, device="cpu")
    assert torch.equal(_in_full(own), _in_full(made))


def test_a_pad_sees_the_tokens_before_it(by_dense):
    """As in the definition, though nobody reads what it computes."""
    groups = torch.zeros(1, 30, dtype=torch.long)
    groups[:, 20:] = -1
    problem = call(groups=groups)
    torch.testing.assert_close(flex.attend(problem)[0], reference.attend(problem)[0], atol=1e-5, rtol=1e-5)


def test_all_pairs_need_no_mask():
    positions = torch.arange(30)[None]
    assert flex.block_mask(positions, positions, Visibility(None, None, False, 0, 30, 30), None, 0, 1, 1) is None


def test_layers_of_a_forward_share_their_masks(monkeypatch):
    given = []

    def watched(*arguments):
        given.append(arguments[4])
        return dense(*arguments)

    monkeypatch.setattr(flex, "_by_flex", watched)
    drawn = next(drawn for drawn in map(draw, SEEDS) if not flex.supports(drawn.problem()) and len(drawn.regions) == 2)
    first = drawn.problem("flex")
    for layer in (first, drawn.problem("flex", earlier=first)):
        flex.attend(layer)
    assert given[0] is given[2]
    assert given[1] is given[3]


# --- the trial and the table ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_kernel_that_is_right_passes_its_trial(kind, dtype, by_dense):
    assert Trial("FlexAttention", flex.objection.compare, flex.objection.tolerance)(CPU, dtype, 32, 16, kind) == ""


WRONG = {
    "the terms": lambda *given: dense(*given[:3], None, *given[4:]),
    "what is hidden": lambda *given: dense(*given[:4], None, given[5]),
    "the scale": lambda *given: dense(*given[:5], 1.0),
    "the log-sum-exp": lambda *given: (dense(*given)[0], dense(*given)[1] / math.log(2)),
    "its gradient": lambda *given: (dense(*given)[0], dense(*given)[1].detach()),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_kernel_that_is_wrong_is_not_used(what, monkeypatch):
    monkeypatch.setattr(flex, "_by_flex", WRONG[what])
    trial = Trial("FlexAttention", flex.objection.compare, flex.objection.tolerance)
    assert "differed from the definition" in trial(CPU, torch.float32, 32, 32, KINDS[1])


def test_a_kernel_is_compiled_once_for_a_kind(monkeypatch):
    """Other lengths, windows, slopes, pads and softcaps of the same kind take the same graph."""
    graphs = []

    def kept(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(flex._by_flex, dynamic=True, fullgraph=True, backend=kept)
    monkeypatch.setattr(flex, "_compiled", lambda: compiled)
    monkeypatch.setattr(flex, "_kernel", lambda device: flex._by_compiled_flex)
    for length, window, steepness, cap in ((200, 60, 1.0, 2.0), (170, 90, 0.3, 3.0)):
        near, far = Region(Identity(), Identity(), stop=window), Region(Identity(), Identity(), start=window)
        bias = DistanceBias(
            lambda distance, by=steepness: -by * distance.float().abs().sqrt()[None].expand(4, *[-1] * distance.ndim)
        )
        groups = torch.zeros(2, length, dtype=torch.long)
        groups[1, : length // 9] = -1
        problem = call(length, 2, groups=groups, softcap=cap, bias=bias, regions=(near, far))
        expected = reference.attend(problem)[0]
        torch.testing.assert_close(flex.attend(problem)[0], expected, atol=1e-5, rtol=1e-5)
    assert len(graphs) == 1


def call(length=30, rows=1, width=16, dtype=torch.float32, turner=True, **given):
    """A causal call without rotations."""
    numbers, positions = torch.Generator().manual_seed(0), torch.arange(length)[None]
    states = [torch.randn(rows, heads, length, width, generator=numbers).to(dtype) for heads in (4, 2, 2)]
    inputs = Problem((), states[2], positions, positions, None, True, 0, 0.25)
    found = whole(inputs, *states[:2], **given)
    return found if turner else found.replaced(turner=None)


REFUSED = {
    "a compiler traces": {"compiling": True},
    "rotated already": {"turner": False},
    "scores decay": {"decay": Decay(half_split(16), torch.ones(8))},
    "term by content": {"content": Content(None, {}, None, None, None)},
    "or dropout": {"dropout": 0.1},
    "added to the scores": {"mask": torch.zeros(1, 1, 30, 30)},
    "differ in dtype": {"value": torch.randn(1, 2, 30, 16, dtype=torch.bfloat16)},
    "that it does not support": {"dtype": torch.float64},
    "narrower than 16": {"width": 8},
    "wider than 256": {"width": 272},
    "no gradients on a CPU": {"sinks": torch.zeros(4, requires_grad=True)},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_does_not_compute_is_refused_with_a_reason(reason):
    assert reason in flex.supports(call(**REFUSED[reason]))


def test_it_computes_what_is_not_refused():
    mask = torch.ones(1, 1, 30, 30, dtype=torch.bool)
    for given in ({}, {"mask": mask}, {"sinks": torch.zeros(4)}, {"width": 256}, {"dtype": torch.float16}):
        assert flex.supports(call(**given)) == ""


@pytest.mark.parametrize("triton", [True, False])
def test_on_a_gpu_it_needs_triton_and_a_trial(triton, monkeypatch):
    """Of the dtype, the widths and the kind of the call."""
    asked = []
    monkeypatch.setattr(flex, "compiles", lambda device: triton)
    monkeypatch.setattr(flex, "objection", lambda *what: asked.append(what) or "it was wrong")
    meta = torch.device("meta")
    problem = call(sinks=torch.zeros(4))
    states = {name: getattr(problem, name).to(meta) for name in ("query", "key", "value")}
    assert flex.supports(problem.replaced(**states)) == (
        "it was wrong" if triton else "Triton is not installed, or does not compile for this device"
    )
    kind = flex.Kind("", False, False, False, True)
    assert asked == ([(meta, torch.float32, 16, 16, kind)] if triton else [])


TERM = {"bias": DistanceBias(lambda distance: -distance[None].float())}


@pytest.mark.parametrize(
    ("given", "fused", "taken"),
    [
        pytest.param(TERM, False, True, id="a bias that the Triton kernel refuses"),
        pytest.param({"running_bias": torch.zeros(1, 4, 30)}, False, True, id="running sums"),
        pytest.param({"softcap": 2.0}, False, True, id="a softcap"),
        pytest.param({"sinks": torch.zeros(4)}, False, True, id="sinks"),
        pytest.param(TERM, True, False, id="what the Triton kernel takes"),
        pytest.param({}, False, False, id="products alone"),
        pytest.param(TERM | {"length": 1}, False, False, id="one query"),
    ],
)
def test_on_a_gpu_it_serves_terms_that_the_triton_kernel_refuses(given, fused, taken, monkeypatch):
    monkeypatch.setattr(engine, "_is_flash", lambda problem: False)
    answers = {"joined": "it was told so", "fused": "" if fused else "it was told so"}
    rows = [
        dataclasses.replace(
            row, executor=dataclasses.replace(row.executor, supports=lambda _, name=name: answers[name])
        )
        if (name := row.executor.name) in answers
        else row
        for row in engine.TABLE["cuda"]
    ]
    problem = call(**given, find_spans=lambda _: None)
    assert (choose(rows, problem).name == "flex") == taken
    assert choose(engine.TABLE["cuda"], problem.replaced(mode="flex")).name == "flex"
    assert choose(engine.ROWS, problem).name != "flex"
