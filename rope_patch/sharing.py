"""Context parallelism: several processes share a row, under every scheme.

Each process holds a part of the tokens and does all work on it but one thing: in every attention layer its queries need
the keys of the others. With `backend="gather"` all keys and values are gathered, and each process scores its own
queries. With `backend="ulysses"` the processes exchange heads for tokens, so that each scores the whole row for some of
the heads. Either way logits, loss and gradients are those of one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rope_patch.attention.shares import Shares
from rope_patch.errors import EvaluationError, UnsupportedModel, did_you_mean
from rope_patch.models.base import Stack
from rope_patch.models.find_stacks import read_stacks
from rope_patch.mounting.plan import Plan
from rope_patch.mounting.row_sharing import RowHook, install_sharing, reason_not_to_share
from rope_patch.mounting.shared_row import Backend
from rope_patch.mounting.undo import Changes
from rope_patch.patching import find_handles, mount_scheme
from rope_patch.schemes import NoPE, Scheme


def shard(tensor: torch.Tensor, dim: int = 1, group: Any = None) -> torch.Tensor:
    """The part of this process of ids, labels, positions or a mask of a whole row.

    Shift labels before: a token and its target are in different parts otherwise. The length need not be a multiple of
    the number of processes.

    Args:
        tensor: `(batch, length, ...)`, the same on every process.
        dim: the axis of tokens.
        group: the processes that share the row; default all.

    Raises:
        EvaluationError: there is no such axis, or it has fewer tokens than processes need.
    """
    if tensor.ndim <= dim:
        raise EvaluationError(f"a tensor of shape {tuple(tensor.shape)} has no tokens along dim={dim}")
    shares = Shares.of(tensor.shape[dim], group)
    if not all(map(shares.tokens, range(shares.number))):
        raise EvaluationError(f"a row of {shares.length} tokens cannot be shared by {shares.number} processes")
    return shares.own(tensor, dim)


def mesh_of(sharing: int, device: str = "cpu") -> DeviceMesh:
    """All processes, `sharing` consecutive ones to a row, with the dimensions `dp_replicate` and `cp`.

    The group of this process is `mesh_of(2).get_group("cp")`.

    Args:
        sharing: number of processes that share a row.
        device: type of the device that they compute on.

    Raises:
        EvaluationError: the number of processes is not a multiple of `sharing`.
    """
    number = distributed.get_world_size() if distributed.is_initialized() else 1
    if sharing < 1 or number % sharing:
        raise EvaluationError(f"{sharing} processes to a row, but {number} in all; a multiple is needed")
    return init_device_mesh(device, (number // sharing, sharing), mesh_dim_names=("dp_replicate", "cp"))


def sharing_of(model: nn.Module) -> ContextParallel | None:
    """What `context_parallel` yielded for this model, within its block; else None."""
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    return next((ContextParallel(hook.group) for hook in hooks if isinstance(hook, RowHook)), None)


@dataclass(frozen=True)
class ContextParallel:
    """What `context_parallel` yields: the processes of a `group` and their parts of a row."""

    group: Any = None

    def shard(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """The part of this process, see `shard`.

        Args:
            tensor: `(batch, length, ...)`, the same on every process.
            dim: the axis of tokens.
        """
        return shard(tensor, dim, self.group)

    def gather(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """The whole row on every process, in order: `shard` back. The gradients of all processes are summed.

        Args:
            tensor: the part of this process, `(batch, tokens, ...)`.
            dim: the axis of tokens.
        """
        lengths = torch.tensor([tensor.shape[dim]], device=tensor.device)
        distributed.all_reduce(lengths, group=self.group)
        return Shares.of(int(lengths), self.group).gathered(tensor, dim)


@contextmanager
def context_parallel(model: nn.Module, group: Any = None, backend: Backend = "gather") -> Iterator[ContextParallel]:
    """Within the block, the processes of a group call the model with the parts of a row that `shard` gives them.

    The block must contain the backward too, because gradient checkpointing calls attention again. The gradients of a
    parameter are those of this process's tokens. Their sum over the group is that of the row, so divide the loss by the
    targets of the whole row, and add the gradients up. `DistributedDataParallel` and `fully_shard` take their mean:
    multiply the loss by the number of processes.

    Args:
        model: of Transformers, under a scheme or none, also inside PEFT, `DistributedDataParallel` or `fully_shard`.
        group: of `torch.distributed`; default all processes.
        backend: `"gather"` holds the keys and values of one layer for the whole row; `"ulysses"` exchanges heads,
            whose number must be a multiple of that of the processes.

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
    with ExitStack() as mounted:
        is_patched = bool(find_handles(model))
        parts = list(_parts(model, mounted))
        mounted.callback((changes := Changes()).undo)
        for stack, plan in parts:
            reason = reason_not_to_share(stack, plan)
            if not reason and backend == "ulysses":
                reason = _undivided_heads(stack, plan.scheme, distributed.get_world_size(group))
            if reason:
                raise UnsupportedModel(f"processes cannot share a row: {reason}")
        for stack, plan in parts:
            install_sharing(stack, plan, group, backend, changes, of_batch=not is_patched)
        yield ContextParallel(group)


def _parts(model: nn.Module, mounted: ExitStack) -> Iterator[tuple[Stack, Plan]]:
    """The stacks of a model with their plans. Without a scheme, positions that the model computes for the tokens of a
    forward are mounted as one.
    """
    handles = find_handles(model)
    if not handles:
        stacks = read_stacks(model)
        for native in dict.fromkeys(stack.native for stack in stacks if stack.native is not None):
            own = [stack for stack in stacks if stack.native == native]
            if native.length_dependent or not all(stack.rotary or stack.absolute for stack in own):
                handles += (mounted.enter_context(mount_scheme(model, native)),)
        if not handles:
            yield from ((stack, Plan(stack.native or NoPE())) for stack in stacks)
    for handle in handles:
        yield from handle.mounted


def _undivided_heads(stack: Stack, scheme: Scheme, number: int) -> str:
    """Why the heads of a stack cannot be divided; empty if they can."""
    if scheme.methods & {"content_bias", "weight_factor", "relative_values"}:
        return f"{scheme} depends on the content of all heads; use backend='gather'"
    for layer in stack.layers:
        kv_heads = layer.heads.num // (getattr(layer.module, "num_key_value_groups", None) or 1)
        if layer.heads.num % number or (kv_heads % number and number % kv_heads):
            return (
                f"{layer.name} has {layer.heads.num} heads and {kv_heads} of keys, which {number} processes cannot "
                "divide; use backend='gather'"
            )
    return ""
