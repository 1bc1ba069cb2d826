"""A decoded token in half precision by one call of flash: what it costs, and that it is the definition. The flash here
runs on a CPU, which these tests take for a GPU.
"""

from __future__ import annotations

import collections

import pytest
import torch
from transformers import DynamicCache

from benchmarks.comparison import Shape
from benchmarks.launches import operators, per_layer
from rope_patch import patch
from rope_patch.attention import kernels
from rope_patch.attention.executors import one_call
from rope_patch.attention.pieces import few_queries
from rope_patch.attention.problem import Problem
from rope_patch.attention.rotation import EVERY
from tests.attention import problems
from tests.attention.test_every_executor import TOLERANCES, defined, error_of
from tests.attention.test_flash_implementations import Flash
from tests.families import build
from tests.precision import TOLERANCES as OF_MODELS
from tests.precision import assert_near
from tests.runs import cached_logits, left_padded, tokens
from tests.simulated_device import Simulated, SimulatedDevice, moved, values

LENGTH = 90
SPECS = [
    "rerope:window=20",
    "leaky_rerope:window=20,factor=4",
    "self_extend:group_size=4,window=20",
    "dca:chunk_size=32,local_window=8",
    "string:shift=40,window=12",
    "yarn:factor=4+rerope:window=20",
    "alibi",
    "alibi+window:window=20",
    "dca:chunk_size=32,local_window=8+alibi",
]
BUDGETS = {  # kernels beyond those of plain attention, and operators with views, of which torch 2.11 counts one more
    "rerope": (4, 11),
    "leaky_rerope": (4, 11),
    "self_extend": (4, 11),
    "dca": (4, 13),
    "alibi": (4, 7),
    "logn": (1, 1),
}


@pytest.fixture(autouse=True)
def made(monkeypatch):
    """One entry for each plan of one call, with the keys that it scores apart."""
    flash, make, found, trial = Flash(windows=True).register(), one_call._made, [], one_call.trial

    def noted(*given, **named):
        found.append(make(*given, **named))
        return found[-1]

    monkeypatch.setattr(Problem, "on_gpu", True)
    monkeypatch.setattr(one_call, "has_flash", lambda like, head_dim: True)
    monkeypatch.setattr(one_call, "_made", noted)
    yield found
    flash.remove()
    for each in (trial, kernels.objection):  # both may have tried the flash of these tests on a simulated device
        each.forget()


def apart(monkeypatch):
    """From now on the oldest keys of a call are too many to be copied."""
    bytes_of = one_call._bytes
    monkeypatch.setattr(one_call, "MOST", 2**40)
    monkeypatch.setattr(
        one_call, "_bytes", lambda problem, pieces: bytes_of(problem, pieces) + 2**50 * (pieces[0].keys.start == 0)
    )


def decoded(model, lengths=(LENGTH,)):
    batch, mask = left_padded([tokens(length, seed=length) for length in lengths])
    return cached_logits(model, batch, [max(lengths) - 4, 1, 1, 1, 1], mask if len(set(lengths)) > 1 else None)[:, -4:]


@torch.no_grad()
def compared(spec, dtype, made, lengths=(LENGTH,), family="llama"):
    """Decode under the fast path and under the definition."""

    def patched(attention):
        model = build(family).to(getattr(torch, dtype))
        patch(model, spec, attention=attention)
        return model

    made.clear()
    found = decoded(patched("auto"), lengths)
    number = len(made)
    defined = decoded(patched("oracle"), lengths)
    assert_near(found, defined, OF_MODELS[dtype], lambda: decoded(patched("oracle").double(), lengths))
    return number


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("spec", SPECS)
def test_tokens_are_those_of_the_definition(spec, dtype, made):
    assert compared(spec, dtype, made)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("spec", ["rerope:window=20", "self_extend:group_size=4,window=20", "alibi"])
def test_rows_with_pads_are_those_of_the_definition(spec, dtype, made):
    assert compared(spec, dtype, made, lengths=(LENGTH, LENGTH - 17))


@pytest.mark.parametrize("family", ["phi", "cohere", "glm"])
@pytest.mark.parametrize("spec", ["rerope:window=20", "dca:chunk_size=32,local_window=8"])
def test_every_layout_of_pairs_turns(spec, family, made):
    assert compared(spec, "bfloat16", made, family=family)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("spec", SPECS[:5])
