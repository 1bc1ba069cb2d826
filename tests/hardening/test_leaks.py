"""After a thousand times of patching and restoring nothing is left, neither on the model nor in memory."""

from __future__ import annotations

import gc
import itertools
import tracemalloc
import weakref
from collections import Counter

import psutil
import pytest
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rope_patch import get_scheme, naming, patch, unpatch
from rope_patch.mounting.registration import _users
from tests.cases import CASES
from tests.families import build
from tests.hardening.scale import cases, parts
from tests.models import absolute_families, t5_families
from tests.runs import gradients, logits, tokens
from tests.snapshots import snapshot

IN_TURN = [
    *(CASES[name] for name in ("yarn", "rerope", "logn", "alibi", "dynamic_ntk", "shaw", "t5", "learned", "rnn")),
    "floater:width=8,blocks=true",
    "yarn:factor=4+rerope:window=6",
]
"""Every kind of mount: tables, attention, learned parameters of a layer and of the stack, the input and every block."""

WARM = 2 * len(IN_TURN)
"""Cycles after which what is made once has been made."""


def t5_logits(model):
    with torch.no_grad():
        return model(input_ids=tokens(20), decoder_input_ids=tokens(12, seed=1), use_cache=False).logits


KINDS = {
    "llama": (build, IN_TURN, lambda model: logits(model, tokens())),
    "t5": (t5_families.build, ["t5:interpolation=2", "rerope:window=6", "shaw", "learned:num_positions=60"], t5_logits),
    "bert": (
        lambda: absolute_families.build("bert"),
        ["hierarchical", "learned:extend=20", "sinusoidal:num_positions=21"],
        lambda model: absolute_families.outputs(model, absolute_families.tokens(8)),
    ),
}
"""By name: how a model is made, the schemes that it is put under in turn, and its output."""

CYCLES = [
    (kind, part, number)
    for kind, usual, hard in (("llama", 22, 800), ("t5", 8, 120), ("bert", 9, 80))
    for part, number in enumerate(parts(usual=usual, hard=hard, size=200))
]


def counted(model: torch.nn.Module) -> dict[str, int]:
    """How many things hang on a model and in the registries of Transformers."""
    modules = list(model.modules())
    return {
        "modules": len(modules),
        "attributes": sum(len(vars(module)) for module in modules),
        "hooks": sum(len(h) for m in modules for n, h in vars(m).items() if n.endswith(("_hooks", "_with_kwargs"))),
        "tensors": len([*model.parameters(), *model.buffers()]),
        "attention functions": len(list(ALL_ATTENTION_FUNCTIONS.valid_keys())),
        "mask functions": len(list(ALL_MASK_ATTENTION_FUNCTIONS.valid_keys())),
        "users": len(list(_users)),
    }


@pytest.mark.parametrize(("kind", "part", "number"), CYCLES)
def test_cycles_leave_nothing(kind, part, number, count):
    make, specs, run = KINDS[kind]
    model = make()
    before, things = snapshot(model, run), counted(model)
    turns = itertools.islice(itertools.cycle(specs), part, None)
    for _ in range(number):
        with patch(model, next(turns)):
            run(model)
        assert counted(model) == things
    assert snapshot(model, run) == before
    count("cycles", number)


def test_memory_is_flat_over_cycles():
    model = build()
    turns = itertools.cycle(IN_TURN)

    def cycles(number: int) -> tuple[int, int, int]:
        for _ in range(number):
            with patch(model, next(turns)):
                logits(model, tokens(12))
        gc.collect()
        return len(gc.get_objects()), tracemalloc.get_traced_memory()[0], psutil.Process().memory_info().rss

    cycles(WARM)
    tracemalloc.start()
    try:
        cycles(len(IN_TURN))
        kinds = Counter(type(thing).__name__ for thing in gc.get_objects())
        objects, traced, resident = cycles(len(IN_TURN))
        more_objects, more_traced, more_resident = cycles(4 * len(IN_TURN))
    finally:
        tracemalloc.stop()
    grown = Counter(type(thing).__name__ for thing in gc.get_objects()) - kinds
    assert more_objects - objects < 4 * len(IN_TURN), grown.most_common(5)  # less than one for each cycle
    assert more_traced - traced < 40_000
    assert more_resident - resident < 16 << 20


@pytest.mark.parametrize("spec", IN_TURN[:: cases(usual=3, hard=1)])
def test_what_a_patch_made_is_collected(spec):
    model = build()
    scheme = get_scheme(spec)
    handle = patch(model, scheme)
    logits(model, tokens())
    gradients(model, tokens(8))
    made = [handle, handle._changes, handle.plan, handle.stack, *(layer.module.config for layer in handle.stack.layers)]
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    gone = [weakref.ref(thing) for thing in [*hooks, *made]]
    kept = {id(module.config) for module in model.modules() if hasattr(module, "config")}
    del made, hooks
    unpatch(model)
    del handle
    gc.collect()
    left = [thing for ref in gone if (thing := ref()) is not None]
    ours = {id(module.config) for module in model.modules() if hasattr(module, "config")}
    assert not [type(thing) for thing in left if id(thing) not in ours]
    assert kept.isdisjoint(ours)


@pytest.mark.parametrize("spec", IN_TURN[:: cases(usual=3, hard=1)])
def test_a_model_that_is_thrown_away_under_a_scheme_is_collected(spec):
    model = build()
    handle = patch(model, spec)
    logits(model, tokens())
    gone = [weakref.ref(model), weakref.ref(handle), weakref.ref(model.model.embed_tokens.weight)]
    users = len(list(_users))
    del model, handle
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]
    assert len(list(_users)) <= users
    assert ALL_ATTENTION_FUNCTIONS["rope_patch"] is naming.attention
