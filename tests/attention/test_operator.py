"""The operator of compiled graphs, called eagerly: it takes the paths of eager mode, and its fake has its shapes."""

import dataclasses

import pytest
import torch
from torch import library

from rope_patch import UnsupportedPositions, patch
from rope_patch.attention.decay import Decay
from rope_patch.attention.executors import graph, merged, reference
from rope_patch.schemes.tools.rotary import half_split
from tests.attention.problems import supports
from tests.attention.test_segmented import ROWS, SUMS, gradients_of, in_double, inputs_of
from tests.families import build
from tests.runs import tokens

SPECS = ["", "rerope:window=6", "dca:chunk_size=9,local_window=2", "alibi", "sandwich:embedding_dim=16,base=100", SUMS]


def of_groups(spec, rows=ROWS, q_length=45, dtype=torch.float32, **changes):
    inputs, kept = inputs_of(spec, rows, q_length, 45, dtype)
    branches = tuple(dataclasses.replace(branch, first=0) for branch in inputs.branches)
    return dataclasses.replace(inputs, branches=branches, **changes), kept


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("mode", ["segmented", "chunked", "auto"])
@pytest.mark.parametrize("q_length", [45, 20])
def test_output_and_gradients_are_those_of_the_oracle(spec, mode, q_length):
    inputs, kept = of_groups(spec, q_length=q_length)
    grad = torch.randn(2, 4, q_length, 16, generator=torch.Generator().manual_seed(1))
    expected, slopes = gradients_of(lambda x: reference.attend(x)[0], in_double(inputs), kept, grad)
    found, ours = gradients_of(lambda x: graph.attend(x.replaced(mode=mode))[0], inputs, kept, grad)
    for one, other in zip([found, *ours], [expected, *slopes], strict=True):
        assert (one.double() - other).norm() / other.norm() < 1e-5


@pytest.mark.parametrize("mask", ["boolean", "additive", "window"])
def test_a_mask_of_all_pairs_is_read_in_the_operator(mask):
    inputs, kept = of_groups("rerope:window=6")
    seen = inputs.visible()
    if mask == "window":
        seen = seen & torch.ones(45, 45, dtype=torch.bool).triu(-10)
    given = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min) if mask == "additive" else seen
    inputs = dataclasses.replace(inputs, mask=given, groups=None)
    expected = reference.attend(in_double(inputs))[0] * kept[:, None, :, None]
    found = graph.attend(inputs.replaced(mode="segmented"))[0] * kept[:, None, :, None]
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_graph_scores_by_segments(monkeypatch):
    taken = []
    for name in ("forward", "backward"):
        original = getattr(merged, name)
        monkeypatch.setattr(merged, name, lambda *args, f=original, name=name: taken.append(name) or f(*args))
    inputs, kept = of_groups("rerope:window=6")
    gradients_of(lambda x: graph.attend(x.replaced(mode="segmented"))[0], inputs, kept, torch.ones(2, 4, 45, 16))
    assert taken == ["forward", "backward"]


