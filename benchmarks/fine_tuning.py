"""A training step, forward and backward: the loss in chunks of rows against the logits of the whole length."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import LlamaForCausalLM

from benchmarks.comparison import Shape, Side
from benchmarks.models import llama
from rope_patch.training.chunked_loss import chunked_loss as in_chunks

_LAYERS = 2
_VOCABULARY = 32_000


def chunked_loss(shape: Shape) -> Side:
    """This library's loss, as the mean that models return."""
    model, text = _model_and_text(shape)

    def loss() -> torch.Tensor:
        with in_chunks(model):
            return model(text, labels=text, use_cache=False).loss

    return _step(model, loss)


def default_loss(shape: Shape) -> Side:
    """What the model itself returns for labels."""
    model, text = _model_and_text(shape)
    return _step(model, lambda: model(text, labels=text, use_cache=False).loss)


def stack_alone(shape: Shape) -> Side:
    """The same step without head and loss: some gradient of the last hidden states is there from the start."""
    model, text = _model_and_text(shape)
    gradient = shape.random(1, shape.length, model.config.hidden_size)
    stack = model.base_model
    return Side(lambda: stack(text, use_cache=False).last_hidden_state.backward(gradient), reset=model.zero_grad)


def _step(model: LlamaForCausalLM, loss_of_text: Callable[[], torch.Tensor]) -> Side:
    def run() -> torch.Tensor:
        loss = loss_of_text()
        loss.backward()
        return loss.detach()

    return Side(run, reset=model.zero_grad)


def _model_and_text(shape: Shape) -> tuple[LlamaForCausalLM, torch.Tensor]:
    model = llama(shape, _LAYERS, _VOCABULARY).train()
    return model, torch.randint(1, _VOCABULARY, (1, shape.length), device=shape.device)
