"""Negative log-likelihood without the logits of the whole length."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rope_patch.errors import EvaluationError

ROWS_PER_CHUNK = 128
"""How many positions pass through the language-model head at once."""


@torch.no_grad()
def chunked_nll(
    model: nn.Module, input_ids: torch.Tensor, targets: torch.Tensor, rows_per_chunk: int = ROWS_PER_CHUNK
) -> torch.Tensor:
    """-ln p(target | everything before it), in float32, for the last positions of the input.

    The stack runs once, over the whole length. The head, which is where memory would grow with length x vocabulary,
    sees only the scored positions, a chunk at a time.

    Args:
        model: a causal language model of Transformers, also inside PEFT or another wrapper.
        input_ids: the context.
        targets: what the last `scored` positions of the context have to predict: `targets[:, -1]` is the token that
            follows the context.
        rows_per_chunk: positions per call of the head.

    Shape:
        input_ids `(batch, length)`, targets `(batch, scored)` with scored <= length; returns `(batch, scored)`.

    Raises:
        EvaluationError: when there are more targets than positions, or the model's head cannot be called by itself.
    """
    scored, length = targets.shape[1], input_ids.shape[1]
    if scored > length:
        raise EvaluationError(f"{scored} targets for a context of {length} tokens: at most {length} are predicted")
    language_model = find_language_model(model)
    outputs = language_model.base_model(input_ids=input_ids, use_cache=False, return_dict=True)
    hidden = outputs.last_hidden_state[:, length - scored :]
    chunks = zip(hidden.split(rows_per_chunk, dim=1), targets.split(rows_per_chunk, dim=1), strict=True)
    with _head_alone(language_model, type(outputs)) as head:
        return torch.cat([_nll(head(states), expected) for states, expected in chunks], dim=1)


def _nll(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """`(batch, rows, vocabulary)` and `(batch, rows)` to `(batch, rows)`."""
    return nn.functional.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")


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
def _head_alone(model: PreTrainedModel, output_type: type) -> Iterator[Any]:
    """The head exactly as the model applies it, as a function of hidden states.

    Families scale or cap their logits in their own `forward` (Cohere, Gemma 2, Granite), so that `forward` is what
    runs; in place of the stack stands a module that hands out the hidden states it was given.
    """
    prefix, stack = model.base_model_prefix, model.base_model
    stand_in = _StandIn(output_type)
    model._modules[prefix] = stand_in
    try:
        yield lambda states: _apply_head(model, stand_in, states)
    finally:
        model._modules[prefix] = stack


def _apply_head(model: PreTrainedModel, stand_in: _StandIn, states: torch.Tensor) -> torch.Tensor:
    """Logits `(batch, rows, vocabulary)` of hidden states `(batch, rows, hidden)`."""
    stand_in.states = states
    unused = torch.zeros(states.shape[:2], dtype=torch.long, device=states.device)
    logits = model(input_ids=unused, use_cache=False, return_dict=True).logits
    if stand_in.states is not None or logits.shape[:2] != states.shape[:2]:
        raise EvaluationError(
            f"{type(model).__name__}: its head is not a function of the hidden states of `{model.base_model_prefix}`"
        )
    return logits


class _StandIn(nn.Module):
    """Returns, once, the hidden states it was given, whatever it is called with."""

    def __init__(self, output_type: type) -> None:
        super().__init__()
        self.output_type = output_type
        self.states: torch.Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Any:
        states, self.states = self.states, None
        return self.output_type(last_hidden_state=states)
