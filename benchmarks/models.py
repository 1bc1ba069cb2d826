"""Small models with random weights, patched or not: forwards, tokens after a cache, an attention module, patching."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    CompileConfig,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)

from benchmarks.attention import spec
from benchmarks.comparison import Shape, Side
from rope_patch import CachedKeys, patch
from rope_patch.attention import engine
from rope_patch.attention.table import Row
from rope_patch.models.arguments import name_of_cache

_LAYERS = 4
_DECODING_LAYERS = 2
_CHUNK = 256
_WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def llama(shape: Shape, layers: int, vocabulary: int = 1024, inner: int | None = None) -> LlamaForCausalLM:
    """A Llama with the heads, the dtype and the device of the shape; the same weights every time.

    Args:
        shape: of it.
        layers: how many.
        vocabulary: tokens that it knows.
        inner: width of the MLPs; default twice that of the states.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=shape.heads * shape.head_dim,
        intermediate_size=inner or 2 * shape.heads * shape.head_dim,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=max(8, shape.length // 8),
        attn_implementation="sdpa",
    )
    with torch.device(shape.device):
        return LlamaForCausalLM(config).eval().to(getattr(torch, shape.dtype))


def forward(shape: Shape, scheme: str | None = None, layers: int = _LAYERS, compiled: bool = False) -> Side:
    """A forward of the whole model without a cache; a compiled one is compiled before it is timed."""
    model = llama(shape, layers)
    if scheme:
        patch(model, spec(scheme, shape.length))
    tokens = torch.randint(1, 1024, (1, shape.length), device=shape.device)
    called = torch.compile(model) if compiled else model

    @torch.no_grad()
    def run() -> None:
        called(tokens, use_cache=False)

    if compiled:
        run()
    return Side(run)


def decoding(
    shape: Shape, scheme: str | None = None, new: int = 1, rows: int = 1, layers: int = _DECODING_LAYERS
) -> Side:
    """New tokens after a cache of `shape.length`, from the embedding to the logits.

    Args:
        shape: of the model and the cache.
        scheme: to patch it with.
        new: tokens in one call; more than one are taken back before the next, as assisted decoding does.
        rows: more than one are padded: each begins with more pads than the one before it.
        layers: of the model.
    """
    model = llama(shape, layers)
    if scheme:
        patch(model, spec(scheme, shape.length))
    padded, room = rows > 1, 2 * shape.length + new if rows > 1 else shape.length
    mask = torch.ones(rows, room, dtype=torch.long, device=shape.device)
    for row in range(rows):
        mask[row, : row * shape.length // 16] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    named = {name_of_cache(model): cache}

    @torch.no_grad()
    def step(new: int = new) -> None:
        past = cache.get_seq_length()
        seen = past + new
        places = {"attention_mask": mask[:, :seen], "position_ids": positions[:, past:seen]} if padded else {}
        # on a GPU, SDPA would plan each new length of the cache for cuDNN, for twenty milliseconds a token
        with sdpa_kernel(_WITHOUT_PLANS):
            model(mask[:, :new], use_cache=True, **named, **places)

    step(1)  # a patched model takes a cache that it began itself
    for layer in range(layers):
        # other contents do not matter for the time, only their number
        past = [shape.random(rows, shape.kv_heads, shape.length - 1, shape.head_dim) for _ in range(2)]
        keys, _ = cache.update(past[0], past[1], layer)
        cache.layers[layer].keys = CachedKeys.of(keys, positions[:, : shape.length])
    return Side(step, reset=lambda: _shorten(cache, shape.length) if new > 1 else None)


def generated(
    shape: Shape,
    scheme: str | None = None,
    new: int = 64,
    layers: int = _LAYERS,
    mode: str = "reduce-overhead",
    backend: str | None = None,
    executor: str | None = None,
) -> Side:
    """New tokens by `generate`, with a static cache that holds `shape.length` others. Transformers compiles their steps
    by itself on a GPU.

    Args:
        shape: of the model and the cache.
        scheme: to patch it with.
        new: tokens; the first is not compiled.
        layers: of the model.
        mode: of the compiler; `reduce-overhead`, which Transformers asks for, records CUDA graphs.
        backend: of the compiler; default `inductor` on a GPU. A CPU, whose compiler takes minutes, traces alone.
        executor: one that this process prefers from here on.
    """
    if executor:
        prefer(executor)
    model = llama(shape, layers)
    if scheme:
        patch(model, spec(scheme, shape.length))
    backend = backend or ("inductor" if shape.device == "cuda" else "eager")
    config = CompileConfig(backend=backend, mode=mode if backend == "inductor" else None)
    config._compile_all_devices = True
    tokens = torch.randint(1, 1024, (1, shape.length + 1), device=shape.device)
    cache = StaticCache(config=model.config, max_cache_len=shape.length + 1 + new)
    named = {name_of_cache(model): cache}
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}

    @torch.no_grad()
    def read() -> None:
        cache.reset()
        model(tokens[:, :-1], use_cache=True, logits_to_keep=1, **named)

    def run() -> None:
        model.generate(tokens, compile_config=config, **named, **options)

    return Side(run, reset=read)


