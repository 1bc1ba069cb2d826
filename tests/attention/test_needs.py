"""`Needs` reads each property of a call, gives its own reason for each, and asks the further objection last."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rope_patch.attention.decay import Decay
from rope_patch.attention.executors import block, chunked, graph, joined, merged, one_rotation, reference, traced
from rope_patch.attention.forward import Forward
from rope_patch.attention.problem import Problem
from rope_patch.attention.table import REASONS, Needs
from rope_patch.attention.terms import Content, DistanceBias
from rope_patch.attention.turner import Turner
from rope_patch.schemes.slots import ALL_PAIRS
from rope_patch.schemes.tools.rotary import half_split


def problem_of(queries=1, keys=6, dtype=torch.float32, learns=False, **changed):
    """A call of some queries behind the keys of a cache, without rotations."""
    positions = torch.arange(keys)[None]
    query = torch.zeros(1, 4, queries, 8, dtype=dtype, requires_grad=learns)
    key, value = torch.zeros(1, 2, keys, 8, dtype=dtype), torch.zeros(1, 2, keys, 8, dtype=dtype)
    start = keys - queries
    turner = Turner(Forward(), positions[:, start:], positions, (ALL_PAIRS,))
    call = Problem((), value, positions[:, start:], positions, None, queries > 1, start, 0.5)
    return call.replaced(**{"query": query, "key": key, "turner": turner, **changed})


BIAS = DistanceBias(lambda distance: -distance.float()[None], linear=True)
HOLDS = {
    "compiling": {"compiling": True},
    "one_query": {},
    "behind_cache": {"queries": 3},
    "is_rotated": {"turner": None},
    "half": {"dtype": torch.bfloat16},
    "fits_kernels": {"bias": BIAS},
    "biased": {"running_bias": torch.zeros(1, 4, 6)},
    "decays": {"decay": Decay(half_split(8), torch.ones(4))},
    "scattered": {"scattered": True},
    "mask_is_added": {"mask": torch.zeros(1, 1, 1, 6)},
    "by_head": {"key_positions": torch.arange(6).expand(1, 2, -1)},
    "differentiable": {"learns": True},
}
FAILS = {
    "compiling": [{}],
    "one_query": [{"queries": 2}],
    "behind_cache": [{"queries": 6}, {"queries": 3, "causal": False}],
    "is_rotated": [{}],
    "half": [{}, {"dtype": torch.float64}],
    "fits_kernels": [
        {"softcap": 1.0},
        {"sinks": torch.zeros(4)},
        {"dropout": 0.1},
        {"content": Content(None, {}, None, None, None)},
    ],
    "biased": [{}],
    "decays": [{}],
    "scattered": [{}],
    "mask_is_added": [{}, {"mask": torch.ones(1, 1, 1, 6, dtype=torch.bool)}],
    "by_head": [{}],
    "differentiable": [{}],
}


def test_each_field_has_reasons_and_a_case():
    fields = {field.name for field in dataclasses.fields(Needs)} - {"further", "_asked"}
    assert fields == {*REASONS} == {*HOLDS, "on_gpu"} == {*FAILS, "on_gpu"}


@pytest.mark.parametrize("name", HOLDS)
def test_a_property_is_read_as_its_field_says(name):
    assert getattr(problem_of(**HOLDS[name]), name)
    assert not any(getattr(problem_of(**given), name) for given in FAILS[name])
    required, refused = Needs(**{name: True}), Needs(**{name: False})
    assert required(problem_of(**HOLDS[name])) == ""
    assert {required(problem_of(**given)) for given in FAILS[name]} == {REASONS[name][0]}
    assert refused(problem_of(**HOLDS[name])) == REASONS[name][1]
    assert {refused(problem_of(**given)) for given in FAILS[name]} == {""}


def test_states_on_a_cpu_are_not_on_a_gpu():
    assert Needs(on_gpu=True)(problem_of()) == "the states are not on a GPU"


def test_no_gradient_is_wanted_where_none_is_kept():
    with torch.no_grad():
        assert Needs(differentiable=False)(problem_of(learns=True)) == ""
    call = problem_of()
    turned = call.rotated.replaced(value=call.value.clone().requires_grad_())
    assert Needs(differentiable=False)(turned) == "gradients are wanted"  # of rotated states too


def test_every_property_has_reasons():
    """A reason that were empty would let every call pass."""
    reasons = [reason for both in REASONS.values() for reason in both]
    assert all(reasons)
    assert len({*reasons}) == len(reasons)


def test_what_is_further_asked_is_asked_last():
    asked = []

    def further(problem):
        asked.append(problem)
        return "no"

    supports = Needs(one_query=True, decays=False, further=further)
    assert supports(problem_of(queries=2)) == "there are several queries"
    assert not asked
    assert supports(problem_of()) == "no"
    assert len(asked) == 1


def test_what_the_executors_declare():
    """The calls that distinguish the executors for a CPU."""
    kinds = {
        "a prompt": problem_of(queries=6),
        "a token": problem_of(),
        "a compiled token": problem_of(compiling=True),
        "rotated": problem_of().rotated.replaced(turner=None, query=None, key=None),
    }
    taken = {
        name: [kind for kind, call in kinds.items() if not executor.supports(call)]
        for name, executor in (
            ("joined", joined),
            ("traced", traced),
            ("one_rotation", one_rotation),
            ("graph", graph),
            ("block", block),
            ("chunked", chunked),
            ("reference", reference),
            ("merged", merged),
        )
    }
    assert taken == {
        "joined": ["a token"],
        "traced": ["a compiled token"],
        "one_rotation": ["a compiled token"],
        "graph": ["a compiled token"],
        "block": [],
        "chunked": [*kinds],
        "reference": [*kinds],
        "merged": ["a prompt", "a token", "rotated"],
    }
