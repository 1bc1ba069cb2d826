"""Requests with settings of their own in one continuous batch of Transformers: `rope-patch serve` answers from it.

A batch of Transformers has one setting for sampling. Here the last of its logits processors draws the token of each
request, from that request's temperature, top_p and seed, and leaves the batch nothing but to take the maximum.
"""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one answer are drawn.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_p: the share of the probability from which tokens are drawn, the likeliest first.
        seed: the same seed gives the same answer, whatever else is in the batch.
        top_logprobs: how many alternatives are reported for each token, beside its own log-probability; None for no
            log-probabilities.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_logprobs: int | None = None

    def draw(self, logits: torch.Tensor, step: int) -> int:
        """The token with this number of an answer, from logits `(vocabulary,)`."""
        if self.temperature == 0:
            return int(logits.argmax())
        probabilities, tokens = torch.softmax(logits.double() / self.temperature, 0).sort(descending=True)
        upto = probabilities.cumsum(0)
        kept = int((upto - probabilities < self.top_p).sum()) or 1
        # a generator for each token: an answer that is interrupted and taken up again goes on as it would have
        point = np.random.default_rng([self.seed, step]).random() * float(upto[kept - 1])
        return int(tokens[min(int(torch.searchsorted(upto, point, right=True)), kept - 1)])


@dataclass(frozen=True)
class Token:
    """A token of an answer, with log-probabilities (before temperature and top_p) if they were asked for."""

    id: int
    logprob: float | None = None
    alternatives: Sequence[tuple[int, float]] = ()


class Sampler(ContinuousBatchingLogitsProcessor):
    """Draws the next token of each request by the request's own `Sampling`."""

    supported_kwargs: ClassVar[dict[str, type]] = {"sampling": Sampling}
    ignored_kwargs: ClassVar[tuple[str, ...]] = ()

    def __init__(self, default: Sampling) -> None:
        self.default = default
        self._states: list[Any] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Nothing is passed by a tensor, `(requests,)`."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        """Keeps the requests of the coming step, in the order of their logits; zeros, `(requests,)`."""
        self._states = [request.state for request in requests_with_new_token]
        return torch.zeros(len(self._states), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """1 at the drawn token of each request and 0 elsewhere, `(requests, vocabulary)`."""
        chosen = scores.argmax(-1)
        for row, state in enumerate(self._states):
            sampling = state.logit_processor_kwargs.get("sampling", self.default)
            logits = scores[row].float()
            if sampling.temperature:
                # a request that lost its place in the cache begins again with what it had said as its prompt
                said = len(state.initial_tokens) - state._true_initial_tokens if state._true_initial_tokens else 0
                chosen[row] = sampling.draw(logits, said + state.generated_len())
            if sampling.top_logprobs is not None:
                logprobs = logits.log_softmax(-1)
                best = logprobs.topk(sampling.top_logprobs)
                alternatives = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
                token = int(chosen[row])
                state.logprobs.append(Token(token, float(logprobs[token]), alternatives))
        return torch.zeros_like(scores).scatter_(-1, chosen[:, None], 1)


@dataclass(frozen=True)
class Piece:
    """The next part of an answer: its text, the tokens that were read for it, and the reason if it is the last."""

    text: str
    tokens: Sequence[Token]
    finish_reason: str | None = None


class Batch:
    """A model that answers any number of requests at a time, each under its own settings.

    Args:
        settings: fields of `ContinuousBatchingConfig`.
    """

    def __init__(self, model: Any, tokenizer: Any, settings: dict[str, Any], default: Sampling) -> None:
        self.tokenizer, self.default = tokenizer, default
        # tokens are drawn in Python, one step after the other. Transformers 5.17 lacks some of the fields
        settings = {"use_async_batching": False, "use_cuda_graph": False, **settings}
        fields = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
        config = ContinuousBatchingConfig(**{name: value for name, value in settings.items() if name in fields})
        eos = model.generation_config.eos_token_id
        greedy = GenerationConfig(do_sample=False, eos_token_id=eos, pad_token_id=model.generation_config.pad_token_id)
        self.manager = model.init_continuous_batching(generation_config=greedy, continuous_batching_config=config)
        processors = ContinuousBatchingLogitsProcessorList(LogitsProcessorList([Sampler(default)]))
        processors.tensors_required = 1
        self.manager.logit_processor = processors
        self._eos = {eos} if isinstance(eos, int) else set(eos or ())

    @property
    def error(self) -> BaseException | None:
        """Why the batch ended, if it did."""
        fatal: BaseException | None = self.manager.background_thread_status.fatal_error
        return fatal

    async def answer(
        self, prompt: Sequence[int], new_tokens: int, sampling: Sampling, stop: Sequence[str] = ()
    ) -> AsyncIterator[Piece]:
        """The pieces of one answer, as they come; the request leaves the batch when the iterator is closed.

        Args:
            prompt: ids.
            new_tokens: the maximum length of the answer.
            stop: strings before which the text ends.

        Raises:
            RuntimeError: the batch has ended, or failed on this request.
        """
        if self.error is not None:
            raise RuntimeError("the batch has ended") from self.error
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        name = f"answer-{uuid.uuid4()}"
        self.manager.register_result_handler(name, outputs.put_nowait)
        self.manager.add_request(
            list(prompt), request_id=name, max_new_tokens=new_tokens, streaming=True, sampling=sampling
        )
        text, known, finished = Text(self.tokenizer, stop), 0, False
        try:
            while not finished:
                output = await outputs.get()
                if output.error is not None:
                    raise RuntimeError(output.error)
                finished = output.is_finished()
                ids = output.generated_tokens
                tokens = output.logprobs[known:] if output.logprobs else [Token(token) for token in ids[known:]]
                known = len(ids)
                new = text.add(ids, last=finished)
                reason = None
                if text.stopped or (finished and ids and ids[-1] in self._eos):
                    reason = "stop"
                elif finished:
                    reason = "length"
                yield Piece(new, tokens, reason)
                if text.stopped:
                    return
        finally:
            if not finished:
                self.manager.cancel_request(name)


class Text:
    """The text of an answer while its tokens come: what is certain by now, up to a stop string."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, [string for string in stop if string]
        self._settled, self._read = 0, 0  # tokens whose text stands; tokens that were decoded with them
        self._text, self._given = "", 0
        self.stopped = False

    def add(self, ids: Sequence[int], *, last: bool) -> str:
        """What is new in the text of `ids`, all tokens so far."""
        # decoded with the tokens before, since many tokenizers write a space between tokens and not at the start
        before = self._decode(ids[self._settled : self._read])
        both = self._decode(ids[self._settled :])
        if last or not both.endswith("�"):  # half of a character
            self._text += both[len(before) :]
            self._settled, self._read = self._read, len(ids)
        end = len(self._text)
        searched = max(0, self._given - max(map(len, self._stop), default=0))
        places = [place for string in self._stop if (place := self._text.find(string, searched)) >= 0]
        if places:
            end, self.stopped = min(places), True
        elif not last:
            end -= max((self._open(string) for string in self._stop), default=0)
        new = self._text[self._given : end]
        self._given = max(end, self._given)
        return new

    def _open(self, string: str) -> int:
        """How many last characters of the text may begin a stop string."""
        longest = min(len(string) - 1, len(self._text))
        return next((size for size in range(longest, 0, -1) if self._text.endswith(string[:size])), 0)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))
