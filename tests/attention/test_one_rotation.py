"""One query of a compiled model by one call of SDPA: what it refuses, what it costs, and that it compiles."""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import StaticCache

from benchmarks.models import preferring
from rope_patch import patch
from rope_patch.attention import engine
from rope_patch.attention.executors import one_rotation
from rope_patch.attention.table import choose
from rope_patch.patching import find_handle
from tests.families import build

CACHE = 40


def steps(model, tokens=3, call=None):
    """Logits of a prompt of 20 tokens in the first row and 14 behind left pads in the second, and of further tokens."""
    ids = torch.randint(3, 60, (2, 20 + tokens), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    cache = StaticCache(config=model.config, max_cache_len=CACHE)
    found = []
    with torch.no_grad():
        for start, stop in [(0, 20), *((20 + i, 21 + i) for i in range(tokens))]:
            step = model if start == 0 or call is None else call
            out = step(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache)
            found.append(out.logits[:, -1])
    return torch.stack(found)


def problem_of(spec, dtype=torch.float32):
    """The call of a layer for one token, as a compiled model would make it."""
    model, told = build("llama").to(dtype), []
    patch(model, spec)
    ids = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        for state in find_handle(model).layer_states:
            state.watch = lambda name, problem: told.append(problem)
        model(ids[:, -1:], past_key_values=cache)
    return dataclasses.replace(told[0], compiling=True)


@pytest.mark.parametrize(
    "spec",
    ["rerope:window=6", "self_extend:group_size=3,window=6", "dca:chunk_size=9,local_window=2", "alibi", "rope+logn"],
)
def test_a_compiled_model_takes_it_where_it_is_preferred(spec, monkeypatch):
    model = build("llama")
    if spec != "rope+logn":
        patch(model, spec)
    expected = steps(model)
    asked = []
    attend = one_rotation.EXECUTOR.attend
    rows = tuple(
        dataclasses.replace(
            row, executor=dataclasses.replace(row.executor, attend=lambda problem: asked.append(1) or attend(problem))
        )
        if row.executor is one_rotation.EXECUTOR
        else row
        for row in engine.ROWS
    )
    monkeypatch.setattr(engine, "ROWS", preferring("one_rotation", rows))
    torch._dynamo.reset()
    found = steps(model, call=torch.compile(model, backend="eager", fullgraph=True))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    assert bool(asked) == (spec != "rope+logn")


def test_it_is_one_call_of_attention_and_two_rotations():
    problem = problem_of("rerope:window=6")
    calls = []

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Recorded():
        one_rotation.attend(problem)
    assert sum("attention" in name for name in calls) == 1
    assert not [name for name in calls if name in ("mm", "bmm", "softmax", "_softmax", "index")]


@pytest.mark.parametrize(
    ("spec", "executor"),
    [
        ("rerope:window=6", "one_rotation"),
        ("dca:chunk_size=9,local_window=2", "one_rotation"),
        ("ms_poe:min_factor=1,max_factor=2", "traced"),
    ],
)
def test_a_gpu_prefers_it(spec, executor):
    problem = problem_of(spec)
    assert choose(engine.TABLE["cuda"], problem).name == executor
    assert choose(engine.TABLE["cuda"], problem.replaced(mode="segmented")).name == "traced"


def test_what_it_refuses():
    assert not one_rotation.supports(problem_of("rerope:window=6"))
    assert not one_rotation.supports(problem_of("alibi"))
    assert "round the bias" in one_rotation.supports(problem_of("alibi", torch.bfloat16))
    assert not one_rotation.supports(problem_of("rerope:window=6", torch.bfloat16))
    problem = problem_of("rerope:window=6")
    assert "not compiled" in one_rotation.supports(problem.replaced(compiling=False))
    assert "frequencies of their own" in one_rotation.supports(problem_of("ms_poe:min_factor=1,max_factor=2"))
    assert "decay" in one_rotation.supports(problem_of("xpos"))


@pytest.mark.parametrize("spec", ["rerope:window=6", "alibi"])
def test_a_query_that_sees_nothing_gets_zeros(spec):
    problem = problem_of(spec)
    mask = torch.zeros(2, 1, 1, problem.kv_length, dtype=torch.bool)
    mask[0] = True
    with torch.no_grad():
        out = one_rotation.attend(problem.replaced(mask=mask, groups=None))[0]
    assert out[0].abs().max() > 0
    assert torch.equal(out[1], torch.zeros_like(out[1]))
