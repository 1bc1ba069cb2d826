"""LongCE: a token that the model predicts better from the whole row than from a short context weighs more.

    loss = mean over i of w[i] (-ln p(x[i] | all before it)),   w[i] = min(exp(loss_short[i] - loss_full[i]), 5)

loss_short is the loss given a context that begins at the last multiple of d up to i - K. Neither it nor w has a
gradient. The first K tokens have no shorter context: w = 1. The trained model itself computes the weights.

Source: Fang et al., 2410.23771, whose code has K = 4096 and d = 1024 for a model of L = 4096.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn

from rope_patch.context_parallel.block import sharing_of
from rope_patch.errors import EvaluationError
from rope_patch.models.head import Head

_MOST = 5.0  # gamma


@dataclass(frozen=True)
class LongCE:
    """The weights of tokens, for `chunked_loss`.

    Args:
        short: K, the minimum number of tokens in a short context.
        step: d, the number of tokens whose short contexts begin at the same place; smaller steps cost more forwards.

    Raises:
        EvaluationError: `short` or `step` is below 1.
    """

    short: int
    step: int

    def __post_init__(self) -> None:
        for name in ("short", "step"):
            if getattr(self, name) < 1:
                raise EvaluationError(f"{name}={getattr(self, name)} is not allowed; it must be at least 1")

    @classmethod
    def beyond(cls, training_length: int, row_length: int) -> LongCE:
        """Set K = L and d = L / 4 tokens, for rows of this length.

        Raises:
            EvaluationError: no token of a row has more than L tokens before it, so that all tokens weigh the same.
        """
        if row_length <= training_length:
            raise EvaluationError(
                f"loss=longce with rows of {row_length} tokens is not allowed; it needs rows longer than the training "
                f"length of {training_length}"
            )
        return cls(training_length, max(1, training_length // 4))

    def weigher(
        self, stack: nn.Module, head: Head, inputs: Mapping[str, Any], targets: torch.Tensor, rows: int
    ) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """A function that gives the weights of some tokens of a batch, `(tokens,)`, from their places in it and their
        losses, both `(tokens,)`.

        For the arguments see `short_losses`.
        """
        short = self.short_losses(stack, head, inputs, targets, rows).flatten()

        def weigh(places: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
            return (short[places] - losses.detach()).exp().clamp(max=_MOST).nan_to_num(1.0)

        return weigh

    @torch.no_grad()
    def short_losses(
        self, stack: nn.Module, head: Head, inputs: Mapping[str, Any], targets: torch.Tensor, rows: int
    ) -> torch.Tensor:
        """The losses from short contexts, `(batch, length)` as the shifted targets; NaN for the first K tokens.

        Args:
            inputs: inputs of the stack. Tensors whose second dimension is the length are cut; positions begin at 0
                again.
            rows: number of positions that pass through the head at a time.
        """
        parallel, length = sharing_of(stack), targets.shape[1]
        if parallel is not None:  # the processes that share a row share its short contexts too
            of_tokens = {name for name, value in inputs.items() if _has_tokens(value, length)}
            inputs = {name: parallel.gather(x) if name in of_tokens else x for name, x in inputs.items()}
            targets = parallel.gather(targets)
            length = targets.shape[1]
        losses = torch.zeros(targets.shape, dtype=torch.float32, device=targets.device)
        for start in range(0, length - self.short, self.step):
            span = slice(start, start + self.short + self.step - 1)
            part = {name: _part(name, value, span, length) for name, value in inputs.items()}
            places = torch.arange(length, device=targets.device)[None, span]
            if parallel is not None:
                part = {name: parallel.shard(x) if name in of_tokens else x for name, x in part.items()}
                places = parallel.shard(places)
            states = stack(**{**part, "use_cache": False, "return_dict": True}).last_hidden_state
            scored = places[0] >= start + self.short - 1
            for chunk, place in zip(states[:, scored].split(rows, 1), places[0, scored].split(rows), strict=True):
                logits = head(chunk).float().transpose(1, 2)
                losses[:, place] = nn.functional.cross_entropy(logits, targets[:, place], reduction="none")
        if parallel is not None:
            distributed.all_reduce(losses, group=parallel.group)
        losses[:, : self.short - 1] = torch.nan
        return losses if parallel is None else parallel.shard(losses)


def _has_tokens(value: Any, length: int) -> bool:
    return torch.is_tensor(value) and value.ndim >= 2 and value.shape[1] == length


def _part(name: str, value: Any, span: slice, length: int) -> Any:
    if not _has_tokens(value, length):
        return value
    part = value[:, span]
    if name != "position_ids":
        return part
    first = (part.diff(dim=1, prepend=part[:, :1]) < 0).cumsum(1) == 0  # tokens of the document that was cut
    return torch.where(first, part - part[:, :1], part)