def prefer(executor: str) -> None:
    """Ask an executor before all others, also one that is otherwise only taken by its name, from here on."""
    engine.ROWS = preferring(executor, engine.ROWS)
    engine.TABLE = {device: preferring(executor, rows) for device, rows in engine.TABLE.items()}


@contextmanager
def preferred(executor: str | None) -> Iterator[None]:
    """`prefer` an executor, if one is named, while it is entered."""
    rows, table = engine.ROWS, engine.TABLE
    if executor:
        prefer(executor)
    try:
        yield
    finally:
        engine.ROWS, engine.TABLE = rows, table


def preferring(executor: str, rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The rows of a table with those of an executor first."""
    own = [replace(row, by_name=False) for row in rows if row.executor.name == executor]
    return (*own, *(row for row in rows if row.executor.name != executor))


def _shorten(cache: DynamicCache, length: int) -> None:
    if (extra := cache.get_seq_length() - length) > 0:
        cache.crop(-extra)  # by how much, not to what: the only form that all versions of Transformers know


def prefill(shape: Shape, scheme: str | None = None) -> Side:
    """A text in chunks of 256 tokens, each after the cache of those before it."""
    model = llama(shape, _DECODING_LAYERS)
    if scheme:
        patch(model, spec(scheme, shape.length))
    chunks = torch.randint(1, 1024, (1, shape.length), device=shape.device).split(_CHUNK, dim=1)
    name = name_of_cache(model)

    @torch.no_grad()
    def run() -> None:
        cache = DynamicCache(config=model.config)
        for chunk in chunks:
            model(chunk, use_cache=True, **{name: cache})

    return Side(run)


def t5_training(shape: Shape, patched: bool = False) -> Side:
    """Forward and backward of a T5 of two and two layers, to the tables of its biases too."""
    torch.manual_seed(0)
    width = shape.heads * shape.head_dim
    config = T5Config(
        vocab_size=1024,
        d_model=width,
        d_kv=shape.head_dim,
        d_ff=2 * width,
        num_layers=2,
        num_heads=shape.heads,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    with torch.device(shape.device):
        model = T5ForConditionalGeneration(config).eval().to(getattr(torch, shape.dtype))
    if patched:
        patch(model, "t5")
    text = torch.randint(1, 1024, (1, shape.length), device=shape.device)
    return Side(lambda: model(input_ids=text, labels=text).loss.backward(), reset=model.zero_grad)


def patch_seconds(shape: Shape, layers: int) -> float:
    """How long the first `patch` of a model takes in a process that has patched a tiny one; its MLPs are narrow."""
    patch(llama(Shape(shape.length, 2, 2, 16, device=shape.device), layers=1), "rerope:window=64")
    model = llama(shape, layers, inner=64)
    start = time.perf_counter()
    patch(model, "rerope:window=64")
    return time.perf_counter() - start


def _check_executor(asked: str, taken: str, _: Any) -> None:
    if taken != asked:
        raise RuntimeError(f"{taken} was taken in place of {asked}")


def attention_module(
    shape: Shape, scheme: str | None = None, backward: bool = False, skip: int = 0, executor: Any = "auto"
) -> Side:
    """An attention module as a model calls it, rotation included, without its four projections. Positions skip
    `skip` of them in the middle of the row, as in PoSE. Under a scheme the executor may be forced.
    """
    model = llama(shape, layers=1)
    if scheme:
        handle = patch(model, spec(scheme, shape.length), attention=executor)
        if executor != "auto":  # `fused` falls back in silence
            handle.layer_states[0].watch = partial(_check_executor, executor)
    module = model.model.layers[0].self_attn
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(module, name, nn.Identity())
    hidden = shape.random(1, shape.length, shape.heads * shape.head_dim).requires_grad_(backward)
    positions = torch.arange(shape.length, device=shape.device)[None]
    positions[:, shape.length // 2 :] += skip
    tables = model.model.rotary_emb(hidden, positions)

    def call() -> torch.Tensor:
        return module(hidden, position_embeddings=tables, attention_mask=None, position_ids=positions)[0]

    if not backward:
        return Side(torch.no_grad()(call))
    grad = torch.randn_like(hidden)
    return Side(lambda: torch.autograd.grad(call(), hidden, grad))
