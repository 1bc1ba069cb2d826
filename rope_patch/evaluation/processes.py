"""Measure with several processes, started by `torchrun` or `accelerate launch`; the rows equal those of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn
from torch.distributed import fsdp

from rope_patch.context_parallel.block import context_parallel, mesh_of, sharing_of

Item = TypeVar("Item")
Result = TypeVar("Result")


def joined(cpu: bool = False) -> PartialState:
    """Join the processes and return the state of this one; the first call decides whether they compute on the CPU."""
    return PartialState(cpu=cpu or not torch.accelerator.is_available())


def sharing_rows(number: int, model: nn.Module) -> AbstractContextManager[Any]:
    """Within the block, `number` consecutive processes share each row of a model; with 1 nothing changes.

    Raises:
        EvaluationError: the number of all processes is not a multiple of `number`.
    """
    if number == 1:
        return nullcontext()
    return context_parallel(model, mesh_of(number, joined().device.type).get_group("cp"))


def on_main(action: Callable[[], Result]) -> Result:
    """Run `action()` on the main process, and return its result on every process."""
    return broadcast_object_list([action() if joined().is_main_process else None])[0]


def over_processes(function: Callable[[Item], Result], items: Sequence[Item], model: nn.Module) -> list[Result]:
    """Map a function over items, like `[function(item) for item in items]`, with the items divided over the processes.

    If FSDP2 shards the weights of the model, or processes share each row, all processes must make the same calls, so
    each works on all items.
    """
    if sharing_of(model) is not None:
        return [function(item) for item in items]
    outermost = sharded(model)
    if outermost is None:
        with joined().split_between_processes(list(items)) as share:
            return gather_object([function(item) for item in share])
    # a layer gathers its weights in its forward; embedding and head belong to the outermost module, whose own forward
    # does not run if the stack is called without the head
    outermost._get_fsdp_state()._lazy_init()  # the first call makes this module the root, not a layer
    results = []
    for item in items:
        outermost.unshard()
        results.append(function(item))
    outermost.reshard()
    return results


def sharded(model: nn.Module) -> Any:
    """The outermost module whose weights FSDP2 shards over processes; None without one."""
    return next((module for module in model.modules() if isinstance(module, fsdp.FSDPModule)), None)
