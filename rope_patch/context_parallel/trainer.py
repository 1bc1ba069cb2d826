"""A `Trainer` in which several processes share each row."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader
from transformers import Trainer

from rope_patch.context_parallel.block import ContextParallel, context_parallel, mesh_of, shard
from rope_patch.context_parallel.row import Backend
from rope_patch.errors import EvaluationError

_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Arguments with which collators tell kernels for whole rows where documents begin. For the parts of a row,
`position_ids` show it.
"""


class ContextParallelTrainer(Trainer):
    """A `transformers.Trainer` in which every `sharing` consecutive processes share each row: they read the same rows,
    and each computes its part. Loss, weights and evaluation results equal those of a single process.

    Args:
        arguments, others: the arguments of `Trainer`; a `compute_loss_func` receives its part of labels that are
            shifted already.
        sharing: number of processes that share a row; the number of all processes must be a multiple of it.
        backend: see `context_parallel`.

    Raises:
        EvaluationError: the number of all processes is not a multiple of `sharing`, or labels are smoothed, which
            shifts them again.
    """

    def __init__(self, *arguments: Any, sharing: int = 1, backend: Backend = "gather", **others: Any) -> None:
        self._sharing, self._backend, self._counting = sharing, backend, False
        super().__init__(*arguments, **others)
        if sharing > 1 and self.args.label_smoothing_factor:
            raise EvaluationError(
                f"label_smoothing_factor={self.args.label_smoothing_factor} is not allowed with rows that processes "
                "share; use 0, or a compute_loss_func"
            )

    @functools.cached_property
    def _mesh(self) -> DeviceMesh:
        return mesh_of(self._sharing, self.args.device.type)

    def get_cp_size(self) -> int:
        """The number of processes that read the same targets, so that Trainer counts the targets once."""
        return 1 if self._counting else self._sharing

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Count the targets of a step once, although every process of a row counts all of them. Transformers 5.17
        divides by the sizes of accelerate's config, and 5.23 by `get_cp_size`; this method divides by neither.
        """
        self._counting = True
        try:
            number = super()._get_num_items_in_batch(batch_samples, device)
        finally:
            self._counting = False
        return number if number is None or self._sharing == 1 else number / self._sharing

    def _get_dataloader(self, *arguments: Any, **others: Any) -> DataLoader[Any]:
        if self._sharing == 1:
            return super()._get_dataloader(*arguments, **others)
        state = self.accelerator.state
        before, state.device_mesh = state.device_mesh, self._mesh
        try:  # accelerate gives the processes along `cp` the same rows
            return super()._get_dataloader(*arguments, **others)
        finally:
            state.device_mesh = before

    @property
    def gather_function(self) -> Callable[..., Any]:
        """The function that collects an evaluation from all processes, with each row once, although several processes
        have it.
        """
        return self._gather_function if self._sharing == 1 else self._rows_once

    @gather_function.setter
    def gather_function(self, function: Callable[..., Any]) -> None:
        self._gather_function = function

    def _rows_once(self, data: Any) -> Any:
        ending, groups = self.accelerator.gradient_state, self.accelerator.num_processes // self._sharing
        last = ending.remainder if ending.end_of_dataloader and ending.remainder > 0 else None

        def once(rows: torch.Tensor) -> torch.Tensor:
            return rows.unflatten(0, (groups, self._sharing, -1))[:, 0].flatten(0, 1)[:last]

        return recursively_apply(once, self.accelerator.gather(data))

    def prediction_step(self, *arguments: Any, **others: Any) -> tuple[torch.Tensor | None, Any, Any]:
        """Run the step of `Trainer` on shared rows: the loss of whole rows, their logits `(batch, length, vocabulary)`
        and their labels.

        Args:
            arguments, others: the arguments of `Trainer.prediction_step`.
        """
        loss, logits, labels = super().prediction_step(*arguments, **others)
        if self._sharing > 1 and loss is not None:
            parallel = ContextParallel(self._mesh.get_group("cp"))
            distributed.all_reduce(loss, group=parallel.group)
            loss /= self._sharing
            logits = logits if logits is None else recursively_apply(parallel.gather, logits)
        return loss, logits, labels

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
        parts = {
            name: shard(values, group=group) if torch.is_tensor(values) else values
            for name, values in inputs.items()
            if name not in _BOUNDARIES
        }
        return functools.partial(context_parallel, model, group, self._backend), parts