def test_keys_that_are_too_many_to_be_copied_are_scored_apart(spec, dtype, made, monkeypatch):
    apart(monkeypatch)
    assert compared(spec, dtype, made)
    assert any(plan.apart for plan in made)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_random_calls_are_those_of_the_definition(dtype, monkeypatch):
    limits = {"queries": ("one",), "value_width": ("as keys",), "dtype": (dtype,), "compiling": (False,)}
    limits |= {"gradient": (False,), "terms": ("none", "none", "linear", "curved", "window", "hides itself")}
    limits |= {"rows": ("full", "full", "left pads", "both pads", "skipping"), "mask": ("none", "none", "boolean")}
    monkeypatch.setattr(problems, "STRATA", [problems.ORDINARY | limits])
    count = collections.Counter()
    for drawn in map(problems.draw, range(120)):
        leaves = drawn.fresh()
        problem = drawn.problem("one_call", leaves=leaves)
        if one_call.supports(problem):
            continue
        out = one_call.attend(problem)[0]
        assert out.isfinite().all(), drawn.drawn
        found, expected = (x.masked_fill(~drawn.kept, 0) for x in (out, defined(drawn, leaves)))
        assert error_of(found, expected) < TOLERANCES[dtype], drawn.drawn
        count.update(["terms" if problem.plan.values is not None else "products", drawn.drawn["regions"]])
    assert min(count[kind] for kind in ("terms", "products", "near and far", "grouped", "chunks", "window")) > 2, count


@pytest.mark.parametrize("scheme", BUDGETS)
def test_a_layer_adds_few_kernels_to_plain_attention(scheme, made):
    shape = Shape(256, 4, 2, 32, "bfloat16")
    found = tuple(count(shape, scheme)[0] for count in (per_layer, operators))
    assert all(number <= most for number, most in zip(found, BUDGETS[scheme], strict=True)), found
    assert made or scheme == "logn"


@pytest.mark.parametrize("spec", ["rerope:window=20", "dca:chunk_size=32,local_window=8", "alibi"])
@torch.no_grad()
def test_a_token_on_a_device_neither_waits_nor_copies(spec, made):
    def steps(model, move, device=None):
        cache, logits = DynamicCache(config=model.config), []
        for step, length in enumerate((LENGTH, 1, 1)):
            if device is not None:
                device.clear()
            logits.append(model(move(tokens(length, seed=step)), past_key_values=cache, use_cache=True).logits)
        return torch.cat([values(x)[:, -1:] for x in logits], dim=1)

    model = build("llama", num_hidden_layers=2).to(torch.bfloat16)
    patch(model, spec)
    expected = steps(model, lambda x: x)
    made.clear()
    with SimulatedDevice() as device:
        found = steps(moved(model), Simulated, device)
    assert len(made) >= 2
    assert not [place for place in (*device.synchronisations, *device.copies) if " at rope_patch/" in place]
    assert_near(found, expected, OF_MODELS["bfloat16"])


@pytest.mark.parametrize(("dtype", "digits"), [(torch.bfloat16, 22), (torch.float16, 22)])
@pytest.mark.parametrize("terms", [1, 4])
def test_a_term_keeps_its_digits_as_dimensions(terms, dtype, digits):
    term = -torch.logspace(-3, 6, 500).expand(2, terms, 500) * torch.linspace(0.3, 1, terms)[:, None]
    term[:, :, 7] = torch.finfo(torch.float32).min
    keys = torch.zeros(2, 500, 16, dtype=dtype)
    one_call._write(term, keys)
    queries = one_call._selectors(4, terms, 16, dtype, term.device)
    found = queries.float() @ keys.float().mT
    assert keys.isfinite().all()
    assert (found[..., 7] < -1e7).all()
    found[..., 7], expected = 0, term.expand(2, 4, 500).clone()
    expected[..., 7] = 0
    assert ((found - expected).abs() <= 2.0**-digits * expected.abs() + 1e-9).all()


def test_a_device_on_which_it_differs_takes_other_kernels(made, monkeypatch):
    monkeypatch.setattr(one_call, "trial", lambda *case: "it differed")
    assert compared("rerope:window=20", "bfloat16", made) == 0


def test_flash_scores_only_widths_that_it_has():
    like = Simulated(torch.empty(1, dtype=torch.bfloat16))
    assert not kernels.has_flash(like, 12)
    assert not kernels.has_flash(like, 264)
    assert not kernels.has_flash(torch.empty(1, dtype=torch.bfloat16), 16)
    with SimulatedDevice():
        assert kernels.has_flash(like, 16)


def test_a_gap_between_slots_is_left_to_other_plans(made):
    assert compared("lm_infinite:local_window=20,n_global=3", "bfloat16", made) == 0
    regions = patch(build("llama"), "lm_infinite:local_window=20,n_global=3").scheme.segments()
    assert len(list(few_queries(regions, EVERY, 1, 60, 60))) == 2
