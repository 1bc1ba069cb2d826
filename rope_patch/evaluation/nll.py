"""Negative log-likelihood without the logits of the whole length."""

from __future__ import annotations

import torch
from torch import nn

from rope_patch.context_parallel.block import sharing_of
from rope_patch.errors import EvaluationError
from rope_patch.models.head import find_language_model, head_alone


@torch.no_grad()
def chunked_nll(
    model: nn.Module, input_ids: torch.Tensor, targets: torch.Tensor, rows_per_chunk: int = 128
) -> torch.Tensor:
    """Compute -ln p(target | everything before it), in float32, for the last positions of the input.

    The stack runs once, over the whole length. The head, whose memory would grow with length x vocabulary, sees only
    the scored positions, a chunk at a time. Within `context_parallel` the processes share the row, and all of them
    return the same losses.

    Args:
        model: a causal language model of Transformers, also inside PEFT or another wrapper.
        targets: the tokens that the last positions must predict; the last target follows the context.

    Shape:
        input_ids `(batch, length)`, targets `(batch, scored)` with scored <= length; returns `(batch, scored)`.

    Raises:
        EvaluationError: there are more targets than positions, or the model's head cannot run alone.
    """
    scored, length = targets.shape[1], input_ids.shape[1]
    if scored > length:
        raise EvaluationError(f"{scored} targets for a context of {length} tokens: at most {length} are predicted")
    language_model = find_language_model(model)
    parallel = sharing_of(model)
    own = input_ids if parallel is None else parallel.shard(input_ids)
    outputs = language_model.base_model(input_ids=own, use_cache=False, return_dict=True)
    states = outputs.last_hidden_state if parallel is None else parallel.gather(outputs.last_hidden_state)
    hidden = states[:, length - scored :].split(rows_per_chunk, dim=1)
    with head_alone(language_model, type(outputs)) as head:
        losses = [
            nn.functional.cross_entropy(head(states).float().transpose(1, 2), expected, reduction="none")
            for states, expected in zip(hidden, targets.split(rows_per_chunk, dim=1), strict=True)
        ]
    return torch.cat(losses, dim=1)
