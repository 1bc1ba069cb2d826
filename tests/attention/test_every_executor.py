"""Every executor of the table on random calls, forward and gradient, against the definition in float64.

A new executor is tested by standing in the table. What it does not compute it refuses with a reason, and the least
number of calls that it must compute keeps it from refusing all.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import get_args

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rope_patch import UnsupportedModel, UnsupportedPositions
from rope_patch.attention import decay, engine
from rope_patch.attention.problem import AttentionMode
from rope_patch.attention.table import choose
from tests.attention.problems import AXES, WITH_DECAY, bias_of, draw, values_of

EXECUTORS = {row.executor.name: row.executor for rows in (engine.ROWS, *engine.TABLE.values()) for row in rows}.values()
SEEDS = range(WITH_DECAY + 20)
LEAST = 8  # calls that each executor computes
FORCED = get_args(AttentionMode)

INSIDE = {"graph", "decayed"}
"""Executors that ask the table again, under the same name."""

ELSEWHERE = {"fused", "intervals", "one_call", "products", "masked"}
"""Executors that need a GPU, instructions that not every processor has, or states in the rotation of their region."""

TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}
"""Largest error relative to the norm; a bias by distance is computed in float32."""

OF_SUMS = 10
"""How much larger it may be for a gradient that sums terms of all pairs, which cancel: that of slopes."""


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch):
    """Blocks between which scores decay: some calls are one block, and some have several."""
    monkeypatch.setattr(decay, "ROWS", 20)


def turned(x, positions, inv_freq):
    """R(positions) x in float64 as complex numbers: dimension i pairs with i + d/2. Angles are products in float32, as
    those of Transformers.
    """
    half = len(inv_freq)
    angles = (positions.float()[..., None] * inv_freq.float()).double()
    angles = angles[:, None] if positions.ndim == 2 else angles
    return torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)


def defined(drawn, leaves):
    """Output of the definition in float64, `(batch, heads, q_len, value_dim)`, of one pair after another."""
    repeats, rate = drawn.heads_per_key, drawn.rate
    q, k, v, sums = (leaves[name].double() for name in ("queries", "keys", "values", "sums"))
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    n = drawn.n if drawn.n.ndim == 2 else drawn.n.repeat_interleave(repeats, dim=1)
    i, j = (drawn.m[:, None, :, None], (n[:, None] if n.ndim == 2 else n)[:, :, None])
    heads, q_length, length = q.shape[1], q.shape[2], k.shape[2]

    scores, inside = q.new_zeros(2, heads, q_length, length), torch.zeros(2, 1, q_length, length, dtype=torch.bool)
    for region in drawn.regions:
        of_queries, of_keys = region.query_map(drawn.m), region.key_map(n)
        queries, keys = turned(q, of_queries, drawn.inv_freq), turned(k, of_keys, drawn.inv_freq)
        if rate is None:
            products = (queries @ keys.conj().mT).real
        else:
            faded = torch.exp(-rate.double() * (of_queries[:, :, None, None] - of_keys[:, None, :, None]).double())
            # pairs that are hidden may not overflow
            products = torch.einsum("bhmi,bhni,bmni->bhmn", queries, keys.conj(), faded.clamp(max=1).to(keys)).real
        blocks = (i / region.chunk).floor() - (j / region.chunk).floor()
        here = (blocks >= region.start) & (blocks < region.stop) & (j < region.keys_below)
        scores, inside = torch.where(here, products, scores), inside | here
    scores = scores * drawn.scaling
    if drawn.softcap is not None:
        scores = drawn.softcap * (scores / drawn.softcap).tanh()
    bias = bias_of(drawn.terms, leaves["slopes"].double())
    if bias is not None:
        distance = (i - j).expand(2, heads, q_length, length)
        of_head = [bias(distance[:, head])[head] for head in range(heads)]
        scores = scores + torch.stack(of_head, dim=1)
    if "sums" in drawn.terms:
        scores = scores + sums[..., drawn.start :, None] - sums[..., None, :]

    slots = torch.arange(length)
    if drawn.mask is None:
        own = drawn.groups[:, None, drawn.start :, None]
        seen = (drawn.groups[:, None, None] == own) & (drawn.groups[:, None, None] >= 0)
        seen = seen & (slots <= slots[drawn.start :, None]) if drawn.causal else seen
    elif drawn.mask.dtype == torch.bool:
        seen = drawn.mask
    else:
        seen = drawn.mask > torch.finfo(drawn.mask.dtype).min
        scores = scores + drawn.mask.double().masked_fill(~seen, 0)
    scores = scores.masked_fill(~(seen & inside), -math.inf)
    if drawn.scores == "sinks":
        sinks = leaves["sinks"].double().view(1, -1, 1, 1).expand(2, -1, q_length, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    sees = (scores > -math.inf).any(dim=-1, keepdim=True)
    weights = scores.masked_fill(~sees, 0).softmax(dim=-1)[..., :length] * sees
    return weights @ v


def with_gradients(drawn, leaves, out):
    """Output of the tokens, and the gradients of all leaves, or nothing where none are wanted."""
    assert out.isfinite().all()  # also those of pads
    out = out.masked_fill(~drawn.kept, 0)
    if not drawn.gradient:
        return [out]
    along = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    gradients = torch.autograd.grad(out, list(leaves.values()), along, allow_unused=True, materialize_grads=True)
    return [out.detach(), *gradients]


def asked(drawn, executor, **given):
    """The call under the executor's name; under `auto` if nobody can ask for it by name."""
    return drawn.problem(executor.name if executor.name in FORCED else "auto", **given)


