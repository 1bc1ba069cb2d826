"""Context parallelism: several processes share a row, under every scheme.

Each process holds a part of the tokens and does almost all work alone. Only in attention layers do its queries need the
keys of the other processes. With `backend="gather"` all keys and values are gathered, and each process scores its own
queries. With `backend="ulysses"` the processes exchange heads for tokens, so that each scores the whole row for some of
the heads. Either way logits, loss and gradients equal those of a single process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rope_patch.attention.table import asked_attention
from rope_patch.context_parallel.hook import RowHook, install_sharing
from rope_patch.context_parallel.row import Backend
from rope_patch.context_parallel.sharding import Sharding
from rope_patch.context_parallel.support import reason_not_to_divide_heads, reason_not_to_share
from rope_patch.errors import EvaluationError, UnsupportedModel, did_you_mean
from rope_patch.models.base import Stack
from rope_patch.models.find_stacks import read_stacks
from rope_patch.mounting.handle import find_handles
from rope_patch.mounting.plan import Plan, install, plan_mounts
from rope_patch.mounting.undo import Changes
from rope_patch.schemes.rope import NoPE


def shard(tensor: torch.Tensor, dim: int = 1, group: Any = None) -> torch.Tensor:
    """Take the part of this process of ids, labels, positions or a mask of a whole row.

    Shift labels before you call this: otherwise a token and its target may be in different parts. The length need not
    be a multiple of the number of processes.

    Args:
        tensor: `(batch, length, ...)`, the same on every process.
        dim: the axis of tokens.
        group: the processes that share the row; default all.

    Raises:
        EvaluationError: there is no such axis, or it has fewer tokens than processes need.
    """
    if tensor.ndim <= dim:
        raise EvaluationError(f"a tensor of shape {tuple(tensor.shape)} has no tokens along dim={dim}")
    sharding = Sharding.of_row(tensor.shape[dim], group)
    if not all(map(sharding.tokens, range(sharding.number))):
        raise EvaluationError(f"a row of {sharding.length} tokens cannot be shared by {sharding.number} processes")
    return sharding.shard(tensor, dim)


def mesh_of(sharing: int, device: str = "cpu") -> DeviceMesh:
    """A device mesh of all processes, `sharing` consecutive ones to a row, with the dimensions `dp_replicate` and `cp`.

    The group of this process is `mesh_of(2).get_group("cp")`.

    Args:
        sharing: number of processes that share a row.
        device: type of the device that the processes compute on.

    Raises:
        EvaluationError: the number of processes is not a multiple of `sharing`.
    """
    number = distributed.get_world_size() if distributed.is_initialized() else 1
    if sharing < 1 or number % sharing:
        raise EvaluationError(f"{sharing} processes to a row, but {number} in all; a multiple is needed")
    return init_device_mesh(device, (number // sharing, sharing), mesh_dim_names=("dp_replicate", "cp"))


def sharing_of(model: nn.Module) -> ContextParallel | None:
    """The object that `context_parallel` yielded for this model, within its block; else None."""
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    return next((ContextParallel(hook.group) for hook in hooks if isinstance(hook, RowHook)), None)


@dataclass(frozen=True)
class ContextParallel:
    """The processes of a `group` and their parts of a row."""

    group: Any = None

    def shard(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Take the part of this process, as the function `shard` does.

        Args:
            tensor: `(batch, length, ...)`, the same on every process.
            dim: the axis of tokens.
        """
        return shard(tensor, dim, self.group)

    def gather(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Undo `shard`: the whole row on every process, in order. The gradients of all processes are summed.

        Args:
            tensor: the part of this process, `(batch, tokens, ...)`.
            dim: the axis of tokens.
        """
        lengths = torch.tensor([tensor.shape[dim]], device=tensor.device)
        distributed.all_reduce(lengths, group=self.group)
        return Sharding.of_row(int(lengths), self.group).all_gather(tensor, dim)


@contextmanager
def context_parallel(model: nn.Module, group: Any = None, backend: Backend = "gather") -> Iterator[ContextParallel]:
    """Within the block, the processes of a group call the model with the parts of a row that `shard` gives them.

    The block must contain the backward too, because gradient checkpointing calls attention again. Each process computes
    a parameter's gradient from its own tokens. The sum over the group is the gradient of the row, so divide the loss by
    the targets of the whole row, and add the gradients up. `DistributedDataParallel` and `fully_shard` take their mean:
    multiply the loss by the number of processes.

    Args:
        model: a model of Transformers, with or without a scheme, also inside PEFT, `DistributedDataParallel` or
            `fully_shard`.
        group: a group of `torch.distributed`; default all processes.
        backend: `"gather"` holds the keys and values of one layer for the whole row; `"ulysses"` exchanges heads, whose
            number must be a multiple of the number of processes.

    Raises:
        UnsupportedModel: a part of the model or of its scheme cannot share a row; the message names it.
        EvaluationError: `torch.distributed` has no processes, or the backend is unknown.

    Example:
        >>> with context_parallel(model) as parallel:
        ...     ids, targets = parallel.shard(rows), parallel.shard(shifted)
        ...     model(ids, labels=ids, shift_labels=targets, num_items_in_batch=count).loss.backward()
    """
    if backend not in get_args(Backend):
        raise EvaluationError(f"backend={backend!r}: {did_you_mean(str(backend), get_args(Backend))}")
    if not distributed.is_available() or not distributed.is_initialized():
        raise EvaluationError("context parallelism needs torch.distributed.init_process_group first")
    for module in model.modules():
        if getattr(prompt := getattr(module, "active_peft_config", None), "is_prompt_learning", False):
            raise UnsupportedModel(
                f"processes cannot share a row: {type(prompt).__name__} puts its tokens before the part of each process"
            )
    changes, is_patched = Changes(), bool(find_handles(model))
    try:
        with torch.device("cpu"):  # whatever the default device is
            parts = _parts(model, changes)
        for stack, plan in parts:
            reason = reason_not_to_share(stack, plan)
            if not reason and backend == "ulysses":
                reason = reason_not_to_divide_heads(stack, plan.scheme, distributed.get_world_size(group))
            if reason:
                raise UnsupportedModel(f"processes cannot share a row: {reason}")
        for stack, _ in parts:
            install_sharing(stack, group, backend, changes, of_batch=not is_patched)
        yield ContextParallel(group)
    finally:
        changes.undo()


def _parts(model: nn.Module, changes: Changes) -> list[tuple[Stack, Plan]]:
    """The stacks of a model with their plans: from the handles if the model has a scheme, else for the checkpoint's own
    positions.
    """
    mounted = [part for handle in find_handles(model) for part in handle.mounted]
    return mounted or [(stack, _native_plan(stack, changes)) for stack in read_stacks(model)]


def _native_plan(stack: Stack, changes: Changes) -> Plan:
    """Plan a stack without a scheme. Positions that the model computes from all tokens of a forward are mounted,
    because each process has only a part of the tokens.
    """
    native = stack.native
    if native is None or (not native.length_dependent and (stack.rotary or stack.absolute)):
        return Plan(native or NoPE())
    plan = plan_mounts(native, stack)
    install(plan, stack, asked_attention("auto"), changes)
    return plan
