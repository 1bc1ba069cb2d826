"""Requests in turn, each with its own cache, for models whose layers keep more than keys and values.

The continuous batching of Transformers pages the keys of full and of sliding attention, and refuses all other layers. A
hybrid model (Qwen3-Next, Qwen3.5) also has layers with a state. Here each request keeps the cache that `generate` would
create, and every step of the batch draws one token, or reads one piece of a prompt, for each request.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus, OutputRouter
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

from rope_patch.models.arguments import name_of_cache
from rope_patch.serving.sampling import Sampler

_PAGED = {"full_attention", "sliding_attention"}


def needs_turns(config: Any) -> bool:
    """Whether a text model has layers that the continuous batching of Transformers cannot page."""
    return not _PAGED.issuperset(getattr(config, "layer_types", None) or ())


class Waiting:
    """A request in a step, in the form that samplers of Transformers read.

    Attributes:
        state: state of the request.
    """

    def __init__(self, state: RequestState) -> None:
        self.state, self.cache = state, None


class OneByOne:
    """A stand-in for Transformers' `ContinuousBatchingManager`, with the methods that `Batch` uses.

    Args:
        eos: ids that end an answer.
        most: maximum number of prompt tokens that one step reads.
    """

    def __init__(self, model: Any, sampler: Sampler, eos: int | list[int] | None, most: int) -> None:
        self.model, self.sampler, self.eos, self.most = model, sampler, eos, most
        self.output_router = OutputRouter()
        self.background_thread_status = BackgroundThreadStatus()
        self._requests: dict[str, Waiting] = {}
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="rope-patch-turns", daemon=True)

    def start(self) -> None:
        """Start the thread of the model."""
        self._thread.start()

    def is_running(self) -> bool:
        """Whether the thread takes requests."""
        return self._thread.is_alive()

    def stop(self, block: bool = True, timeout: float | None = None, **_: Any) -> None:
        """End the thread after its current step."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        if block and self._thread.is_alive():
            self._thread.join(timeout)

    def register_result_handler(self, request_id: str, callback: Callable[[Any], None]) -> None:
        """Register a callback for each output of a request; it runs in the current event loop."""
        with self.output_router._lock:
            self.output_router.result_handlers[request_id] = (callback, asyncio.get_running_loop())

    def add_request(
        self, input_ids: list[int], request_id: str, max_new_tokens: int, streaming: bool = False, **settings: Any
    ) -> str | None:
        """Add a request, with `settings` for the sampler; returns None if the thread has ended."""
        state = RequestState(
            request_id=request_id,
            initial_tokens=list(input_ids),
            max_new_tokens=max_new_tokens,
            eos_token_id=self.eos,
            streaming=streaming,
            logit_processor_kwargs=settings,
        )
        with self._changed:
            if self._ended or not self.is_running():
                return None
            self._requests[request_id] = Waiting(state)
            self._changed.notify()
        return request_id

    def cancel_request(self, request_id: str) -> None:
        """Remove a request."""
        with self._changed:
            self._requests.pop(request_id, None)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._requests or self._ended)
                if self._ended:
                    return
                requests = list(self._requests.values())
            for request in requests:
                if self._requests.get(request.state.request_id) is request and not self._ended:
                    self._step(request)

    def _step(self, request: Waiting) -> None:
        """Read the next piece of a prompt, or draw the next token."""
        state = request.state
        try:
            token = self._next_token(request)
        except Exception as failure:
            logging.getLogger("uvicorn.error").exception("a request failed")
            self.cancel_request(state.request_id)
            self.output_router.fail_and_deliver(state, failure)
            return
        if token is None:
            return
        state.status = RequestStatus.DECODING
        if state.update_and_check_completion(token, None):
            self.cancel_request(state.request_id)
        if state.streaming or state.status >= RequestStatus.FINISHED:
            self.output_router.deliver(state.to_generation_output())

    @torch.inference_mode()
    def _next_token(self, request: Waiting) -> int | None:
        """Run the model on a piece of the prompt or on the last token, and draw the next one; None if more of the
        prompt follows.
        """
        state = request.state
        if request.cache is None:
            request.cache = DynamicCache(config=self.model.config.get_text_config())
        if state.remaining_prefill_tokens:
            read, state.remaining_prefill_tokens = (
                state.remaining_prefill_tokens[: self.most],
                state.remaining_prefill_tokens[self.most :],
            )
        else:
            read = state.generated_tokens[-1:]
        ids = torch.tensor([read], device=self.model.device)
        cache = {name_of_cache(self.model): request.cache}
        output = self.model(input_ids=ids, **cache, use_cache=True, logits_to_keep=1)
        if state.remaining_prefill_tokens:
            return None
        unused = self.sampler.prepare_tensor_args([request])
        return int(self.sampler(output.logits[:, -1], unused).argmax())
