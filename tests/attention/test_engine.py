"""The engine picks the fastest way that is right for a call, and dropout is right."""

import dataclasses

import pytest
import torch

from rope_patch.attention import paths
from rope_patch.attention.executors import block, chunked, reference
from rope_patch.attention.table import choose
from tests.attention.problems import spans_of, supports
from tests.attention.test_segmented import ROWS, gradients_of, inputs_of

SPECS = ["rerope:window=6", "alibi"]


def attend(inputs, mode="segmented"):
    return paths.score(inputs.replaced(mode=mode, find_spans=spans_of))[0]


def taken(inputs, mode="segmented"):
    """The name of the executor that scores a call."""
    return choose(paths.ROWS, inputs.replaced(mode=mode, find_spans=spans_of)).name


@pytest.mark.parametrize(
    ("changes", "way"),
    [
        ({}, "merged"),
        ({"dropout": 0.1}, "chunked"),
        ({"softcap": 5.0}, "chunked"),
        ({"sinks": torch.zeros(4)}, "chunked"),
        ({"causal": False}, "merged"),
        ({"causal": False, "mask": torch.ones(1, 1, 45, 45, dtype=torch.bool), "groups": None}, "chunked"),
        ({"key_positions": torch.arange(45)[None]}, "merged"),
    ],
)
@pytest.mark.parametrize("spec", SPECS)
def test_flash_where_scores_are_products_and_biases_and_the_definition_elsewhere(changes, way, spec):
    inputs, _ = inputs_of(spec, ROWS, 45, 45, torch.float32)
    assert taken(dataclasses.replace(inputs, **changes)) == way


def test_a_bias_that_wants_a_gradient_gets_one():
    inputs, kept = inputs_of("alibi", ROWS, 45, 45, torch.float32)
    slopes = torch.rand(4, requires_grad=True)
    learned = dataclasses.replace(
        inputs.bias, function=lambda distance: -slopes.view(-1, *[1] * distance.ndim) * distance, table=None
    )
    found = {}
    for mode in ("segmented", "chunked"):
        slopes.grad = None
        (attend(dataclasses.replace(inputs, bias=learned), mode) * kept[:, None, :, None]).square().sum().backward()
        found[mode] = slopes.grad
    assert taken(dataclasses.replace(inputs, bias=learned)) == "merged"
    torch.testing.assert_close(found["segmented"], found["chunked"], rtol=1e-4, atol=1e-4)
    assert slopes.grad.abs().min() > 0


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["groups", "nothing", "boolean", "additive"])
def test_a_small_call_under_a_bias_is_the_definition(kind, causal):
    inputs, kept = inputs_of("alibi", ROWS, 45, 45, torch.float32, kv_heads=4, causal=causal)
    branch = dataclasses.replace(inputs.branches[0], region=None)
    seen = torch.rand(2, 1, 45, 45, generator=torch.Generator().manual_seed(3)) < 0.5
    seen |= torch.eye(45, dtype=torch.bool)
    masks = {"boolean": seen, "additive": torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)}
    mask, groups = masks.get(kind), inputs.groups if kind == "groups" else None
    inputs = dataclasses.replace(inputs, branches=(branch,), mask=mask, groups=groups)
    assert supports(block, inputs)
    kept = kept if kind == "groups" else torch.ones_like(kept)
    expected = reference.attend(inputs)[0] * kept[:, None, :, None]
    torch.testing.assert_close(attend(inputs, "auto") * kept[:, None, :, None], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("spec", "first", "way"), [(SPECS[0], 100, "merged"), (SPECS[0], 3, "chunked"), (SPECS[1], 100, "chunked")]
)
def test_positions_may_skip_without_a_bias_but_not_go_down(spec, first, way):
    inputs, _ = inputs_of(spec, ROWS[:1], 45, 45, torch.float32)
    positions = torch.cat([torch.arange(20), torch.arange(first, first + 25)])[None]
    assert taken(dataclasses.replace(inputs, query_positions=positions, key_positions=positions)) == way


@pytest.mark.parametrize("spec", SPECS)
def test_dropout_leaves_the_mean_and_changes_every_draw(spec):
    inputs, kept = inputs_of(spec, ROWS, 45, 45, torch.float32)
    expected = attend(inputs, "auto") * kept[:, None, :, None]
    dropped = dataclasses.replace(inputs, dropout=0.3)
    torch.manual_seed(0)
    draws = torch.stack([attend(dropped, "auto") for _ in range(600)]) * kept[:, None, :, None]
    assert (draws[0] - draws[1]).abs().max() > 0.1
    error = (draws.mean(dim=0) - expected).abs()
    assert (error < 6 * draws.std(dim=0) / 600**0.5 + 1e-5).all()


def test_blocks_that_are_computed_again_drop_the_same_weights(monkeypatch):
    monkeypatch.setattr(chunked, "SCORES_PER_BLOCK", 300)
    inputs, kept = inputs_of("rerope:window=6", ROWS, 45, 45, torch.float32)
    dropped = dataclasses.replace(inputs, dropout=0.3)
    grad = torch.randn(inputs.branches[0].query.shape, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    again = gradients_of(attend, dropped, kept, grad)
    monkeypatch.setattr(chunked, "checkpoint", lambda block, **_: block())
    torch.manual_seed(0)
    once = gradients_of(attend, dropped, kept, grad)
    torch.testing.assert_close(again, once)
