"""One token under a bias by one call of PyTorch's attention, with the bias as its mask."""

from __future__ import annotations

import collections

import pytest
import torch
from transformers import DynamicCache

from benchmarks.comparison import Shape
from benchmarks.launches import per_layer
from rope_patch import patch
from rope_patch.attention.executors import masked
from rope_patch.attention.problem import Problem
from rope_patch.attention.terms import DistanceBias
from tests.attention import problems
from tests.attention.test_every_executor import TOLERANCES, defined, error_of
from tests.executors import executors_of
from tests.families import build
from tests.precision import assert_near
from tests.runs import tokens

SPECS = ["alibi", "fox", "t5:per_layer=true", "rope+alibi", "alibi+window:window=30", "kerple", "sandwich"]


@pytest.fixture(params=[1, 64], ids=["few threads", "many threads"])
def threads(request, monkeypatch):
    """With many threads each query head is a call of its own."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)


def in_its_rotation(problem):
    """The call with the rotation of its first region done, as keys of a cache have it."""
    branch = problem.turned().branches[0]
    found = problems.whole(problem, branch.query, branch.key, problem.mode, problem.turner.regions)
    return found if branch.first == 0 else found.replaced(turner=None)


@pytest.mark.usefixtures("threads")
@torch.no_grad()
def test_random_calls_are_those_of_the_definition(monkeypatch):
    limits = {"queries": ("one",), "dtype": (torch.float32, torch.float64), "compiling": (False,), "gradient": (False,)}
    limits |= {"rows": ("full", "left pads", "both pads", "skipping"), "mask": ("none", "boolean", "of each head")}
    limits |= {"terms": ("linear", "curved", "window", "hides itself", "sums", "linear and sums")}
    limits |= {"regions": ("all pairs", "all pairs", "window", "window beyond the text")}
    monkeypatch.setattr(problems, "STRATA", [problems.ORDINARY | limits])
    count = collections.Counter()
    for drawn in map(problems.draw, range(100)):
        leaves = drawn.fresh()
        problem = in_its_rotation(drawn.problem("masked", leaves=leaves))
        if masked.supports(problem):
            continue
        out = masked.attend(problem)[0]
        assert out.isfinite().all(), drawn.drawn
        found, expected = (x.masked_fill(~drawn.kept, 0) for x in (out, defined(drawn, leaves)))
        assert error_of(found, expected) < TOLERANCES[drawn.dtype], drawn.drawn
        count.update([drawn.drawn["terms"], drawn.drawn["regions"], drawn.drawn["mask"]])
    kinds = ("linear", "curved", "hides itself", "sums", "all pairs", "boolean", "of each head")
    assert min(count[kind] for kind in kinds) > 1, count


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "phi"])
@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_tokens_are_those_of_the_definition(spec, family):
    logits = []
    for attention in ("auto", "oracle"):
        model = build(family)
        patch(model, spec, attention=attention)
        cache, text = DynamicCache(config=model.config), torch.cat([tokens(80, seed=seed) for seed in (1, 2)])
        mask = torch.ones_like(text)
        mask[1, :15] = 0
        model(text[:, :76], attention_mask=mask[:, :76], past_key_values=cache)
        with executors_of(model) as taken:
            for at in range(76, 80):
                given = {"attention_mask": mask[:, : at + 1], "past_key_values": cache}
                logits.append(model(text[:, at : at + 1], **given).logits)
        assert attention == "oracle" or set(taken) == {"masked"}
    assert_near(torch.cat(logits[:4]).flatten(), torch.cat(logits[4:]).flatten(), 1e-5)


@pytest.mark.usefixtures("threads")
@torch.no_grad()
def test_a_query_from_which_a_bias_hides_every_key_gets_zeros():
    positions, numbers = torch.arange(6)[None], torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 6, 8, generator=numbers) for heads in (4, 2, 2))
    hides = DistanceBias(lambda distance: torch.full((4, *distance.shape), -torch.inf))
    mask = (positions > 1)[:, None, None]  # hides other keys, by a finite number
    call = Problem((), value, positions[:, 5:], positions, mask, False, 5, 0.5, hides)
    problem = problems.whole(call, query[:, :, 5:], key)
    assert masked.supports(problem) == ""
    assert not masked.attend(problem)[0].any()


@pytest.mark.parametrize("spec", ["alibi", "rope+alibi"])
def test_a_layer_adds_no_kernel_to_plain_attention(spec):
    assert per_layer(Shape(128, 4, 2, 16), spec)[0] <= 0


@pytest.mark.parametrize(
    ("spec", "given", "reason"),
    [
        ("rerope:window=20", {}, "no bias"),
        ("rerope:window=20+alibi", {}, "a single region"),
        ("dynamic_ntk:factor=2+alibi", {}, "rotation of the region"),
        ("alibi", {"compiling": True}, "a compiler traces"),
        ("alibi", {"softcap": 3.0}, "a softcap"),
    ],
)
@torch.no_grad()
def test_what_it_refuses(spec, given, reason):
    model, calls = build("llama"), []
    for state in patch(model, spec).layer_states:
        state.watch = lambda name, problem: calls.append(problem)
    cache = model(tokens(70), use_cache=True).past_key_values
    calls.clear()
    model(tokens(1), past_key_values=cache)
    assert reason in masked.supports(calls[0].replaced(**given))
