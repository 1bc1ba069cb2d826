"""Context parallelism in training: several processes share each row.

`rope_patch.sharing` has what they exchange, and works in any loop of your own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader
from transformers import Trainer

from rope_patch.mounting.shared_row import Backend
from rope_patch.sharing import ContextParallel, context_parallel, mesh_of, shard

__all__ = ["ContextParallel", "ContextParallelTrainer", "context_parallel", "mesh_of", "shard"]


class ContextParallelTrainer(Trainer):
    """`transformers.Trainer` in which every `sharing` consecutive processes share each row: they read the same rows,
    and each computes its part. Loss and weights are those of one process.

    Args:
        arguments, others: as for `Trainer`.
        sharing: number of processes; that of all processes is a multiple.
        backend: see `context_parallel`.

    Raises:
        EvaluationError: the number of all processes is no multiple.
    """

    def __init__(self, *arguments: Any, sharing: int = 1, backend: Backend = "gather", **others: Any) -> None:
        self._sharing, self._backend = sharing, backend
        super().__init__(*arguments, **others)

    @functools.cached_property
    def _mesh(self) -> DeviceMesh:
        return mesh_of(self._sharing, self.args.device.type)

    def get_cp_size(self) -> int:
        """The number of processes that read the same targets, which Trainer then counts once."""
        return self._sharing

    def _get_dataloader(self, *arguments: Any, **others: Any) -> DataLoader[Any]:
        if self._sharing == 1:
            return super()._get_dataloader(*arguments, **others)
        state = self.accelerator.state
        before, state.device_mesh = state.device_mesh, self._mesh
        try:  # accelerate gives the processes along `cp` the same rows
            return super()._get_dataloader(*arguments, **others)
        finally:
            state.device_mesh = before

    def _prepare_context_parallel_inputs(
        self, model: nn.Module, inputs: dict[str, Any]
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        if self._sharing == 1:
            return super()._prepare_context_parallel_inputs(model, inputs)
        group = self._mesh.get_group("cp")
        if "labels" in inputs:
            shifted = nn.functional.pad(inputs["labels"][..., 1:], (0, 1), value=-100)
            inputs = {"shift_labels": shifted, **inputs}
            inputs["labels"] = inputs["shift_labels"]
        parts = {name: shard(x, group=group) if torch.is_tensor(x) else x for name, x in inputs.items()}
        return functools.partial(context_parallel, model, group, self._backend), parts