def test_branches_with_the_same_states_have_no_gradient_of_chance(monkeypatch):
    """All of it is that of the first; PyTorch fills what is not written with NaN here."""
    inputs, kept = of_groups("self_extend:group_size=4,window=7")
    near, far = inputs.branches
    inputs = inputs.replaced(branches=(near, dataclasses.replace(far, query=near.query, key=near.key)))
    grad = torch.randn(2, 4, 45, 16, generator=torch.Generator().manual_seed(1)) * kept[:, None, :, None]

    def gradients(attend, inputs):
        leaves = [x.detach().clone().requires_grad_() for x in (inputs.value, near.query, near.key)]
        value, query, key = (leaf.to(inputs.value.dtype) for leaf in leaves)
        branches = tuple(dataclasses.replace(branch, query=query, key=key) for branch in inputs.branches)
        attend(dataclasses.replace(inputs, value=value, branches=branches)).backward(grad.to(value.dtype))
        return [leaf.grad for leaf in leaves]

    expected = gradients(lambda x: reference.attend(x)[0], in_double(inputs))
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        found = gradients(lambda x: graph.attend(x.replaced(mode="segmented"))[0], inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() / other.norm() < 1e-5


def test_a_decay_is_applied_in_blocks():
    inputs, kept = of_groups("", dtype=torch.float64)
    decay = Decay(half_split(16), torch.linspace(0.01, 0.2, 8))
    m, n = inputs.m.double()[..., None], inputs.n.double()[..., None]
    faded = torch.exp(-(m - n) * torch.cat([decay.rate, decay.rate]).double())
    grad = torch.randn(2, 4, 45, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def by_definition(inputs):
        (branch,) = inputs.branches
        q, k, v = branch.query, branch.key.repeat_interleave(2, 1), inputs.value.repeat_interleave(2, 1)
        scores = torch.einsum("bhmd,bhnd,bmnd->bhmn", q, k, faded[:, 0].clamp(max=1)) * inputs.scaling
        return scores.masked_fill(~inputs.visible(), -1e30).softmax(-1) @ v

    expected, slopes = gradients_of(by_definition, inputs, kept, grad)
    found, ours = gradients_of(lambda x: graph.attend(x.replaced(decay=decay))[0], inputs, kept, grad)
    for one, other in zip([found, *ours], [expected, *slopes], strict=True):
        assert (one - other).norm() / other.norm() < 1e-6


SAMPLES = {
    "nothing": {"spec": ""},
    "regions": {"spec": "rerope:window=6"},
    "regions by segments": {"spec": "rerope:window=6", "mode": "segmented"},
    "chunks of regions": {"spec": "dca:chunk_size=9,local_window=2"},
    "bias by distance": {"spec": "alibi", "mode": "segmented"},
    "bias that is not linear": {"spec": "sandwich:embedding_dim=16,base=100"},
    "bias by running sums": {"spec": SUMS, "mode": "segmented"},
    "boolean mask": {"spec": "rerope:window=6", "mask": "boolean"},
    "additive mask": {"spec": "rerope:window=6", "mask": "additive"},
    "decay": {"spec": "", "decays": True},
    "bfloat16": {"spec": "alibi", "dtype": torch.bfloat16, "gradient": False},
    "no gradient": {"spec": "rerope:window=6", "gradient": False},
    "few queries": {"spec": "rerope:window=6", "q_length": 20, "mode": "segmented"},
}


@pytest.fixture(params=SAMPLES.values(), ids=SAMPLES)
def arguments(request, monkeypatch):
    """The arguments of the operator for one of the `SAMPLES`."""

    def taken(spec, mode="auto", mask=None, decays=False, gradient=True, q_length=45, dtype=torch.float32):
        inputs, _ = of_groups(spec, q_length=q_length, dtype=dtype)
        if mask is not None:
            seen = inputs.visible()
            lowest = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
            inputs = dataclasses.replace(inputs, mask=seen if mask == "boolean" else lowest, groups=None)
        for state in [each for branch in inputs.branches for each in (branch.query, branch.key)] if gradient else ():
            state.requires_grad_()
        called = []
        monkeypatch.setattr(graph, "_attend", lambda *args: called.append(args) or graph._shaped(*args))
        decay = Decay(half_split(16), torch.linspace(0.01, 0.2, 8)) if decays else None
        graph.attend(inputs.replaced(decay=decay, mode=mode))
        monkeypatch.undo()
        return called[0]

    return taken(**request.param)


def test_the_operator_keeps_the_rules_of_pytorch(arguments):
    library.opcheck(torch.ops.rope_patch.attend.default, arguments)


def test_its_backward_keeps_the_rules_of_pytorch(arguments):
    states, *others = arguments
    given = [state.detach() for state in states], *others
    out, lse = torch.ops.rope_patch.attend(*given)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    library.opcheck(torch.ops.rope_patch.attend_backward.default, (*given, out, lse, grad))


@pytest.mark.parametrize("causal", [True, False])
def test_the_operator_of_spans_keeps_the_rules_of_pytorch(causal):
    inputs, _ = of_groups("rerope:window=6")
    for mask, groups in ((None, None), (None, inputs.groups), (inputs.visible(), None)):
        table = inputs.query_positions, mask, groups, torch.tensor(0), 2, causal
        library.opcheck(torch.ops.rope_patch.spans.default, table)


def test_what_the_operator_cannot_compute_stays_in_the_graph(monkeypatch):
    monkeypatch.setattr("rope_patch.attention.decay.ROWS", 16)
    inputs, _ = of_groups("alibi")
    assert supports(graph, inputs, compiling=True)
    mask = torch.zeros(1, 1, 45, 45, requires_grad=True)
    assert not supports(graph, dataclasses.replace(inputs, mask=mask), compiling=True)
    assert not supports(graph, dataclasses.replace(inputs, softcap=5.0), compiling=True)
    assert not supports(graph, inputs)  # eagerly
    decay = Decay(half_split(16), torch.linspace(0.01, 0.2, 8))
    by_region, _ = of_groups("rerope:window=6")  # a decay counts by the maps of regions
    assert not supports(graph, by_region, decay=decay, compiling=True)


@pytest.mark.parametrize("spec", ["alibi", "rerope:window=6+alibi"])
def test_a_compiled_model_counts_positions_that_skip(spec):
    skipping = torch.cat([torch.arange(20), torch.arange(100, 120)])[None]
    model = build("llama")
    patch(model, spec)
    given = {"input_ids": tokens(40), "position_ids": skipping, "attention_mask": torch.ones(1, 40).long()}
    with torch.no_grad():
        expected, found = (
            each(**given, use_cache=False).logits for each in (model, torch.compile(model, backend="eager"))
        )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_compiled_model_refuses_distances_beyond_its_table_of_biases():
    skipping = torch.cat([torch.arange(20), torch.arange(100, 120)])[None]
    model = build("llama")
    patch(model, "sandwich")
    given = {"input_ids": tokens(40), "position_ids": skipping, "attention_mask": torch.ones(1, 40).long()}
    with torch.no_grad(), pytest.raises(UnsupportedPositions, match=r"positions skip: a distance is 119, .* 40 slots"):
        torch.compile(model, backend="eager")(**given, use_cache=False)
