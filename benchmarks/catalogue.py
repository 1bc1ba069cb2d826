"""Everything that is compared, with what it must reach."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch.nn.attention import SDPBackend

from benchmarks import attention, candidates, fine_tuning, launches, models, perplexity
from benchmarks.comparison import Comparison, Figure, Maker, Shape
from benchmarks.machine import memory_bytes
from benchmarks.measure import in_fresh_process

_LINEAR = 1.5
"""Peak extra memory of a segment scheme over that of plain attention: a small multiple, whatever the length."""
_PASSES = ("forward", "forward and backward")


def rows(device: str) -> list[Comparison | Figure]:
    """What is measured on a device, in the order of the table."""
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
    makers = dict(GROWTH)
    if shape.device == "cuda":
        makers["FlashAttention-2"] = partial(attention.sdpa, backend=SDPBackend.FLASH_ATTENTION)
    return {label: maker for label, maker in makers.items() if fits or maker is not attention.dense}


def _on_cpu() -> Iterator[Comparison | Figure]:
    # `make bench` has few minutes, so it takes one scheme of two regions and the one of three
    long, longer, short = Shape(8192), Shape(16384), Shape(4096)
    yield _static(Shape(2048, head_dim=64))
    for scheme in ("rerope", "dca"):
        yield _alone(scheme, long, 1.05 if scheme == "dca" else 1.08)
    yield _alone("rerope", long, 1.12, backward=True)
    yield _alone("rerope", replace(long, dtype="bfloat16"), 1.20, backward=True)
    yield from _dense(short)
    yield from _encoder(replace(long, head_dim=64), Shape(1024, head_dim=64))
    for scheme in ("rerope", "self_extend", "dca"):
        yield _module(scheme, long, 1.08, memory=True)
    for scheme in ("rerope", "dca"):
        yield _module(scheme, longer, 1.05)
    for scheme in ("rerope", "dca"):
        yield _module(scheme, long, 1.12, backward=True, memory=True)
    yield _module("dca", replace(long, dtype="bfloat16"), 1.2, backward=True, memory=True)
    yield _module("self_extend", short, 1.08)
    yield _skipping("rerope", replace(short, length=2048, dtype="bfloat16"))
    for length in (4096, 8192):
        for scheme in ("rerope", "dca"):
            yield _module(scheme, Shape(length, dtype="bfloat16"), 0.85)
    yield from _biases(long)
    yield from _compiled(Shape(2048, head_dim=64))
    yield from _decoding(long, short)
    for scheme in ("rerope", "dca"):
        yield _after("decode", scheme, replace(long, kv_heads=2, dtype="bfloat16"), 1.05)
    yield from _launches(Shape(256, 4, 4, 32))
    yield from _patching()
    yield from _perplexity(Shape(8192, 4, 4, 64))
    yield _fine_tuning(Shape(8192, 4, 4, 64, "bfloat16"))


TABLE = ("graphs", "breaks", "forward", "training", "token", "read")
"""Groups of rows on a GPU that a user meets first: what `make gpu` measures before the others."""
COMPILED = ("generate", "traced", "mode")
"""Groups of rows whose sides are compiled, each in a process of its own: `benchmarks.compiled`."""
PARTS = ("part", "part-training", "value", "executor")
"""Groups whose rows time kernels and executors alone, or compare their values."""
_BY_REGIONS = ("rerope", "dca")
_OF_ALL_KINDS = (*_BY_REGIONS, "yarn:factor=4", "self_extend", "logn", "alibi")


def _table(whole: Shape, lengths: Sequence[Shape]) -> Iterator[Comparison | Figure]:
    """In the order of its worth.

    Args:
        whole: of models.
        lengths: of attention alone.
    """
    small = Shape(256, 4, 4, 32, "bfloat16", "cuda")
    yield from (_generate("generate", scheme, whole) for scheme in _BY_REGIONS)
    yield from (_generate("traced", scheme, whole, executor="traced") for scheme in _BY_REGIONS)
    for scheme in _OF_ALL_KINDS:
        name, work = f"{scheme.partition(':')[0]}/{small.dtype}", f"{scheme}, tokens after a static cache"
        reads = {"graphs": (launches.graphs, 1), "breaks": (launches.breaks, 0)}
        for unit, (read, target) in reads.items():
            yield Figure(
                f"{unit}/{name}", f"{work}: {unit}", "unpatched", unit, partial(read, scheme=scheme), small, target
            )
    for shape, scheme in itertools.product(lengths, _BY_REGIONS):
        yield from _alone_on_cuda(scheme, shape)
    for scheme in _OF_ALL_KINDS:
        yield _after("token", scheme, whole, None, layers=4)
    for scheme in _OF_ALL_KINDS:
        ours, work = partial(models.forward, scheme=scheme), f"{scheme}, whole model, all tokens at once"
        yield _row(f"read/{scheme.partition(':')[0]}", work, "unpatched", ours, models.forward, whole)
    yield from (_generate("generate", scheme, whole) for scheme in _OF_ALL_KINDS[len(_BY_REGIONS) :])
    yield from (_generate("mode", scheme, whole, mode="default") for scheme in _BY_REGIONS)


def _generate(
    group: str, scheme: str, shape: Shape, mode: str = "reduce-overhead", executor: str | None = None
) -> Comparison:
    """Tokens of a compiled model."""
    ours = partial(models.generated, scheme=scheme, mode=mode, executor=executor)
    plain = partial(models.generated, mode=mode)
    work = f"{scheme}, whole model, 64 tokens after a static cache, compiled ({mode})" + f" by {executor}" * bool(
        executor
    )
    name = scheme.partition(":")[0]
    target = {"dca": 1.2, "alibi": 1.3}.get(name, 1.1)
    return _row(f"{group}/{name}", work, "unpatched", ours, plain, shape, target=target)


def _parts(lengths: Sequence[Shape]) -> Iterator[Comparison | Figure]:
    """Kernels and executors by name: one that is new there has its rows."""
    unit, tolerance = "of the norm", 0.03  # that of the trials
    some = replace(lengths[0], length=2048)
    kernels = list(itertools.product(candidates.KERNELS, candidates.REGIONS))
    for kernel, region in kernels:
        read = partial(candidates.kernel_error, kernel=kernel, region=region)
        work = f"{region} region by {kernel}: error against plain products"
        yield Figure(f"value/{kernel}/{region}", work, "", unit, read, some, tolerance)
    for shape, (kernel, region), backward in itertools.product(lengths, kernels, (False, True)):
        ours = partial(candidates.part, kernel=kernel, region=region, backward=backward)
        work = f"{region} region by {kernel}, {'backward' if backward else 'forward'}"
        plain = partial(attention.sdpa, backward=backward)
        yield _row(
            f"part{'-training' * backward}/{kernel}/{region}", work, f"plain, {_PASSES[backward]}", ours, plain, shape
        )
    every = [
        (executor, scheme)
        for executor, scheme in itertools.product(candidates.executors(), ("rerope", "dca", "alibi"))
        if scheme != "alibi" or executor not in candidates.WITHOUT_BIAS
    ]
    for executor, scheme in every:
        read = partial(candidates.executor_error, scheme=scheme, executor=executor)
        work = f"{scheme} by {executor}: error against the definition"
        yield Figure(f"value/{executor}/{scheme}", work, "", unit, read, replace(some, length=1024), tolerance)
    for executor, scheme in every:
        ours = partial(models.attention_module, scheme=scheme, executor=executor)
        work = f"{scheme} by {executor}, attention module, forward"
        yield _row(f"executor/{executor}/{scheme}", work, "unpatched module", ours, models.attention_module, lengths[0])


def _on_cuda() -> Iterator[Comparison | Figure]:
    long = Shape(32768, 32, 8, 128, "bfloat16", "cuda")
    lengths = replace(long, length=8192), long
    yield from _table(replace(lengths[0], head_dim=64), lengths)
    yield from _parts(lengths)
    full = replace(long, kv_heads=32)
    yield _static(lengths[0])
    for shape in lengths:
        yield from _flash(shape)
    for scheme in (scheme for scheme in attention.SEGMENTS if scheme not in _BY_REGIONS):
        yield from _alone_on_cuda(scheme, long)
    for scheme in _BY_REGIONS:
        yield from _candidates(scheme, long)
    for shape in (replace(long, length=8192), long):
        yield from _under_a_bias(shape)
    yield from _dense(replace(long, length=4096))
    yield from _encoder(replace(full, length=8192, head_dim=64), replace(full, length=2048, heads=8, kv_heads=8))
    for scheme in ("rerope", "dca"):
        yield _module(scheme, full, 1.08)
        yield _module(scheme, full, 1.12, backward=True)
    yield from _biases(full)
    yield from _decoding(full, replace(full, length=4096))
    yield from _launches(Shape(256, 4, 4, 32, "bfloat16", "cuda"))
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


def _alone(scheme: str, shape: Shape, target: float, backward: bool = False) -> Comparison:
    """Attention by itself."""
    return _row(
        f"{'training' if backward else 'forward'}/{scheme}",
        f"{scheme}, {_PASSES[backward]}",
        "plain attention",
        partial(attention.regions, scheme=scheme, backward=backward),
        partial(attention.sdpa, backward=backward),
        shape,
        target=target,
        memory_target=_LINEAR,
        flops=attention.training_flops if backward else attention.flops,
    )


def _alone_on_cuda(scheme: str, shape: Shape) -> Iterator[Comparison]:
    """Without and with gradients; short texts also show what the host takes."""
    forward, training = (1.15, 1.2) if scheme == "dca" else (1.05 if shape.length > 8192 else 1.3, 1.08)
    yield _alone(scheme, shape, forward)
    yield _alone(scheme, shape, training, backward=True)


def _flash(shape: Shape) -> Iterator[Comparison]:
    """FlashAttention-2, of which regions are made where cuDNN does not take them, over what PyTorch takes."""
    for backward in (False, True):
        flash = partial(attention.sdpa, backward=backward, backend=SDPBackend.FLASH_ATTENTION)
        plain = partial(attention.sdpa, backward=backward)
        place, rate = ("flash-training", attention.training_flops) if backward else ("flash", attention.flops)
        work = f"FlashAttention-2, {_PASSES[backward]}"
        yield _row(f"{place}/plain", work, "plain attention", flash, plain, shape, flops=rate)


def _candidates(scheme: str, shape: Shape) -> Iterator[Comparison]:
    """A kernel per tile of a region, over what could run in its place."""
    others = {
        "kernel": ("the Triton kernel", candidates.kernel),
        "flex": ("FlexAttention", candidates.flex),
    }
    for backward, (label, (name, other)) in itertools.product((False, True), others.items()):
        ours, theirs = (partial(side, scheme=scheme, backward=backward) for side in (attention.regions, other))
        place = f"{label}-training" if backward else label
        yield _row(f"{place}/{scheme}", f"{scheme}, {_PASSES[backward]}", name, ours, theirs, shape)


def _under_a_bias(shape: Shape) -> Iterator[Comparison]:
    """FlexAttention over the Triton kernel, which goes first: for the record that decides which of them does."""
    for backward in (False, True):
        flex, fused = (partial(candidates.alibi, executor=name, backward=backward) for name in ("flex", "fused"))
        place, rate = ("bias-training", attention.training_flops) if backward else ("bias", attention.flops)
        yield _row(
            f"{place}/alibi",
            f"alibi by FlexAttention, {_PASSES[backward]}",
            "the Triton kernel",
            flex,
            fused,
            shape,
            flops=rate,
        )


def _dense(shape: Shape) -> Iterator[Comparison]:
    ours = partial(attention.regions, scheme="rerope", backward=True)
    dense, plain = (partial(side, backward=True) for side in (attention.dense, attention.sdpa))
    work, yardstick, rate = _PASSES[True], "two dense matrices", attention.training_flops
    yield _row("dense/rerope", f"rerope, {work}", yardstick, ours, dense, shape, target=1 / 3.5, flops=rate)
    yield _row("dense/yardstick", f"{yardstick}, {work}", "plain attention", dense, plain, shape, flops=rate)


def _encoder(shape: Shape, training: Shape) -> Iterator[Comparison]:
    """Under the biases of T5."""
    work, none, every = "T5 biases in both directions", "attention without biases", "a bias for every pair"
    ours, unbiased, pairs = attention.t5_encoder, attention.unbiased_encoder, attention.materialised_encoder
    forward = f"{work}, {_PASSES[False]}"
    yield _row("encoder/t5", forward, none, ours, unbiased, shape, target=1.06, memory_target=2 * _LINEAR)
    yield _row("encoder/materialised", forward, every, ours, pairs, shape, target=1 / 4, memory_target=1 / 20)
    ours, unbiased = (partial(side, backward=True) for side in (ours, unbiased))
    work = f"{work}, {_PASSES[True]} to their table"
    yield _row("encoder/t5_training", work, none, ours, unbiased, training, target=1.4)
    work, ours = f"T5, encoder and decoder, {_PASSES[True]}", partial(models.t5_training, patched=True)
    yield _row("model/t5_training", work, "unpatched", ours, models.t5_training, training, target=1.4)


def _module(scheme: str, shape: Shape, target: float, backward: bool = False, memory: bool = False) -> Comparison:
    """With everything between the projections, through the attention function of patched modules."""
    return _row(
        f"module/{scheme}{'/training' if backward else ''}",
        f"{scheme}, attention module with rotations, {_PASSES[backward]}",
        "unpatched module",
        partial(models.attention_module, scheme=scheme, backward=backward),
        partial(models.attention_module, backward=backward),
        shape,
        target=target,
        memory_target=_LINEAR if memory else None,
        flops=attention.training_flops if backward else attention.flops,
    )


def _skipping(scheme: str, shape: Shape) -> Comparison:
    """A row of PoSE."""
    side = partial(models.attention_module, scheme=scheme, backward=True)
    work, skip = f"{scheme}, attention module, positions that skip, {_PASSES[True]}", 4 * shape.length
    return _row(f"skipping/{scheme}", work, "without a skip", partial(side, skip=skip), side, shape, target=1.3)


def _biases(shape: Shape) -> Iterator[Comparison]:
    # a bias has no rotation beside it, but the module still turns by an angle of zero: the same work on both sides
    for scheme, target in {"logn": 1.02, "alibi": 1.05, "sandwich": 1.12}.items():
        yield _module(scheme, shape, target)
    ours, plain = partial(attention.alibi, backward=True), partial(attention.sdpa, backward=True)
    for some, target in ((replace(shape, length=2048), 1.2), (shape, 1.1)):
        work = f"alibi, {_PASSES[True]}"
        yield _row("training/alibi", work, "plain attention", ours, plain, some, target=target)
    yield _module("alibi", shape, 1.1, backward=True)


def _compiled(shape: Shape) -> Iterator[Comparison]:
    """Under `torch.compile`: what it costs a scheme, and the unpatched model."""
    for scheme in (None, "rerope", "dca", "alibi", "fox", "nope+rerope", "xpos"):
        side, name = partial(models.forward, scheme=scheme, layers=2), scheme or "unpatched"
        work, ours = f"{name}, whole model, forward, compiled", partial(side, compiled=True)
        yield _row(f"compiled/{name}", work, "not compiled", ours, side, shape, target=1.3 if scheme else None)


def _decoding(long: Shape, short: Shape) -> Iterator[Comparison]:
    """Tokens after a cache, in a whole model: one or several, padded, and a text in chunks."""
    grouped = replace(long, kv_heads=long.heads // 4)
    for scheme in ("rerope", "self_extend", "dca"):
        yield _after("decode", scheme, grouped, 1.05)
        yield _after("decode", scheme, short, 1.05)
    for scheme in ("dynamic_ntk:factor=2", "dynamic_yarn"):
        yield _after("decode", scheme, short, 1.2)
    yield _after("decode", "xpos", long, 1.1)
    yield _after("decode", "xpos", short, 1.15)
    for scheme in ("nope+rerope", "nope+yarn"):
        yield _after("decode", scheme, short, 1.1)
        yield _after("decode", scheme, replace(short, kv_heads=short.heads // 4), 1.1)
    for scheme, target in (("dca", 1.2), ("rerope", 1.05), ("nope+yarn", 1.1)):
        yield _after("padded", scheme, grouped, target, rows=2)
    for scheme in ("rerope", "dca"):
        yield _after("batch", scheme, replace(short, length=2048), 1.1, rows=4)
    for scheme in ("rerope", "dca", "alibi"):
        for shape in (grouped, long):
            for new in (2, 8, 31):
                yield _after(f"several/{new}", scheme, shape, 1.1, new=new)
    for scheme in ("rerope", "dca"):
        yield _row(
            f"prefill/{scheme}",
            f"{scheme}, whole model, in chunks of 256 with a cache",
            "unpatched",
            partial(models.prefill, scheme=scheme),
            models.prefill,
            replace(short, length=2048),
            target=1.1,
        )


def _after(group: str, scheme: str, shape: Shape, target: float | None, new: int = 1, **rest: Any) -> Comparison:
    tokens = f"{new} tokens" if new > 1 else "one token"
    rows = {1: "", 2: ", two rows, one left-padded"}.get(count := rest.get("rows", 1), f", {count} rows, left-padded")
    return _row(
        f"{group}/{scheme.partition(':')[0]}{'/grouped' if shape.kv_heads != shape.heads else ''}",
        f"{scheme}, whole model, {tokens} after a cache{rows}",
        "unpatched",
        partial(models.decoding, scheme=scheme, new=new, **rest),
        partial(models.decoding, new=new, **rest),
        shape,
        target=target,
    )


def _launches(shape: Shape) -> Iterator[Comparison | Figure]:
    """A model so small that a token costs what starting its kernels costs."""
    targets = {"rerope": 4, "self_extend": 4, "dca": 5, "logn": 2, "alibi": 2}
    micros = {"rerope": 60, "self_extend": 60, "logn": 30}
    for scheme in targets:
        yield _after("small", scheme, shape, None, layers=4)
    for scheme, target in targets.items():
        name, work = f"{scheme}/{shape.dtype}", f"{scheme}, one token after a cache"
        kernels, waits = (partial(read, scheme=scheme) for read in (launches.per_layer, launches.waits))
        yield Figure(f"kernels/{name}", f"{work}: kernels beyond", "unpatched", "a layer", kernels, shape, target)
        if scheme in micros and shape.device == "cpu":
            read = partial(launches.host_time, scheme=scheme)
            narrow = dataclasses.replace(shape, length=64, kv_heads=2, head_dim=16)
            yield Figure(
                f"host/{name}",
                f"{work}: the host's time beyond",
                "unpatched",
                "us a layer",
                read,
                narrow,
                micros[scheme],
            )
        yield Figure(f"waits/{name}", f"{work}: synchronisations beyond", "unpatched", "a step", waits, shape, 0)


def _patching() -> Iterator[Figure]:
    for heads, head_dim, layers, target in ((32, 128, 2, 0.3), (64, 128, 1, 0.3), (4, 16, 80, 0.1)):
        width = heads * head_dim
        yield Figure(
            f"patch/{width}",
            f"`patch` under rerope, {layers} layer{'s' * (layers > 1)} of width {width}",
            "",
            "s",
            partial(_patch_seconds, layers=layers),
            Shape(1024, heads, heads, head_dim),
            target,
            rounds=3,
        )


def _patch_seconds(shape: Shape, layers: int) -> tuple[float, None]:
    return in_fresh_process(partial(models.patch_seconds, shape, layers)), None


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
