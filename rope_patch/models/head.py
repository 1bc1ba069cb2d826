"""The language-model head alone: it computes logits of hidden states, a few rows at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rope_patch.errors import EvaluationError

Head = Callable[[torch.Tensor], torch.Tensor]
"""A function from the stack's output `(batch, rows, hidden)` to logits `(batch, rows, vocabulary)`."""


def find_language_model(model: nn.Module) -> PreTrainedModel:
    """Find the Transformers model with a language-model head: `model` itself, or a module inside it.

    Raises:
        EvaluationError: there is no such model.
    """
    for module in model.modules():
        if not isinstance(module, PreTrainedModel) or not module.can_generate():
            continue
        if module.base_model is not module or module.config.is_encoder_decoder:
            return module
    raise EvaluationError(f"{type(model).__name__} has no language-model head, so it cannot predict tokens")


@contextmanager
def head_alone(model: PreTrainedModel, output_type: type) -> Iterator[Head]:
    """Build a function of hidden states that applies the head exactly as the model does.

    Families scale or cap their logits in their own `forward` (Cohere, Gemma 2, Granite), so the model's own `forward`
    runs, with the stack replaced by a module that returns given hidden states as outputs of the `output_type`. This
    module has no parameters, so within the context `model.named_parameters()` are all parameters of the head, also
    those that are tied to the embedding or added by PEFT. Gradients flow as they do behind the stack.

    Raises:
        EvaluationError: the model has no stack separate from its head, or, on a call, the head depends on more than the
            hidden states.
    """
    stack = separate_stack(model)
    prefix, stack_output = model.base_model_prefix, _StackOutput(output_type)
    model._modules[prefix] = stack_output

    def head(states: torch.Tensor) -> torch.Tensor:
        stack_output.states = states
        unused = torch.zeros(states.shape[:2], dtype=torch.long, device=states.device)
        # not `model()`: hooks and wrappers, such as those with which FSDP2 gathers weights, expect the whole model
        outputs = type(model).forward(model, input_ids=unused, use_cache=False, return_dict=True)
        if stack_output.states is not None or outputs.logits.shape[:2] != states.shape[:2]:
            raise EvaluationError(
                f"{type(model).__name__}: its head is not a function of the hidden states of `{prefix}`"
            )
        return outputs.logits

    try:
        with _gathered(model):
            yield head
    finally:
        model._modules[prefix] = stack


@contextmanager
def _gathered(model: nn.Module) -> Iterator[None]:
    """Within the block, parts of a head that FSDP2 shards by themselves have whole weights and no hooks. FSDP2 expects
    one forward and one backward. But a head may run often within one forward, each time with its own backward, and on
    each process a different number of times. The backward of the model shards the parts again.
    """
    sharded: list[Any] = [part for part in model.modules() if part is not model and hasattr(part, "unshard")]
    hooks = [(part._forward_pre_hooks, part._forward_hooks) for part in sharded]
    for part in sharded:
        part.unshard()
        part._forward_pre_hooks, part._forward_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        for part, (before, after) in zip(sharded, hooks, strict=True):
            part._forward_pre_hooks, part._forward_hooks = before, after
            if not torch.is_grad_enabled():
                part.reshard()
                _end_forward(part)


def _end_forward(part: Any) -> None:
    """End a forward of parts that FSDP2 shards together, such as the last norm and a head whose hooks did not run. A
    backward ends it too, and newer releases of torch end it by themselves; torch 2.11 would wait for the head, and run
    the norm on sharded weights in the next forward.
    """
    state = part._get_fsdp_state()
    if not hasattr(state, "_force_complete_incomplete_states"):
        state._modules_to_run_forward.clear()


def separate_stack(model: PreTrainedModel) -> nn.Module:
    """The part of a model below its head.

    Raises:
        EvaluationError: the model does not consist of a stack and a head, such as an encoder-decoder.
    """
    if model.base_model is model:
        raise EvaluationError(f"{type(model).__name__} has no stack separate from its head")
    return model.base_model


class _StackOutput(nn.Module):
    """A stand-in for a stack: it returns the hidden states set on it, once, and ignores its arguments."""

    def __init__(self, output_type: type) -> None:
        super().__init__()
        self.output_type = output_type
        self.states: torch.Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Any:
        states, self.states = self.states, None
        return self.output_type(last_hidden_state=states)
