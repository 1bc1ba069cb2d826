"""Every executor on a simulated GPU: its values are the CPU's, no tensor stays behind on the CPU, and the host waits
for nothing that another layer has read already.
"""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch

from rope_patch.attention import decay
from rope_patch.attention.decay import Decay
from rope_patch.typing import Frequencies
from tests.attention.problems import WITH_DECAY, draw
from tests.attention.test_every_executor import (
    EXECUTORS,
    OF_SUMS,
    SEEDS,
    TOLERANCES,
    asked,
    computed,
    error_of,
)
from tests.simulated_device import Simulated, SimulatedDevice, values

SOME = [*SEEDS[:WITH_DECAY:3], *SEEDS[WITH_DECAY:]]

ELSEWHERE = {"fused", "flex", "intervals", "one_call", "one_rotation", "traced", "graph", "products", "masked"}
"""Executors that it cannot run: kernels of a GPU, executors for CPUs, and operators of a graph."""


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch):
    monkeypatch.setattr(decay, "ROWS", 20)


def own(counted):
    """What happens in this package."""
    return [place for place in counted if " at rope_patch/" in place]


def moved(drawn, executor, leaves, earlier=None):
    """The call with all of its tensors on the device."""
    problem = asked(drawn, executor, leaves=leaves, earlier=earlier)
    shared = {
        name: getattr(earlier or problem, name) for name in ("query_positions", "key_positions", "mask", "groups")
    }
    bias = problem.bias
    if earlier is None:  # layers of one forward have the same
        shared = {name: None if x is None else Simulated(x) for name, x in shared.items()}
        if bias is not None:
            bias = dataclasses.replace(bias, table=lambda *ends: bias_at(torch.arange(*ends, device="cuda")))
            bias_at = bias.function
    positions = {name: shared[name] for name in ("query_positions", "key_positions")}
    turner = dataclasses.replace(problem.turner, **positions, frequencies=Frequencies(Simulated(drawn.inv_freq)))
    fades = None if drawn.rate is None else Decay(problem.decay.layout, Simulated(drawn.rate))
    return problem.replaced(**shared, bias=bias, turner=turner, decay=fades)


def on_the_device(drawn, executor):
    """Output and gradients of the second of two layers; what the host waited for, and what it copied, in `supports`,
    and in all of that layer.
    """
    leaves = {name: Simulated(leaf).requires_grad_(drawn.gradient) for name, leaf in drawn.leaves.items()}
    with SimulatedDevice() as device, torch.set_grad_enabled(drawn.gradient):
        first = moved(drawn, executor, leaves)
        assert not executor.supports(first)
        executor.attend(first)
        device.clear()
        second = moved(drawn, executor, leaves, earlier=first)
        assert not executor.supports(second)
        asking = own(device.synchronisations) + own(device.copies)
        out = executor.attend(second)[0]
        waits, copies = own(device.synchronisations), own(device.copies)
        assert out.device.type == "cuda"
        return values_of_all(drawn, leaves, out), asking, waits, copies


def values_of_all(drawn, leaves, out):
    """Output and gradients as tensors of the CPU."""
    out = out.masked_fill(Simulated(~drawn.kept), 0)
    if not drawn.gradient:
        return [values(out)]
    along = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    wanted, options = list(leaves.values()), {"allow_unused": True, "materialize_grads": True}
    return [values(x) for x in (out, *torch.autograd.grad(out, wanted, Simulated(along), **options))]


@pytest.mark.parametrize("seed", SOME)
def test_an_executor_computes_on_the_device_and_asks_once_a_forward(seed):
    drawn = draw(seed)
    if drawn.compiling:
        pytest.skip("values are not known while compiling")
    for executor in EXECUTORS:
        if executor.name in ELSEWHERE or (expected := computed(drawn, executor, drawn.fresh())) is None:
            continue
        if expected[0] != executor.name:
            continue
        what = f"{executor.name}, {drawn.drawn}"
        found, asking, waits, copies = on_the_device(drawn, executor)
        assert not asking, f"{what}: {asking}"
        if executor.name == "joined":  # decoding: a graph may be captured
            assert not waits, f"{what}: {waits}"
            assert not copies, f"{what}: {copies}"
        for part, one, other in zip(("output", *drawn.leaves), found, expected[1], strict=False):
            largest = TOLERANCES[drawn.dtype] * (OF_SUMS if part == "slopes" else 1)
            assert error_of(one, other.double()) < largest, f"{part}, {what}"


def test_every_executor_that_can_be_run_there_is():
    count = collections.Counter()
    for drawn in map(draw, SOME):
        if not drawn.compiling:
            with torch.set_grad_enabled(drawn.gradient):
                count.update(each.name for each in EXECUTORS if not each.supports(asked(drawn, each)))
    assert not {each.name for each in EXECUTORS if count[each.name] < 4} - ELSEWHERE, count
