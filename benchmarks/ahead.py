"""Count the kernels that a token of a compiled model starts on a GPU that the machine lacks.

    python -m benchmarks.ahead                                  the table, four minutes
    python -m benchmarks.ahead --only rerope dca --by traced    some schemes, by one executor

Inductor compiles the step of `generate/*` for an H100 from tensors without values, and says whether it gives up CUDA
graphs. It needs a build of PyTorch for CUDA (`pip install torch==2.11.0`), and neither a GPU nor a driver. Kernels and
bytes do not predict a time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import StaticCache

from benchmarks.attention import spec
from benchmarks.comparison import Shape
from benchmarks.models import llama, preferred
from rope_patch.models.arguments import name_of_cache

SCHEMES = ("plain", "yarn:factor=4", "logn", "rerope", "self_extend", "dca")
"""The schemes of the table, one of each kind. ALiBi is not among them: its slopes are a tensor with values, which needs
the device.
"""
WITH_REGIONS = ("rerope", "self_extend", "dca")
"""The schemes of the table whose token an executor computes; the others keep the attention of the model."""
SHAPE = Shape(8192, 32, 8, 64, "bfloat16")
DEVICE = torch.device("cuda", 0)
NEW = 64
"""Slots of the cache beyond the length, as in the rows `generate/*`."""
HOPPER = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65_536,
    max_threads_per_multi_processor=2_048,
    warp_size=32,
    total_memory=80 << 30,
    shared_memory_per_block=49_152,
    shared_memory_per_block_optin=232_448,
    L2_cache_size=50 << 20,
)


@dataclass(frozen=True)
class Token:
    """The kernels of a compiled token.

    Attributes:
        scheme: of the model; None if it is not patched.
        executor: that computes it; None for the one that the table takes.
        layers: of the model.
        kernels: that Inductor generates.
        calls: kernels of a library: matrix products and attention.
        megabytes: what all kernels read and write, by the sizes of their arguments, as Inductor counts them.
        skipped: how often Inductor gives up CUDA graphs.
    """

    scheme: str | None
    executor: str | None
    layers: int
    kernels: int
    calls: int
    megabytes: float
    skipped: int


def missing() -> str:
    """Why nothing can be compiled for CUDA here, or an empty string."""
    if torch.version.cuda:
        return ""
    return f"torch {torch.__version__} is not built for CUDA; `pip install torch==2.11.0` brings a build that is"


def token(scheme: str | None, executor: str | None = None, layers: int = 4, shape: Shape = SHAPE) -> Token:
    """Compile one token after a static cache.

    Args:
        scheme: to patch the model with, if any.
        executor: one that is preferred to all others.
        layers: of the model.
        shape: of the model and the cache, on a CPU: states without values stand for it on the GPU.
    """
    from rope_patch import patch

    model = llama(shape, layers)
    if scheme:
        patch(model, spec(scheme, shape.length))
    without_values, graphs = FakeTensorMode(), []
    with preferred(executor), _absent_gpu(), torch.no_grad():
        with without_values:
            cache = _emptied(model, shape)
            ids, positions = (torch.zeros(1, 1, dtype=torch.long, device=DEVICE) for _ in range(2))

            def kept(graph: Any, inputs: Any) -> Callable[..., Any]:
                graphs.append((graph, inputs))
                return graph.forward

            torch._dynamo.reset()
            named = {name_of_cache(model): cache}
            torch.compile(model, backend=kept, fullgraph=True)(ids, position_ids=positions, **named)
        return Token(scheme, executor, layers, **_lowered(*graphs[0]))


def _emptied(model: nn.Module, shape: Shape) -> StaticCache:
    """Replace each tensor of a model by one without values on the GPU, and make such a cache."""

    def emptied(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE)

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(emptied(parameter), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = emptied(buffer)
    cache = StaticCache(config=model.config, max_cache_len=shape.length + NEW)
    cache.early_initialization(1, shape.kv_heads, shape.head_dim, getattr(torch, shape.dtype), DEVICE)
    return cache


def _lowered(graph: Any, inputs: Any) -> dict[str, Any]:
    """Generate the code of a graph, and count what it starts: the fields of a `Token` from `kernels` on."""
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.graph import GraphLowering

    def not_loaded(lowering: Any, wrapper: Any) -> ModuleType:
        code.append(wrapper.value)
        moved.append(lowering.count_bytes()[0])
        module = ModuleType("not_loaded")
        module.__file__, module.call = __file__, lambda _: None  # type: ignore[attr-defined]
        return module

    code, moved = list[str](), list[int]()
    counters.clear()
    options = {"compile_threads": 1, "force_disable_caches": True, "graph_partition": False}
    options |= {"joint_graph_constant_folding": False, "triton.cudagraphs": True}
    with (
        mock.patch.object(GraphLowering, "_compile_to_module_lines", not_loaded),
        mock.patch.object(torch.cuda, "is_available", return_value=True),  # not earlier: tracing would ask the driver
        config.patch(options),
    ):
        compile_fx(graph, inputs)
    (written,), (size,) = code, moved
    begun = written[written.index("def call(") :].splitlines()
    return {
        "kernels": sum(".run(" in line for line in begun),
        "calls": sum("extern_kernels." in line or " = torch.ops.aten." in line for line in begun if "#" not in line),
        "megabytes": round(size / 1e6, 1),
        "skipped": counters["inductor"]["cudagraph_skips"],
    }


@contextmanager
def _absent_gpu() -> Iterator[None]:
    """While it is entered, PyTorch compiles for an H100 that is not there."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import scheduler
    from torch._inductor.fx_passes import fuse_attention
    from torch.utils import _triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    def known(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    described = staticmethod(known(HOPPER))
    answers: list[tuple[Any, str, Any]] = [
        (torch.cuda, "get_device_properties", known(HOPPER)),
        (torch.cuda, "get_device_capability", known((HOPPER.major, HOPPER.minor))),
        (torch.cuda, "get_device_name", known(HOPPER.name)),
        (torch.cuda, "current_device", known(0)),
        (torch.cuda, "device_count", known(1)),
        (torch.cuda, "get_rng_state", known(torch.zeros(16, dtype=torch.uint8))),
        (torch.cuda, "set_rng_state", known(None)),
        (torch.cuda, "_lazy_init", known(None)),
        (torch.cuda, "_exchange_device", known(0)),
        (torch.cuda, "_maybe_exchange_device", known(0)),
        (CudaInterface, "get_device_properties", described),
        (CudaInterface.Worker, "get_device_properties", described),
        (CudaInterface, "get_compute_capability", staticmethod(known(90))),
        (scheduler, "has_triton", known(True)),
        (_triton, "has_triton", known(True)),
        (_triton, "triton_hash_with_backend", known("absent")),
        (fuse_attention, "_sfdp_init", known(None)),  # its patterns are traced on the device
    ]
    absent = SimpleNamespace(get_current_target=known(GPUTarget("cuda", 90, 32)))
    answers += [(driver, "_active", absent), (driver, "_default", absent)]
    attention = torch.ops.aten.scaled_dot_product_attention.default
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(attention.py_kernels, {composite: _attention}))
        attention._dispatch_cache.clear()
        stack.callback(attention._dispatch_cache.clear)
        torch._C._ensureCUDADeviceGuardSet()
        for owner, name, answer in answers:
            stack.enter_context(mock.patch.object(owner, name, answer))
        yield


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention by the memory-efficient kernel, which takes masks: PyTorch asks a driver which kernel to take."""
    if enable_gqa and query.shape[1] != key.shape[1]:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    found: torch.Tensor = efficient(query, key, value, attn_mask, False, dropout_p, is_causal, scale=scale)[0]
    return found


def table(found: Sequence[Token]) -> Iterator[str]:
    """One line for each token in Markdown, in totals of the model."""
    yield "| scheme | executor | kernels generated | kernels of libraries | MB read and written | CUDA graphs |"
    yield "|---|---|---|---|---|---|"
    for x in found:
        graphs = "skipped" if x.skipped else "kept"
        names = f"{x.scheme or 'unpatched'} | {x.executor or 'default'}"
        yield f"| {names} | {x.kernels} | {x.calls} | {x.megabytes:.0f} | {graphs} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Returns:
        2 without a build of PyTorch for CUDA, else 0.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=SCHEMES, metavar="SCHEME", help="(default: one of each kind)")
    parser.add_argument(
        "--by", nargs="+", default=["default"], metavar="EXECUTOR", help="executors of regions to prefer"
    )
    parser.add_argument("--layers", type=int, default=4, help="of the model (%(default)s)")
    parser.add_argument("--out", type=Path, help="file that receives the rows as JSON")
    options = parser.parse_args(arguments)
    if reason := missing():
        print(reason, file=sys.stderr)
        return 2
    found = []
    for scheme in options.only:
        for executor in options.by if scheme in WITH_REGIONS else ["default"]:
            by = None if executor == "default" else executor
            found.append(token(None if scheme == "plain" else scheme, by, options.layers))
            print(found[-1], file=sys.stderr, flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        rows = [asdict(x) for x in found]
        written = {"torch": torch.__version__, "for": HOPPER.name, "shape": asdict(SHAPE), "tokens": rows}
        options.out.write_text(json.dumps(written, indent=1) + "\n")
    print(*table(found), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
