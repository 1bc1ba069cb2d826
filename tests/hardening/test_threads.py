"""Several threads, each with a model of its own: what one does, another does not notice."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch

from rope_patch import patch, unpatch
from tests.cases import CASES
from tests.families import build
from tests.hardening.scale import cases
from tests.runs import generated, gradients, logits, tokens

PAIRS = [
    ("rerope:window=6", "yarn:factor=4+alibi"),
    (CASES["shaw"], CASES["leaky_rerope"]),
    (CASES["rnn"], CASES["dynamic_ntk"]),
    (CASES["self_extend"], CASES["self_extend"]),
]


@pytest.fixture(autouse=True)
def _hurried():
    """Threads take turns as often as they can, as they do on a busy machine sooner or later."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(*actions: Callable[[], Any]) -> list[Any]:
    """What actions return that start in the same moment, a thread each; what one of them raises is raised."""
    start = Barrier(len(actions))

    def run(action: Callable[[], Any]) -> Any:
        start.wait()
        return action()

    with ThreadPoolExecutor(len(actions)) as pool:
        return [future.result() for future in [pool.submit(run, action) for action in actions]]


def used(spec: str, model=None) -> list[torch.Tensor]:
    """What a patched model computes, generates and learns."""
    model = build() if model is None else model
    with patch(model, spec):
        said = [logits(model, tokens(rows=2)), generated(model, tokens(12), 4)]
        return [*said, *gradients(model, tokens(24)).values()]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_two_models_under_two_schemes(pair, count):
    expected = [used(spec) for spec in pair]
    rounds = cases(usual=3, hard=20)
    for _ in range(rounds):
        for found, alone in zip(together(*(lambda spec=spec: used(spec) for spec in pair)), expected, strict=True):
            assert_equal(found, alone)
    count("rounds of threads", rounds)


@pytest.mark.parametrize("spec", ["rerope:window=6", "yarn:factor=4+alibi", CASES["shaw"]])
def test_a_model_is_used_while_another_is_patched_and_restored(spec, count):
    one, other, rounds = build(), build(), cases(usual=10, hard=60)
    plain = logits(other, tokens())
    with patch(build(), "rerope:window=9") as alone:
        patched = logits(alone.model, tokens())
    with patch(one, spec):
        expected = logits(one, tokens())

        def keep_using():
            return [logits(one, tokens()) for _ in range(2 * rounds)]

        def keep_patching():
            said = []
            for _ in range(rounds):
                patch(other, "rerope:window=9")
                said.append(logits(other, tokens()))
                unpatch(other)
            return said

        ours, theirs = together(keep_using, keep_patching)
    assert_equal(ours, [expected] * len(ours))
    assert_equal(theirs, [patched] * len(theirs))
    assert torch.equal(logits(other, tokens()), plain)
    count("rounds of threads", rounds)


def test_threads_that_only_patch_and_restore(count):
    models, rounds = [build() for _ in range(4)], cases(usual=5, hard=40)
    plain = logits(build(), tokens())

    def keep_patching(model):
        for _ in range(rounds):
            with patch(model, "rerope:window=9"):
                logits(model, tokens(8))

    together(*(lambda model=model: keep_patching(model) for model in models))
    for model in models:
        assert torch.equal(logits(model, tokens()), plain)
    count("rounds of threads", rounds)


@pytest.mark.parametrize(
    "spec",
    ["yarn:factor=4", "rerope:window=6", "leaky_rerope:window=6,factor=4", "alibi", CASES["shaw"], "rnn:width=16"],
)
def test_one_model_is_read_by_several_threads(spec, count):
    model, rounds = build(), cases(usual=10, hard=60)
    texts = [tokens(length, rows=2, seed=length) for length in (17, 40, 33)]
    with patch(model, spec):
        expected = [logits(model, text) for text in texts]

        def keep_reading(text):
            return [logits(model, text) for _ in range(rounds)]

        found = together(*(lambda text=text: keep_reading(text) for text in texts))
    for ours, alone in zip(found, expected, strict=True):
        assert_equal(ours, [alone] * rounds)
    count("rounds of threads", rounds)