def taken(executor, problem):
    """What the table takes for a call under the executor's name; None if it refuses the call, with the reason."""
    reason, refusal = executor.supports(problem), ""
    if executor.name not in FORCED:  # under `auto` others may come before it
        return None if reason else executor
    try:
        found = choose(engine.rows_for(problem), problem)
    except UnsupportedModel as error:
        found, refusal = None, str(error)
    if found is None:
        assert reason, f"{executor.name} computes the call, but: {refusal}"
        assert f"{executor.name}: {reason}" in refusal
    else:
        assert reason or found is executor or found.name in INSIDE, found.name
    return found


def computed(drawn, executor, leaves):
    """Name of the executor that was taken under its name, and its results; None if the call is refused."""
    with torch.set_grad_enabled(drawn.gradient):
        problem = asked(drawn, executor, leaves=leaves)
        found = taken(executor, problem)
        if found is None:
            return None
        try:
            return found.name, with_gradients(drawn, leaves, found.attend(problem)[0])
        except (UnsupportedModel, UnsupportedPositions) as error:
            refusal = error
    if isinstance(refusal, UnsupportedModel):  # of the table that it asks again inside
        assert found is not executor, refusal
        assert f"attention={executor.name!r} cannot compute this call: " in str(refusal)
    else:  # of values that only a running graph knows
        assert drawn.compiling, refusal
        assert drawn.scattered or drawn.rows == "skipping", refusal
    return None


def error_of(one, other):
    """The norm of the difference relative to that of the second."""
    return float((one.double() - other).norm() / other.norm().clamp(min=1e-6))


@pytest.mark.parametrize("seed", SEEDS)
def test_output_and_gradients_are_those_of_the_definition(seed):
    drawn = draw(seed)
    leaves = {name: leaf.double().clone().requires_grad_(drawn.gradient) for name, leaf in drawn.leaves.items()}
    expected = with_gradients(drawn, leaves, defined(drawn, leaves))
    for executor in EXECUTORS:
        leaves = drawn.fresh()
        if (found := computed(drawn, executor, leaves)) is None:
            continue
        name, results = found
        what = f"{name} for {executor.name}, {drawn.drawn}"
        assert results[0].dtype == drawn.dtype, what
        for part, one, other in zip(("output", *leaves), results, expected, strict=False):
            largest = TOLERANCES[drawn.dtype] * (OF_SUMS if part == "slopes" else 1)
            assert (error := error_of(one, other)) < largest, f"{part}: {error:.1e}, {what}"
            if part == "sums" and "sums" in drawn.terms:  # in any dtype: a number that is added to all changes nothing
                assert one.sum(dim=-1).abs().max() < 1e-6 * one.abs().sum(dim=-1).max(), what


