"""Queries and keys rotated for all regions by one kernel, as on a GPU."""

from __future__ import annotations

import pytest
import torch

from rope_patch import get_scheme
from rope_patch.attention import rotation_kernel
from rope_patch.attention.executors import chunked
from rope_patch.attention.forward import Forward
from rope_patch.attention.problem import Problem
from rope_patch.attention.turner import Turner
from rope_patch.schemes.tools.positions import UNROTATED
from rope_patch.schemes.tools.rotary import RotaryLayout
from rope_patch.typing import Frequencies
from tests.attention.test_fused import DEVICE, needs_triton, run
from tests.simulated_device import Simulated

__all__ = ["run"]

LAYOUTS = {
    "halves": RotaryLayout((0, 1, 2, 3, 4, 5, 6, 7), (8, 9, 10, 11, 12, 13, 14, 15)),
    "neighbours": RotaryLayout((0, 2, 4, 6), (1, 3, 5, 7)),  # the last eight dimensions do not rotate
}


def called(spec: str, layout: str, dtype: str, kv_length: int) -> tuple[Problem, list[torch.Tensor]]:
    """A call of 40 queries after a cache, with what differs between the layers of one forward."""
    random, length = torch.Generator().manual_seed(0), 40
    sizes = (4, length), (2, kv_length), (2, kv_length)
    states = [torch.randn(2, *size, 16, generator=random).to(DEVICE, getattr(torch, dtype)) for size in sizes]
    query, key, value = (x.requires_grad_() for x in states)
    positions = torch.arange(kv_length, device=DEVICE).expand(2, -1)
    own = positions[:, kv_length - length :]
    inv_freq = 10000.0 ** -(torch.arange(len(LAYOUTS[layout].first), device=DEVICE) / 8)
    regions = tuple(region for region in get_scheme(spec).segments() if region.stop > 0)
    frequencies = Frequencies(inv_freq, attention_scaling=1.2)
    turner = Turner(Forward(), own, positions, regions, LAYOUTS[layout], frequencies, UNROTATED)
    problem = Problem(
        (), value, own, positions, None, True, kv_length - length, 0.3, query=query, key=key, turner=turner
    )
    return problem, [query, key]


def errors(spec: str, layout: str, dtype: str, kv_length: int) -> dict[str, float]:
    """The largest differences of branches, output and gradients from those without the kernel, and the launches."""
    launches = []
    with pytest.MonkeyPatch.context() as change:
        original = rotation_kernel.launch
        change.setattr(rotation_kernel, "LARGE", 0)
        change.setattr(rotation_kernel, "launch", lambda *a, **k: launches.append(1) or original(*a, **k))
        problem, states = called(spec, layout, dtype, kv_length)
        assert not rotation_kernel.supports(*states)
        launches.clear()  # those of the trial
        one = problem.rotated
        forward = len(launches)
        out = chunked.attend(one)[0]
        gradients = torch.autograd.grad(out.float().square().sum(), states)
        backward = len(launches) - forward
    wide, others = called(spec, layout, "float32", kv_length)
    with torch.no_grad():
        for x, other in zip((wide.value, *others), (problem.value, *states), strict=True):
            x.copy_(other)
    defined = wide.replaced(mode="oracle")
    expected = chunked.attend(defined.rotated)[0]
    wanted = torch.autograd.grad(expected.square().sum(), others)
    found = {"launches forward": forward, "launches backward": backward, "output": float((out - expected).abs().max())}
    for name, x, y in zip(("queries", "keys"), gradients, wanted, strict=True):
        found[name] = float((x - y).norm() / y.norm())
    for number, (x, y) in enumerate(zip(one.branches, defined.rotated.branches, strict=True)):
        assert (x.region, x.first, x.turn) == (y.region, y.first, None)
        found[f"branch {number}"] = max(float((a - b).abs().max()) for a, b in ((x.query, y.query), (x.key, y.key)))
    return found


