"""The loss of a training step without the logits of the whole length.

With a vocabulary of 128,000, the logits of 32,000 tokens and their gradient are 32 GB of float32: more than anything
else in the step. Here a few rows pass through the head at a time, and their gradient is taken at once, in the forward,

    d loss / d states[rows]   and   d loss / d head += that of these rows,

so that nothing of the size of the vocabulary outlives its rows. The backward has only to scale what is there. It is
no additional work: every row passes through the head once forward and once backward, as it does with all logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rope_patch.errors import EvaluationError
from rope_patch.models.head import Head, find_language_model, head_alone, separate_stack

IGNORED = -100
"""The label of a position that predicts nothing, as everywhere in Transformers."""

ROWS_PER_CHUNK = 256
"""How many positions pass through the language-model head at once."""


class LanguageModelLoss(nn.Module):
    """A language model together with its loss: the sum of -ln p(label) over all labels.

    This module, not the model inside it, is what `DistributedDataParallel` or `fully_shard` has to wrap: the head is
    used here, where the model's own `forward` does not run. A sum, because only the caller knows over how many labels,
    micro-batches and processes the mean is to be taken. Further terms that the model would add to its own loss, such
    as the balance of experts, are not part of it.

    Args:
        model: a causal language model of Transformers, also inside PEFT.
        rows_per_chunk: positions per call of the head.

    Shape:
        input_ids, labels `(batch, length)`; returns a float32 scalar.

    Raises:
        EvaluationError: the model has no head that could be called by itself, `DistributedDataParallel` is inside and
            not around this, or no row fits into a chunk; in `forward`, the labels do not fit the tokens.
    """

    def __init__(self, model: nn.Module, rows_per_chunk: int = ROWS_PER_CHUNK) -> None:
        super().__init__()
        if rows_per_chunk < 1:
            raise EvaluationError(f"rows_per_chunk is {rows_per_chunk}: at least one row passes through the head")
        if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
            raise EvaluationError("wrap the loss in DistributedDataParallel, not the model, or nothing is averaged")
        separate_stack(find_language_model(model))
        self.model = model
        self.rows_per_chunk = rows_per_chunk

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """-ln p(labels | everything before them), summed.

        Args:
            input_ids: the context.
            labels: `labels[:, i]` is the token that position i predicts, the one that follows it; -100 for none.
            position_ids, attention_mask: as the model takes them.
        """
        if labels.shape != input_ids.shape:
            raise EvaluationError(f"labels {tuple(labels.shape)} for tokens {tuple(input_ids.shape)}: one for each")
        # found anew at every call: whatever wraps or shards the model may have replaced what is inside it
        language_model = find_language_model(self.model)
        given = {"position_ids": position_ids, "attention_mask": attention_mask}
        given = {name: value for name, value in given.items() if value is not None}
        outputs = language_model.base_model(input_ids=input_ids, use_cache=False, return_dict=True, **given)
        states, targets = outputs.last_hidden_state.flatten(0, 1), labels.flatten().to(outputs.last_hidden_state.device)
        chunks = (targets != IGNORED).nonzero()[:, 0].split(self.rows_per_chunk)
        with head_alone(language_model, type(outputs)) as head:
            trained = {name: value for name, value in language_model.named_parameters() if value.requires_grad}
            if torch.is_grad_enabled() and (states.requires_grad or trained):
                return _ChunkedLoss.apply(head, targets, chunks, tuple(trained), states, *trained.values())
            return sum((_loss(head(states[None, rows]), targets[rows]) for rows in chunks), _zero(states))


class _ChunkedLoss(torch.autograd.Function):
    """The summed loss of rows of states, with its gradient taken on the way."""

    @staticmethod
    def forward(
        ctx: Any,
        head: Head,
        targets: torch.Tensor,
        chunks: Sequence[torch.Tensor],
        names: Sequence[str],
        states: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        """Everything happens here, and so under the autocast that holds here."""
        # the head sees twins of its parameters: hooks on the parameters themselves fire once, in the real backward
        twins = [parameter.detach().requires_grad_() for parameter in parameters]
        # a row's gradient comes from its chunk alone, but a parameter's is a sum over chunks: in bfloat16 the later
        # ones would be rounded away, where one product over all rows rounds once
        sums = [torch.zeros_like(twin, dtype=_sum_dtype(twin), requires_grad=False) for twin in twins]
        states_gradient = torch.zeros_like(states) if states.requires_grad else None
        total = _zero(states)
        for rows in chunks:
            chunk = states[rows].requires_grad_(states_gradient is not None)
            inputs = twins if states_gradient is None else [*twins, chunk]
            with torch.enable_grad():
                loss = _loss(head(chunk[None], dict(zip(names, twins, strict=True))), targets[rows])
                gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
            for gradient_sum, gradient in zip(sums, gradients, strict=False):
                if gradient is not None:
                    gradient_sum += gradient
            if states_gradient is not None:
                states_gradient[rows] = gradients[-1]
            total += loss.detach()
        if torch.is_autocast_enabled(states.device.type):
            # it keeps a copy of every twin, which no one will ask for again
            torch.clear_autocast_cache()
        ctx.gradients = [states_gradient, *(s.to(p.dtype) for s, p in zip(sums, parameters, strict=True))]
        return total

    @staticmethod
    def backward(ctx: Any, output_gradient: torch.Tensor) -> Any:
        """Scale in place: a second copy of the head's gradient would be the largest thing here."""
        if ctx.gradients is None:
            raise RuntimeError("the gradient of this loss was given out already; compute the loss again")
        gradients, ctx.gradients = ctx.gradients, None
        for gradient in gradients:
            if gradient is not None:
                gradient *= output_gradient
        return None, None, None, None, *gradients


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """`(1, rows, vocabulary)` and `(rows)` to a float32 scalar."""
    return nn.functional.cross_entropy(logits[0].float(), targets, reduction="sum")


def _zero(states: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=torch.float32, device=states.device)


def _sum_dtype(parameter: torch.Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)
