"""The sampling of tokens for each request in a shared batch of Transformers.

A batch of Transformers has the same sampling settings for all requests. Here its last logits processor draws the token
of each request by the request's own temperature, top_p and seed, so that the batch only takes the maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

IMPOSSIBLE = -9999.0
"""The log-probability of a token that the model rules out, as in OpenAI's API: JSON has no minus infinity."""


@dataclass(frozen=True)
class Sampling:
    """The settings by which the tokens of one answer are drawn.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_p: the share of the probability from which tokens are drawn, the likeliest first.
        seed: the same seed gives the same answer, whatever else is in the batch.
        top_logprobs: number of alternatives that are reported for each token, beside its own log-probability; None for
            no log-probabilities.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_logprobs: int | None = None

    def draw(self, logits: torch.Tensor, step: int) -> int:
        """Draw the token with the index `step` in an answer, from logits `(vocabulary,)`."""
        if self.temperature == 0:
            return int(logits.argmax())
        above = logits.double() - logits.max()  # at most 0, which no temperature makes infinite
        probabilities, tokens = torch.softmax(above / self.temperature, 0).sort(descending=True)
        upto = probabilities.cumsum(0)
        kept = int((upto - probabilities < self.top_p).sum()) or 1
        # a generator for each token: an answer that is interrupted and taken up again goes on as it would have
        point = np.random.default_rng([self.seed, step]).random() * float(upto[kept - 1])
        return int(tokens[min(int(torch.searchsorted(upto, point, right=True)), kept - 1)])


@dataclass(frozen=True)
class Token:
    """A token of an answer, with log-probabilities (before temperature and top_p) if the request wants them."""

    id: int
    logprob: float | None = None
    alternatives: Sequence[tuple[int, float]] = ()


class Sampler(ContinuousBatchingLogitsProcessor):
    """A logits processor that draws the next token of each request by its own `sampling`; if an answer has started
    again, its prompt ends with `said` tokens of the answer.
    """

    supported_kwargs: ClassVar[dict[str, type]] = {"sampling": Sampling, "said": int}
    ignored_kwargs: ClassVar[tuple[str, ...]] = ()

    def __init__(self, default: Sampling) -> None:
        self.default = default
        self._states: list[Any] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Fill the tensor, `(requests,)`, with zeros, because it carries no setting."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        """Remember the requests of the next step, in the order of their logits; return zeros, `(requests,)`."""
        self._states = [request.state for request in requests_with_new_token]
        return torch.zeros(len(self._states), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """Draw the next tokens: 1 at the drawn token of each request and 0 elsewhere, `(requests, vocabulary)`."""
        chosen = scores.argmax(-1)
        for row, state in enumerate(self._states):
            sampling = state.logit_processor_kwargs.get("sampling", self.default)
            logits = scores[row].float()
            if sampling.temperature:
                # an answer that lost its place begins again with what it had said as a part of its prompt
                said = state.logit_processor_kwargs.get("said", 0)
                said += len(state.initial_tokens) - state._true_initial_tokens if state._true_initial_tokens else 0
                chosen[row] = sampling.draw(logits, said + state.generated_len())
            if sampling.top_logprobs is not None:
                logprobs = logits.log_softmax(-1).clamp(min=IMPOSSIBLE)
                best = logprobs.topk(min(sampling.top_logprobs, len(logprobs)))
                alternatives = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
                token = int(chosen[row])
                state.logprobs.append(Token(token, float(logprobs[token]), alternatives))
        return torch.zeros_like(scores).scatter_(-1, chosen[:, None], 1)