@needs_triton
@pytest.mark.parametrize(
    ("spec", "layout", "dtype", "kv_length"),
    [
        ("rerope:window=16", "halves", "float32", 40),
        ("rerope:window=16", "neighbours", "float32", 100),
        ("self_extend:group_size=4,window=16", "halves", "bfloat16", 40),
        ("dca:chunk_size=16,local_window=4", "halves", "float16", 40),
        ("string:shift=8,window=8", "neighbours", "float32", 40),
    ],
)
def test_one_kernel_rotates_for_all_regions(run, spec, layout, dtype, kv_length):
    found = run(errors, spec, layout, dtype, kv_length)
    assert found.pop("launches forward") == 2  # queries, and keys
    assert found.pop("launches backward") == 2
    assert max(found.values()) < {"float32": 1e-5, "float16": 2e-2, "bfloat16": 1e-1}[dtype], found


def differentiated_twice() -> float:
    """The largest error of a second derivative."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 20, 16, generator=random).to(DEVICE).requires_grad_()
    cos, sin = torch.randn(2, 1, 1, 20, 16, generator=random).to(DEVICE)
    partner = torch.arange(16, device=DEVICE).roll(8)
    results = []
    for rotated in (rotation_kernel.rotations(x, [(cos, sin)], partner)[0], x * cos + x[..., partner] * sin):
        (gradient,) = torch.autograd.grad(rotated.pow(3).sum(), x, create_graph=True)
        results.append(torch.autograd.grad(gradient.square().sum(), x)[0])
    return float((results[0] - results[1]).abs().max() / results[1].abs().max())


@needs_triton
def test_a_second_derivative(run):
    assert run(differentiated_twice) < 1e-5


def a_gradient_of_one_region() -> float:
    """The error where only one rotation is used, so that the other has no gradient."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 20, 16, generator=random).to(DEVICE).requires_grad_()
    tables = [tuple(torch.randn(2, 1, 1, 20, 16, generator=random).to(DEVICE)) for _ in range(2)]
    partner = torch.arange(16, device=DEVICE).roll(8)
    _, used, same = rotation_kernel.rotations(x, [tables[0], tables[1], None], partner)
    assert same is x
    grad = torch.randn_like(used)
    (found,) = torch.autograd.grad(used, x, grad)
    cos, sin = tables[1]
    return float((found - (grad * cos + (grad * sin)[..., partner])).abs().max())


@needs_triton
def test_a_rotation_that_nobody_uses_adds_no_gradient(run):
    assert run(a_gradient_of_one_region) < 1e-5


def test_small_states_and_processors_take_other_ways(monkeypatch):
    query, key = torch.randn(2, 1, 4, 8, 16)
    monkeypatch.setattr(rotation_kernel, "objection", lambda *_: pytest.fail("no trial without a device"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "1,048,576" in rotation_kernel.supports(query, key)
    monkeypatch.setattr(rotation_kernel, "LARGE", 0)
    assert "for a cpu" in rotation_kernel.supports(query, key)
    monkeypatch.setattr(rotation_kernel, "compiles", lambda _: True)
    assert "float64" in rotation_kernel.supports(query.double(), key.double())
    assert "float16" in rotation_kernel.supports(query, key.half())


def test_a_problem_says_how_it_was_rotated(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(rotation_kernel, "LARGE", 0)
    problem, _ = called("rerope:window=16", "halves", "float32", 40)
    problem.rotated  # noqa: B018
    assert problem.rotation == ""  # a CPU
    problem = problem.replaced(value=Simulated(problem.value))
    assert problem.rotation == ""  # not yet
    problem.rotated  # noqa: B018
    assert problem.rotation == "region by region; not by one kernel: Triton does not compile for a cpu"
    monkeypatch.setattr(rotation_kernel, "supports", lambda *_: "")
    assert problem.rotation == "one kernel for all regions"


def test_the_oracle_and_a_learned_rotation_take_no_kernel(monkeypatch):
    monkeypatch.setattr(rotation_kernel, "supports", lambda *_: "")
    monkeypatch.setattr(rotation_kernel, "launch", lambda *_, **__: pytest.fail("a kernel rotates"))
    problem, _ = called("rerope:window=16", "halves", "float32", 40)
    problem.replaced(mode="oracle").rotated  # noqa: B018
    problem.turner.frequencies.inv_freq.requires_grad_()
    problem.rotated  # noqa: B018
