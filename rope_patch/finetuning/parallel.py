"""One model, several processes: each computes the losses of its own rows, and all take the same step.

`ddp` copies the weights to every process, `fsdp2` divides them. Both average gradients over the processes; the losses
are scaled so that this average is the gradient of the mean over all targets of the step.

The wrappers are torch's own. Those of accelerate would do the same on a GPU, but accelerate shards nothing on CPUs, and
what cannot be tested on two processes anywhere is not relied on here; the processes are launched by `accelerate launch`
or `torchrun` alike.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, cast

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from rope_patch.errors import EvaluationError, UnsupportedPositions
from rope_patch.evaluation.sharing import world
from rope_patch.models.head import find_language_model
from rope_patch.patching import PatchHandle

Parallel = Literal["auto", "ddp", "fsdp2"]


def rank() -> int:
    """Which of the processes this is, from 0."""
    return distributed.get_rank() if world() > 1 else 0


def chosen(parallel: str) -> str:
    """`ddp` or `fsdp2`; `auto` is what `accelerate launch` was configured for.

    Raises:
        EvaluationError: it was configured for the first version of FSDP.
    """
    if parallel != "auto":
        return parallel
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return "ddp"
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise EvaluationError("accelerate was configured for FSDP 1; only version 2 is supported: fsdp_version: 2")
    return "fsdp2"


def wrap(loss: nn.Module, device: torch.device, parallel: str) -> nn.Module:
    """The loss module as several processes train it together; as it is where there is one process.

    `fsdp2` gathers weights in float32 also where autocast computes in bfloat16. Were they gathered in bfloat16, so
    would be norms, parameters that a scheme needs precise, and measurements, and two processes would train something
    else than one does.

    Args:
        loss: a `LanguageModelLoss`; moved to the device.
        device: of this process.
        parallel: `auto`, `ddp` or `fsdp2`.

    Raises:
        EvaluationError: `fsdp2`, and the weights are of several dtypes.
    """
    if world() == 1:
        return loss.to(device)
    if chosen(parallel) == "ddp":
        places = None if device.type == "cpu" else [device]
        # buffers are tables of positions, the same everywhere: nothing to send before every forward
        return DistributedDataParallel(loss.to(device), device_ids=places, broadcast_buffers=False)
    if len({parameter.dtype for parameter in loss.parameters()}) > 1:
        raise EvaluationError("parallel='fsdp2' with weights='bfloat16': weights of one dtype alone can be divided")
    mesh = init_device_mesh(device.type, (world(),))
    blocks = set(find_language_model(loss)._no_split_modules or ())
    for module in reversed(list(loss.modules())):  # what is inside first, as `fully_shard` wants it
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh)
            module.register_forward_hook(_forget_casts)
    fully_shard(loss, mesh=mesh)
    return loss


def _forget_casts(*_: object) -> None:
    """Autocast keeps the bfloat16 copy of every weight until the forward ends: all blocks, on every process."""
    torch.clear_autocast_cache()


def accumulating(wrapped: nn.Module, more: bool) -> AbstractContextManager[None]:
    """While more micro-batches of the step follow, gradients need not be averaged yet."""
    if isinstance(wrapped, DistributedDataParallel) and more:
        return cast("AbstractContextManager[None]", wrapped.no_sync())
    if isinstance(wrapped, FSDPModule):
        wrapped.set_requires_gradient_sync(not more)
    return nullcontext()


@contextmanager
def whole(wrapped: nn.Module) -> Iterator[None]:
    """All weights on every process at once, for calls of parts of the model; as wide as the model is, so be brief."""
    if not isinstance(wrapped, FSDPModule):
        yield
        return
    # the first call decides which module is the outermost: here it must not be a block
    wrapped._get_fsdp_state()._lazy_init()
    divided = [module for module in wrapped.modules() if isinstance(module, FSDPModule)]
    for module in divided:
        module.unshard()
    try:
        yield
    finally:
        for module in divided:
            module.reshard()


def whole_weights(wrapped: nn.Module) -> dict[str, torch.Tensor]:
    """The whole weights, any shape, by their names in the model, on the CPU of the main process; empty on the others.

    Every process has to come here.

    Args:
        wrapped: a `LanguageModelLoss` as `wrap` returned it.
    """
    options = StateDictOptions(full_state_dict=world() > 1, cpu_offload=world() > 1)
    weights = cast("dict[str, torch.Tensor]", get_model_state_dict(wrapped, options=options))
    return {name.removeprefix("model."): value for name, value in weights.items()}


def check_context_parallel(handle: PatchHandle | None, processes: int, device: torch.device) -> None:
    """Refuse to share a row among processes where attention would see its own part alone.

    Ring attention stands in place of `scaled_dot_product_attention`. A scheme that is mounted on the rotary module
    leaves that call as it is; the others score by functions of this library, which know nothing of the other parts.

    Args:
        handle: of the patched model; None without a scheme.
        processes: that would share a row.
        device: of this process.

    Raises:
        UnsupportedPositions: the scheme's attention cannot be shared out.
        EvaluationError: this recipe does not share rows itself.
    """
    if processes == 1:
        return
    if handle is not None and handle.plan.mounts() != "rotary":
        raise UnsupportedPositions(
            f"context_parallel={processes}: {handle.scheme} is mounted {handle.plan.mounts()}, and its attention sees "
            "only the part of the row that this process has; schemes of static frequencies (pi, yarn) can share rows"
        )
    raise EvaluationError(
        f"context_parallel={processes} on {device.type}: this recipe divides batches, not rows; with a model under a "
        "scheme of static frequencies use accelerate's ParallelismConfig(cp_size=...), see docs/parallel.md"
    )
