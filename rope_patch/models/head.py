"""The language-model head by itself: logits of hidden states, a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rope_patch.errors import EvaluationError

Head = Callable[[torch.Tensor], torch.Tensor]
"""Logits `(batch, rows, vocabulary)` of hidden states `(batch, rows, hidden)`, as the stack would have given them."""


def find_language_model(model: nn.Module) -> PreTrainedModel:
    """The Transformers model with a language-model head, in `model` itself or in what it wraps.

    Raises:
        EvaluationError: when there is none.
    """
    for module in model.modules():
        if not isinstance(module, PreTrainedModel) or not module.can_generate():
            continue
        if module.base_model is not module or module.config.is_encoder_decoder:
            return module
    raise EvaluationError(f"{type(model).__name__} has no language-model head, so it predicts no token")


@contextmanager
def head_alone(model: PreTrainedModel, output_type: type) -> Iterator[Head]:
    """The head exactly as the model applies it, as a function of hidden states.

    Families scale or cap their logits in their own `forward` (Cohere, Gemma 2, Granite), so that `forward` is what
    runs; in place of the stack stands a module that hands out the hidden states it was given. It has no parameters,
    so within the context `model.named_parameters()` are those of the head: all of them, be they tied to the
    embedding, or put there by PEFT. Gradients pass through as they would behind the stack, which returns outputs of
    the `output_type`.

    Raises:
        EvaluationError: the model has no stack apart from its head, or, when the head is called, what it computes is
            not a function of the hidden states alone.
    """
    stack = separate_stack(model)
    prefix, stand_in = model.base_model_prefix, _StandIn(output_type)
    model._modules[prefix] = stand_in

    def head(states: torch.Tensor) -> torch.Tensor:
        return _apply_head(model, stand_in, states)

    try:
        yield head
    finally:
        model._modules[prefix] = stack


def separate_stack(model: PreTrainedModel) -> nn.Module:
    """Everything below the head.

    Raises:
        EvaluationError: when the model is not made of a stack and a head, as encoder-decoders are not.
    """
    if model.base_model is model:
        raise EvaluationError(f"{type(model).__name__} has no stack of its own below its head")
    return model.base_model


def _apply_head(model: PreTrainedModel, stand_in: _StandIn, states: torch.Tensor) -> torch.Tensor:
    stand_in.states = states
    unused = torch.zeros(states.shape[:2], dtype=torch.long, device=states.device)
    # not `model()`: hooks and wrappers are there for calls of the whole model, such as those by which FSDP2 gathers it
    outputs = type(model).forward(model, input_ids=unused, use_cache=False, return_dict=True)
    if stand_in.states is not None or outputs.logits.shape[:2] != states.shape[:2]:
        raise EvaluationError(
            f"{type(model).__name__}: its head is not a function of the hidden states of `{model.base_model_prefix}`"
        )
    return outputs.logits


class _StandIn(nn.Module):
    """Returns, once, the hidden states it was given, whatever it is called with."""

    def __init__(self, output_type: type) -> None:
        super().__init__()
        self.output_type = output_type
        self.states: torch.Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Any:
        states, self.states = self.states, None
        return self.output_type(last_hidden_state=states)
