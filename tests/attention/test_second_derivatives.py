"""A gradient that is differentiated again is exact, or an error names what has none."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rope_patch import patch
from rope_patch.attention.executors import merged, reference
from rope_patch.attention.rotation import rotate
from rope_patch.attention.spans import find_spans
from rope_patch.attention.turner import Branch
from rope_patch.schemes.tools.rotary import half_split
from rope_patch.training.chunked_loss import chunked_loss
from tests.attention.problems import in_spans
from tests.attention.test_bidirectional import bias_of
from tests.attention.test_segmented import ROWS, SPECS, inputs_of, run_segmented
from tests.families import build
from tests.runs import tokens


def twice(attend, inputs, kept, table=None):
    """The gradient of the square of the gradient of a sum, by everything that the call depends on."""
    bias = inputs.bias if table is None else bias_of(table)
    given = [
        inputs.value,
        *(x for branch in inputs.branches for x in (branch.query, branch.key)),
        inputs.running_bias,
        table,
    ]
    leaves = [x.requires_grad_() for x in given if x is not None]
    out = attend(dataclasses.replace(inputs, bias=bias)) * kept[:, None, :, None]
    slopes = torch.autograd.grad(out.sum(), leaves, create_graph=True)
    return torch.autograd.grad(sum(slope.square().sum() for slope in slopes), leaves)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("spec", [*SPECS, "learned"])
def test_regions_and_biases(spec, causal):
    if not causal and ("dca" in spec or "infinite" in spec or "sums" in spec):
        pytest.skip("only causal")
    inputs, kept = inputs_of("" if spec == "learned" else spec, ROWS, 45, 45, causal=causal)
    table = torch.randn(4, 81, dtype=torch.float64) if spec == "learned" else None
    ours, theirs = (twice(attend, inputs, kept, table) for attend in (run_segmented, lambda x: reference.attend(x)[0]))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)  # biases are float32


def test_regions_by_differences():
    inputs, _ = inputs_of("rerope:window=2", [[0] * 5], 5, 5, dim=2, value_dim=2, heads=2, kv_heads=1)
    regions = [branch.region for branch in inputs.branches]
    spans = find_spans(inputs.query_positions, None, inputs.groups, 0, 1)

    def attend(value, *states):
        branches = tuple(Branch(region, *states[2 * i : 2 * i + 2]) for i, region in enumerate(regions))
        return in_spans(merged, dataclasses.replace(inputs, value=value, branches=branches), spans)

    states = [inputs.value, *(x for branch in inputs.branches for x in (branch.query, branch.key))]
    assert torch.autograd.gradgradcheck(attend, [x.requires_grad_() for x in states], fast_mode=True)


def test_rotations_by_differences():
    x, angles = (torch.randn(1, 2, 3, dim, dtype=torch.float64) for dim in (6, 2))
    cos = half_split(4).wide(angles[:, :1].cos(), 6)
    assert torch.autograd.gradgradcheck(
        lambda x: rotate(half_split(4), x, cos, angles[:, :1].sin()), x.requires_grad_()
    )


def test_a_model_beyond_small_calls():
    found = []
    for attention in ("oracle", "auto"):
        model = build("llama")
        patch(model, "rerope", window=100, attention=attention)
        weight = model.model.layers[0].self_attn.q_proj.weight
        (slope,) = torch.autograd.grad(model(tokens(560)).logits.square().mean(), weight, create_graph=True)
        found += torch.autograd.grad(slope.square().sum(), weight)
    assert (found[0] - found[1]).norm() < 1e-4 * found[0].norm()


def test_the_chunked_loss_has_none():
    model = build("llama")
    with chunked_loss(model):
        loss = model(tokens(9), labels=tokens(9)).loss
    with pytest.raises(RuntimeError, match="chunked_loss has no second derivatives"):
        torch.autograd.grad(loss, model.model.norm.weight, create_graph=True)


def test_functional_transforms_are_refused():
    model = build("llama")
    patch(model, "rerope", window=6, attention="segmented")

    def loss(weight):
        return torch.func.functional_call(model, {"model.norm.weight": weight}, (tokens(30),)).logits.sum()

    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(loss)(model.model.norm.weight)
