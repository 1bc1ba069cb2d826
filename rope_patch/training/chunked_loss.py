"""Chunked loss: the loss of a training step without the logits of the whole length.

With a vocabulary of 128,000, the logits of 32,000 tokens and their gradient are 32 GB of float32: more than anything
else in the step. Here a few rows pass through the head at a time, and their gradient is computed in the forward,

    d loss / d states[rows]  and  d loss / d head += gradient of these rows,

so that no tensor of the size of the vocabulary outlives its rows. The backward only scales these gradients. There is no
additional work: every row passes through the head once forward and once backward, as with all logits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from rope_patch.errors import EvaluationError, UnsupportedModel
from rope_patch.models.head import Head, find_language_model, head_alone, separate_stack
from rope_patch.training.long_ce import LongCE

_IGNORED = -100  # the label of positions without a prediction, as everywhere in Transformers


@contextmanager
def chunked_loss(model: nn.Module, rows_per_chunk: int = 256, *, long_ce: LongCE | None = None) -> Iterator[None]:
    """Within the block, `model(..., labels=labels)` returns its usual loss, without logits.

    The head of the model, a causal one of Transformers, sees `rows_per_chunk` positions at a time. The model itself is
    called, so `Trainer`, PEFT, `DistributedDataParallel` and `fully_shard` work around it without changes. Terms that a
    model adds to its loss, such as the balance of experts, are omitted.

    Args:
        long_ce: weights of the tokens, which turn the loss into LongCE; its short contexts cost further forwards.

    Raises:
        EvaluationError: the model has no head that can run alone, or `rows_per_chunk` is below 1.
        UnsupportedModel: within the block, where `nn.DataParallel` would run copies of the model.

    Example:
        >>> with chunked_loss(model):
        ...     Trainer(model, arguments, train_dataset=rows).train()
    """
    if rows_per_chunk < 1:
        raise EvaluationError(f"rows_per_chunk={rows_per_chunk} is not allowed; it must be at least 1")
    language_model = find_language_model(model)
    separate_stack(language_model)
    forward, before = language_model.forward, vars(language_model).get("forward")

    @functools.wraps(forward)
    def chunked(*args: Any, labels: torch.Tensor | None = None, **inputs: Any) -> Any:
        if labels is None:
            return forward(*args, **inputs)
        inputs = {"input_ids": args[0]} | inputs if args else inputs
        return _loss_alone(language_model, labels, rows_per_chunk, long_ce, **inputs)

    language_model.forward = chunked
    language_model._replicate_for_data_parallel = _refuse_replicas
    try:
        yield
    finally:  # also removes wrappers that were added in the meantime, such as accelerate's autocast
        del language_model._replicate_for_data_parallel
        del language_model.forward
        if before is not None:
            language_model.forward = before


def _refuse_replicas() -> None:
    """Take the place of the method by which `nn.DataParallel` copies a module.

    Raises:
        UnsupportedModel: always.
    """
    raise UnsupportedModel(
        "chunked_loss replaces the forward of one model, and nn.DataParallel, which Trainer uses if a plain script "
        "sees several GPUs, runs copies of it; start a process for each GPU: torchrun --nproc-per-node=2 script.py"
    )


def _loss_alone(
    model: PreTrainedModel,
    labels: torch.Tensor,
    rows_per_chunk: int,
    long_ce: LongCE | None,
    *,
    shift_labels: torch.Tensor | None = None,
    num_items_in_batch: torch.Tensor | int | None = None,
    **inputs: Any,
) -> CausalLMOutput:
    """The loss of Transformers: the mean of -ln p over all labels, or their sum divided by `num_items_in_batch`."""
    inputs = {name: value for name, value in inputs.items() if value is not None}
    stack = model.base_model
    outputs = stack(**{**inputs, "use_cache": False, "return_dict": True})
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels[..., 1:], (0, 1), value=_IGNORED)
    shift_labels = shift_labels.to(outputs.last_hidden_state.device)
    states, targets = outputs.last_hidden_state.flatten(0, 1), shift_labels.flatten()
    places = (targets != _IGNORED).nonzero()[:, 0]
    count = len(places) if num_items_in_batch is None else num_items_in_batch
    with head_alone(model, type(outputs)) as head:
        trained = [value for value in model.parameters() if value.requires_grad and torch.is_grad_enabled()]
        weigh = None
        if long_ce is not None:
            rows = max(1, rows_per_chunk // len(shift_labels))
            weigh = long_ce.weigher(stack, head, inputs, shift_labels, rows)
        loss = _ChunkedLoss.apply(head, targets, places.split(rows_per_chunk), states, weigh, *trained)
    return CausalLMOutput(loss=loss / (count.to(loss.device) if torch.is_tensor(count) else max(1, count)))


class _ChunkedLoss(torch.autograd.Function):
    """The summed loss of rows of states, with its gradient computed in the forward."""

    @staticmethod
    def forward(
        ctx: Any,
        head: Head,
        targets: torch.Tensor,
        chunks: Sequence[torch.Tensor],
        states: torch.Tensor,
        weigh: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        """Compute loss and gradients, so both run under the current autocast."""
        # a row's gradient comes from one chunk, but a parameter's is a sum over chunks: in bfloat16 the later ones
        # would be rounded away, whereas one product over all rows rounds once
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in parameters]
        states_gradient = torch.zeros_like(states) if states.requires_grad else None
        total = states.new_zeros((), dtype=torch.float32)
        for rows in chunks:
            chunk = states[rows].requires_grad_(states_gradient is not None)
            inputs = [*parameters] if states_gradient is None else [*parameters, chunk]
            with torch.enable_grad():
                losses = nn.functional.cross_entropy(head(chunk[None])[0].float(), targets[rows], reduction="none")
                loss = (losses if weigh is None else losses * weigh(rows, losses)).sum()
                gradients = torch.autograd.grad(loss, inputs, allow_unused=True) if inputs else ()
            for gradient_sum, gradient in zip(sums, gradients, strict=False):
                if gradient is not None:
                    gradient_sum += gradient
            if states_gradient is not None:
                states_gradient[rows] = gradients[-1]
            total += loss.detach()
        if torch.is_autocast_enabled(states.device.type):
            # the cache keeps a copy of the head, which is no longer needed
            torch.clear_autocast_cache()
        ctx.gradients = [states_gradient, *(s.to(p.dtype) for s, p in zip(sums, parameters, strict=True))]
        return total

    @staticmethod
    def backward(ctx: Any, output_gradient: torch.Tensor) -> Any:
        """Scale in place: a second copy of the head's gradient would be the largest tensor here."""
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph=True: chunked_loss has no second derivatives; compute the loss outside it")
        if ctx.gradients is None:
            raise RuntimeError("the gradient of this loss was already used; compute the loss again")
        gradients, ctx.gradients = ctx.gradients, None
        for gradient in gradients:
            if gradient is not None:
                gradient *= output_gradient
        return None, None, None, gradients[0], None, *gradients[1:]
