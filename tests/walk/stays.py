"""Counts what a call of attention passes through in the package, and prints it as JSON, for `python -m tests.walk`."""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rope_patch import patch
from tests.floors import floor_of
from tests.walk.calls import Calls, holds, recorded

# numbers by which the shape of a tensor tells what it is
HEADS, KV_HEADS, WIDTH = 6, 2, 24
TOKENS = 41


def model() -> tuple[Any, torch.Tensor]:
    """A tiny Llama under ReRoPE, and a text that is longer than its window."""
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=60,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=WIDTH,
        max_position_embeddings=32,
    )
    torch.manual_seed(0)
    built = LlamaForCausalLM(config).eval()
    patch(built, "rerope", window=8)
    return built, torch.randint(0, 97, (1, TOKENS))


def is_query(value: Any) -> bool:
    """Whether a value is a query or an output: its last axis is the width of a head, another counts query heads, all of
    them or those of one key head.
    """
    if not isinstance(value, torch.Tensor) or value.ndim < 3:
        return False
    return value.shape[-1] == WIDTH and bool({HEADS, HEADS // KV_HEADS} & {*value.shape[:-1]})


def figures(calls: Calls) -> dict[str, Any]:
    """The walk of a layer's call through its attention function, to the output. A *stay* is a step from one file into
    another, counted once however often it is taken. A *climb* is a function that calls one on a higher floor, also
    through functions of other packages. The hook comes before it and is counted apart.
    """
    layers = [index for index, call in enumerate(calls.entered) if call.function.name == "LayerHook.__call__"]
    walk = calls.entered[layers[0] : layers[1]]
    start = next(index for index, call in enumerate(walk) if call.function.name == "late_attention")
    scored = walk[start:]
    given = [call for call in scored if call.given]
    steps = {
        (call.outer, call.function)
        for call in scored
        if call.outer is not None and call.outer.module != call.function.module
    }
    climbs = {pair for pair in steps if floor_of(pair[0].module) < floor_of(pair[1].module)}
    return {
        "calls": len(scored),
        "functions": len({call.function for call in scored}),
        "functions given the query": list(dict.fromkeys(str(call.function) for call in given)),
        "files given the query": sorted({call.function.module for call in given}),
        "stays": sorted({f"{above.module} -> {below.module}" for above, below in steps}),
        "files": sorted({call.function.module for call in scored}),
        "climbs": sorted(f"{above} -> {below}" for above, below in climbs),
        "calls, with the hook": len(walk),
        "files, with the hook": sorted({call.function.module for call in walk}),
    }


def measured() -> dict[str, dict[str, Any]]:
    """The walks by what the model computes."""
    built, ids = model()
    recording = functools.partial(recorded, functools.partial(holds, is_one=is_query))
    with torch.no_grad():
        with recording() as prefill:
            cache = built(ids, use_cache=True).past_key_values
        with recording() as first:
            cache = built(ids[:, :1], past_key_values=cache).past_key_values
        with recording() as second:
            built(ids[:, :1], past_key_values=cache)
    with recording() as training:
        built(ids, use_cache=False)
    walks = {"prefill": prefill, "first token": first, "second token": second, "training": training}
    return {name: figures(calls) for name, calls in walks.items()}


if __name__ == "__main__":
    print(json.dumps(measured()))