@pytest.mark.parametrize("seed", SEEDS[::3])
def test_a_row_does_not_depend_on_another(seed):
    drawn = draw(seed)
    drawn = dataclasses.replace(drawn, drawn=drawn.drawn | {"gradient": False})
    large = torch.Generator().manual_seed(seed)

    def spoilt_row(name, leaf):
        if name in ("slopes", "sinks"):
            return leaf
        random = 300 * torch.randn(leaf.shape[1:], generator=large)
        row = -random.abs().double().cumsum(-1) if name == "sums" else random.to(leaf.dtype)
        return torch.stack([leaf[0], row])

    leaves = {name: spoilt_row(name, leaf) for name, leaf in drawn.leaves.items()}
    spoilt = dataclasses.replace(drawn, leaves=leaves)
    for executor in EXECUTORS:
        found, other = (computed(each, executor, each.fresh()) for each in (drawn, spoilt))
        assert (found is None) == (other is None), executor.name
        if found is not None:
            one, two = (results[0][0] for _, results in (found, other))
            eps = torch.finfo(drawn.dtype).eps
            torch.testing.assert_close(two, one, atol=8 * eps, rtol=8 * eps, msg=f"{found[0]}, {drawn.drawn}")


READING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.nonzero.default,
}
"""Operators whose result the host waits for."""


class Reads(TorchDispatchMode):
    """Counts what the host reads off tensors, and what of it depends on some `states`."""

    def __init__(self, states):
        super().__init__()
        self._states = {id(state): state for state in states}  # kept, so that no other tensor takes over its number
        self.of_all, self.of_states = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        follows = any(id(x) in self._states for x in tensors)
        self.of_all += func in READING
        self.of_states += func in READING and follows
        result = func(*args, **kwargs)
        if follows:
            self._states |= {id(x): x for x in tree_leaves(result) if isinstance(x, torch.Tensor)}
        return result


@pytest.mark.parametrize("seed", SEEDS[::2])
def test_supports_reads_no_state_and_reads_masks_and_positions_once_a_forward(seed):
    """On a GPU the host would wait for every value that it reads. Layers of one forward share what they read."""
    drawn = draw(seed)
    for executor in EXECUTORS:
        first = asked(drawn, executor)
        for layer in (first, asked(drawn, executor, earlier=first)):
            states = [layer.value, layer.running_bias, layer.query, layer.key]
            with torch.set_grad_enabled(drawn.gradient), Reads(states) as reads:
                executor.supports(layer)
            assert reads.of_states == 0, executor.name
            assert layer is first or reads.of_all == 0, executor.name


def test_reads_are_counted_at_all():
    state, mask = torch.ones(3), torch.ones(3)
    with Reads([state]) as reads:
        assert bool((mask > 0).all())
        assert (reads.of_all, reads.of_states) == (1, 0)
        assert float((2 * state).sum()) == 6
    assert (reads.of_all, reads.of_states) == (2, 1)


def test_every_value_of_every_axis_is_drawn():
    drawn = [values_of(seed) for seed in SEEDS]
    for axis, values in AXES.items():
        assert {each[axis] for each in drawn} == set(values), axis


def test_no_executor_passes_by_refusing_everything():
    count = collections.Counter()
    for drawn in map(draw, SEEDS):
        with torch.set_grad_enabled(drawn.gradient):
            count.update(each.name for each in EXECUTORS if taken(each, asked(drawn, each)) is each)
    assert not {each.name for each in EXECUTORS if count[each.name] < LEAST} - ELSEWHERE, count
