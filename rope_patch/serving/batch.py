"""Requests with individual settings in one continuous batch of Transformers, for `rope-patch serve`.

If a model's layers hold more than keys and values, its requests take turns instead (`serving.one_by_one`).

A batch of Transformers ends when a step fails, with every request in it. Here the batch starts again. Each answer that
was in it continues alone for one token: an answer that fails again is given up, and the others join the batch.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import uuid
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import aclosing, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList

from rope_patch.serving.one_by_one import OneByOne, needs_turns
from rope_patch.serving.sampling import Sampler, Sampling, Token
from rope_patch.serving.text import Text
from rope_patch.serving.turns import Turns

PAGE = 256
"""Tokens in a page, the unit in which the cache is allocated."""

WATCH = 0.5
"""Seconds between two checks whether a batch has ended silently."""

ENDING = 60
"""Seconds that the last step of a batch may take."""


class Interrupted(Exception):
    """Raised to all answers that may have shared a failed step; the batch has then started again."""


class BatchEnded(RuntimeError):
    """Raised when the batch answers no request, because it did not start again after a failure."""


@dataclass(frozen=True)
class Piece:
    """The next part of an answer: its text, its tokens, and the finish reason if it is the last part."""

    text: str
    tokens: Sequence[Token]
    finish_reason: str | None = None


class Batch:
    """A model that answers any number of requests at a time, each under its own settings.

    Args:
        settings: fields of `ContinuousBatchingConfig`; `num_blocks` and `max_batch_tokens` are among them.

    Attributes:
        error: the reason why the batch answers no request; None if it runs. A failed batch tries to start again about
            every second.
    """

    def __init__(self, model: Any, tokenizer: Any, settings: dict[str, Any], default: Sampling) -> None:
        self.model, self.tokenizer, self.default = model, tokenizer, default
        # tokens are drawn in Python, one step after the other. Transformers 5.17 lacks some of the fields
        settings = {"use_async_batching": False, "use_cuda_graph": False, **settings}
        settings |= {"page_size": PAGE, "block_size": PAGE}  # the latter until Transformers 5.17
        fields = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
        self._settings = {name: value for name, value in settings.items() if name in fields}
        self.error: BaseException | None = None
        self.manager: Any = None
        self._turns = Turns(settings["num_blocks"])
        # so that a step has a token for each answer
        self._least = math.ceil(settings["num_blocks"] / settings["max_batch_tokens"])
        eos = model.generation_config.eos_token_id
        self._eos = {eos} if isinstance(eos, int) else set(eos or ())
        self._watch: asyncio.Task[None] | None = None
        self._inside: dict[str, asyncio.Queue[Any]] = {}  # the outputs of each answer that is in the batch now
        self._suspects: set[str] = set()  # answers that were in a batch which failed
        self._failed = asyncio.Event()
        self._running = asyncio.Event()
        self._calm = asyncio.Event()  # running without suspects
        self._alone = asyncio.Lock()

    async def start(self) -> None:
        """Start the batch, and keep it running from now on."""
        await self._restart()
        if self.error is not None:
            raise self.error
        self._watch = asyncio.ensure_future(self._keep_running())

    async def stop(self) -> None:
        """End the batch."""
        if self._watch is not None:
            self._watch.cancel()
        if self.manager is not None:
            await asyncio.to_thread(self.manager.stop, block=True, timeout=2)

    async def answer(
        self, request: Hashable, prompt: Sequence[int], new_tokens: int, sampling: Sampling, stop: Sequence[str] = ()
    ) -> AsyncIterator[Piece]:
        """Yield the pieces of one answer when they are ready; the answer leaves the batch when the iterator is closed.

        Args:
            request: the request of the answer, which may have several answers; requests take turns.
            prompt: ids of the prompt.
            new_tokens: the maximum length of the answer in tokens.
            stop: strings before which the text ends.

        Raises:
            RuntimeError: the batch has ended, or failed on this answer.
        """
        text = Text(self.tokenizer, stop)
        ids: list[int] = []
        async with aclosing(self.tokens(request, prompt, new_tokens, sampling)) as parts:  # type: ignore[type-var]
            async for tokens, last in parts:
                ids += (token.id for token in tokens)
                new = text.add(ids, last=last)
                reason = None
                if text.stopped or (last and ids[-1] in self._eos):
                    reason = "stop"
                elif last:
                    reason = "length"
                yield Piece(new, tokens, reason)
                if text.stopped:
                    return

    async def tokens(
        self, request: Hashable, prompt: Sequence[int], new_tokens: int, sampling: Sampling
    ) -> AsyncIterator[tuple[list[Token], bool]]:
        """Yield the tokens of one answer when they are ready, each with a flag for the last ones; see `answer`."""
        name, said, last = f"answer-{uuid.uuid4()}", list[Token](), False
        pages = max(self._least, math.ceil((len(prompt) + new_tokens) / PAGE))
        try:
            async with self._turns.taken(request, pages):
                while not last:
                    suspect = name in self._suspects
                    async with self._alone if suspect else nullcontext():
                        await (self._running if suspect else self._calm).wait()
                        if self.error is not None:
                            raise BatchEnded("the batch has ended") from self.error
                        ids = [*prompt, *(token.id for token in said)]
                        most = 1 if suspect else new_tokens - len(said)
                        try:
                            async with aclosing(self._joined(name, ids, most, sampling, len(said))) as parts:  # type: ignore[type-var]
                                async for tokens in parts:
                                    said += tokens
                                    last = len(said) >= new_tokens or said[-1].id in self._eos
                                    yield tokens, last
                        except Interrupted as failure:
                            if suspect:
                                raise RuntimeError("the model failed on this request") from failure
                            continue
                    self._acquit(name)
        finally:
            self._acquit(name)

    async def _joined(
        self, name: str, ids: list[int], new_tokens: int, sampling: Sampling, said: int
    ) -> AsyncIterator[list[Token]]:
        """Yield new tokens of one answer while it is in the batch.

        Raises:
            Interrupted: the batch failed.
        """
        manager, outputs = self.manager, asyncio.Queue[Any]()
        self._inside[name] = outputs
        known, finished, interrupted = 0, False, False
        try:
            manager.register_result_handler(name, outputs.put_nowait)
            taken = manager.add_request(
                ids, request_id=name, max_new_tokens=new_tokens, streaming=True, sampling=sampling, said=said
            )
            if taken is None:
                self._failed.set()
            while not finished:
                output = await outputs.get()
                if interrupted := isinstance(output, Interrupted):
                    raise output
                if output.error is not None:  # the watch puts an interruption into all queues
                    self._failed.set()
                    continue
                finished = output.is_finished()
                new = output.generated_tokens[known:]
                tokens = output.logprobs[known:] if output.logprobs else [Token(token) for token in new]
                known += len(new)
                if new:
                    yield tokens
        finally:
            if self._inside.get(name) is outputs:
                del self._inside[name]
            if not finished:
                manager.cancel_request(name)
            if name in self._suspects and not (finished or interrupted):
                # given up while a step may be at work on it: if that fails, nobody else may be in the batch
                self._running.clear()
                self._failed.set()
            with manager.output_router._lock:  # Transformers forgets handlers of finished requests only
                manager.output_router.result_handlers.pop(name, None)

    def _acquit(self, name: str) -> None:
        """Remove an answer from the suspects."""
        self._suspects.discard(name)
        if self._running.is_set() and not self._suspects:
            self._calm.set()

    async def _keep_running(self) -> None:
        """Start the batch again whenever it has failed."""
        while True:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._failed.wait(), WATCH)
            if self._failed.is_set() or self.error is not None or not self.manager.is_running():
                await self._restart()

    async def _restart(self) -> None:
        """Start the batch after an earlier one has ended, and test it with one token."""
        self._running.clear()
        self._calm.clear()
        interrupted, self._inside = self._inside, {}
        self._suspects |= interrupted.keys()
        try:
            await asyncio.to_thread(self._replace)
            await self._try()
            self.error = None
        except Exception as failure:
            logging.getLogger("uvicorn.error").exception("the batch does not run")
            self.error = failure
        self._failed.clear()
        self._running.set()
        if self.error is not None or not self._suspects:
            self._calm.set()
        for outputs in interrupted.values():
            outputs.put_nowait(Interrupted())

    def _replace(self) -> None:
        """End the batch of Transformers, and start a new one."""
        if self.manager is not None:
            self.manager.stop(block=True, timeout=ENDING, hard_stop=True)
            if self.manager.is_running():
                raise TimeoutError(f"a step of the batch takes more than {ENDING} seconds")
        eos, pad = (getattr(self.model.generation_config, f"{name}_token_id") for name in ("eos", "pad"))
        if needs_turns(self.model.config.get_text_config()):
            self.manager = OneByOne(self.model, Sampler(self.default), eos, self._settings["max_batch_tokens"])
            self.manager.start()
            return
        greedy = GenerationConfig(do_sample=False, eos_token_id=eos, pad_token_id=pad)
        config = ContinuousBatchingConfig(**self._settings)
        self.manager = self.model.init_continuous_batching(generation_config=greedy, continuous_batching_config=config)
        processors = ContinuousBatchingLogitsProcessorList(LogitsProcessorList([Sampler(self.default)]))
        processors.tensors_required = 1
        self.manager.logit_processor = processors
        self.manager.start()

    async def _try(self) -> None:
        """Ask the batch for one token.

        Raises:
            Exception: the model fails on any prompt.
        """
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        self.manager.register_result_handler("try", outputs.put_nowait)
        self.manager.add_request([0], request_id="try", max_new_tokens=1)
        while True:
            with suppress(asyncio.TimeoutError):
                output = await asyncio.wait_for(outputs.get(), WATCH)
                break
            if not self.manager.is_running():
                raise RuntimeError("the batch does not start") from self.manager.background_thread_status.fatal_error
        if output.error is not None:
            raise RuntimeError(output.error)
