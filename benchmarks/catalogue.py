"""Everything that is compared, with what it must reach."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks import attention, fine_tuning, models, perplexity
from benchmarks.comparison import Comparison, Maker, Shape
from benchmarks.machine import memory_bytes
from rope_patch import list_schemes

_LINEAR = 3.0
"""Peak extra memory of a segment scheme over that of plain attention: a small multiple, whatever the length."""


def comparisons(device: str) -> list[Comparison]:
    """The rows for a device, in the order of the table."""
    return [*(_on_cuda() if device == "cuda" else _on_cpu())]


GROWTH: dict[str, Maker] = {
    "plain attention": attention.sdpa,
    "ReRoPE": partial(attention.regions, scheme="rerope"),
    "ReRoPE, two dense matrices": attention.dense,
}
"""What the curve over lengths shows, by the name of its line."""


def growth_shapes(device: str) -> list[Shape]:
    """The lengths of the curve."""
    if device == "cuda":
        return [Shape(2**power, 32, 8, 128, "bfloat16", "cuda") for power in range(10, 18)]
    return [Shape(2**power, 2, 2) for power in range(10, 15)]


def growth_makers(shape: Shape) -> dict[str, Maker]:
    """The lines of the curve that fit into memory at this length."""
    matrices = 4 * 4 * shape.heads * shape.length**2  # two of scores, one of them chosen, one of weights
    fits = matrices < memory_bytes(shape.device) / 2
    return {label: maker for label, maker in GROWTH.items() if fits or maker is not attention.dense}


def _on_cpu() -> Iterator[Comparison]:
    # one scheme of two regions and the one of three stand for all where the ten minutes of `make bench` are short
    long, longer = Shape(8192), Shape(16384)
    yield _static(Shape(2048, head_dim=64))
    for scheme in attention.SEGMENTS:
        yield _forward(scheme, long, 1.05 if scheme == "dca" else 1.10, memory=True)
    for scheme in attention.SEGMENTS:
        yield _forward(scheme, longer, 1.05 if scheme == "dca" else 1.06)
    for length in (4096, 8192):
        yield _forward("rerope", Shape(length, dtype="bfloat16"), 0.75)
    for dtype, target in (("float32", 1.15), ("bfloat16", 1.20)):
        for scheme in ("rerope", "dca"):
            yield _training(scheme, replace(long, dtype=dtype), target)
    yield from _dense(Shape(4096))
    yield from _encoder(replace(long, head_dim=64))
    yield from _modules(long)
    for dtype in ("float32", "bfloat16"):
        yield from _decoding(Shape(8192, 8, 2, dtype=dtype))
    yield from _perplexity(Shape(8192, 4, 4, 64))
    for dtype in ("float32", "bfloat16"):
        yield _fine_tuning(Shape(8192, 4, 4, 64, dtype))


def _on_cuda() -> Iterator[Comparison]:
    long = Shape(32768, 32, 8, 128, "bfloat16", "cuda")
    yield _static(replace(long, length=8192))
    for scheme in attention.SEGMENTS:
        yield _forward(scheme, long, 1.15, memory=True)
    for scheme in attention.SEGMENTS:
        yield _training(scheme, long, 1.20)
    yield from _dense(replace(long, length=4096))
    yield from _encoder(replace(long, length=8192, kv_heads=32, head_dim=64))
    yield from _modules(replace(long, kv_heads=32))
    yield from _decoding(long)
    yield from _perplexity(Shape(8192, 4, 4, 64, "bfloat16", "cuda"))
    yield _fine_tuning(Shape(8192, 4, 4, 64, "bfloat16", "cuda"))


def _static(shape: Shape) -> Comparison:
    return _row(
        "model/yarn",
        "whole model under YaRN, forward",
        "unpatched",
        partial(models.forward, scheme="yarn:factor=4"),
        models.forward,
        shape,
        target=1.02,
        memory_target=1.02,
    )


def _forward(scheme: str, shape: Shape, target: float, memory: bool = False) -> Comparison:
    return _row(
        f"forward/{scheme}",
        f"{scheme}, forward",
        "plain attention",
        partial(attention.regions, scheme=scheme),
        attention.sdpa,
        shape,
        target=target,
        memory_target=_LINEAR if memory else None,
        flops=attention.flops,
    )


def _training(scheme: str, shape: Shape, target: float) -> Comparison:
    return _row(
        f"training/{scheme}",
        f"{scheme}, forward and backward",
        "plain attention",
        partial(attention.regions, scheme=scheme, backward=True),
        partial(attention.sdpa, backward=True),
        shape,
        target=target,
        memory_target=_LINEAR,
        flops=attention.training_flops,
    )


def _dense(shape: Shape) -> Iterator[Comparison]:
    ours, dense, plain = (
        partial(attention.regions, scheme="rerope", backward=True),
        partial(attention.dense, backward=True),
        partial(attention.sdpa, backward=True),
    )
    rate = attention.training_flops
    yield _row(
        "dense/rerope",
        "rerope, forward and backward",
        "two dense matrices",
        ours,
        dense,
        shape,
        target=1 / 3.5,
        flops=rate,
    )
    yield _row(
        "dense/yardstick",
        "two dense matrices, forward and backward",
        "plain attention",
        dense,
        plain,
        shape,
        flops=rate,
    )


def _encoder(shape: Shape) -> Iterator[Comparison]:
    """Both directions, under the biases of T5."""
    yield _row(
        "encoder/t5",
        "T5 biases in both directions, forward",
        "attention without biases",
        attention.t5_encoder,
        attention.unbiased_encoder,
        shape,
        target=1.06,
        memory_target=_LINEAR,
    )
    yield _row(
        "encoder/materialised",
        "T5 biases in both directions, forward",
        "a bias for every pair",
        attention.t5_encoder,
        attention.materialised_encoder,
        shape,
        target=1 / 4,
        memory_target=1 / 20,
    )


def _modules(shape: Shape) -> Iterator[Comparison]:
    """With everything between the projections, through the attention function of patched modules."""
    # a bias has no rotation beside it, but the module still turns by an angle of zero: the same work on both sides
    targets = {"rerope": None, "logn": 1.02, "alibi": 1.05, "sandwich": 1.12}
    for scheme, target in targets.items():
        if scheme in list_schemes():
            yield _row(
                f"module/{scheme}",
                f"{scheme}, attention module with rotations",
                "unpatched module",
                partial(models.attention_module, scheme=scheme),
                models.attention_module,
                shape,
                target=target,
            )


def _decoding(shape: Shape) -> Iterator[Comparison]:
    for scheme in attention.SEGMENTS:
        yield _row(
            f"decode/{scheme}",
            f"{scheme}, whole model, one token after a cache",
            "unpatched",
            partial(models.decoding, scheme=scheme),
            models.decoding,
            shape,
            target=1.05,
        )


def _perplexity(shape: Shape) -> Iterator[Comparison]:
    yield _row(
        "perplexity/by_position",
        "perplexity at three lengths in one pass",
        "YaRN's sliding windows, full logits",
        perplexity.one_pass,
        perplexity.sliding,
        shape,
        target=1 / 12,
        memory_target=1 / 30,
    )
    yield _row(
        "perplexity/last",
        "perplexity of the last quarter",
        "full logits",
        perplexity.last_rows,
        perplexity.last_full,
        shape,
        target=1 / 2,
        memory_target=1 / 30,
    )


def _fine_tuning(shape: Shape) -> Comparison:
    return _row(
        "fine_tuning/loss",
        "training step, loss in chunks; memory of the loss alone",
        "loss from all logits",
        fine_tuning.chunked_loss,
        fine_tuning.default_loss,
        shape,
        target=1.0,
        memory_target=1 / 10,
        shared=fine_tuning.stack_alone,
    )


def _row(prefix: str, work: str, yardstick: str, ours: Maker, theirs: Maker, shape: Shape, **rest: Any) -> Comparison:
    return Comparison(f"{prefix}/{shape.length}/{shape.dtype}", work, yardstick, ours, theirs, shape, **rest)
