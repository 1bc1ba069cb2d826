"""Responses, and chats with tools: handlers of Transformers read requests and write responses, and the batches of
`rope-patch serve` generate the tokens.

A handler takes time that grows with the body and the answer. So it runs in a thread of the server, and the batch
generates the tokens in between.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from types import SimpleNamespace
from typing import Any

from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import CBGenerateManager, GenerationState
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from rope_patch.serving.answers import FAILED, event_of
from rope_patch.serving.sampling import Token

UNSAID = 1 << 30  # `max_new_tokens` where a request does not set it

HANDLERS = {"chat": ChatCompletionHandler, "response": ResponseHandler}

Tokens = AsyncIterator[tuple[list[Token], bool]]
Admit = Callable[[list[int], int | None], tuple[Tokens, int]]
"""A function from the ids of a prompt and the requested number of tokens to the tokens of an answer and their limit."""


class Exchange:
    """One request to a handler of Transformers.

    Args:
        kind: one of `HANDLERS`.
        name: the model's name in requests.
        body: the request.
    """

    def __init__(self, kind: str, name: str, model: Any, tokenizer: Any, body: dict[str, Any], admit: Admit) -> None:
        model.generation_config.max_new_tokens = UNSAID
        self.generation = Generation(admit)
        state = State(continuous_batching=True)
        state.manager = self.generation
        self.handler = HANDLERS[kind](OneModel(name, model, tokenizer), state)
        self.body = {"stream": False, **body, "model": name}
        self.stream: Any = None  # the handler's stream, if the request asks for one

    def begin(self) -> None:
        """Read the request; call this in a thread."""
        with suppress(PromptKnown):
            self.stream = self._run()

    def end(self, ids: list[int]) -> Any:
        """Build the response to a request without streaming, from the ids of the answer; call it in a thread."""
        self.generation.answer = ids
        return self._run()

    def _run(self) -> Any:
        # a copy, since handlers write into the body
        return asyncio.run(self.handler.handle_request({**self.body}, self.generation.name))

    async def ids(self) -> list[int]:
        """Collect the ids of the whole answer."""
        found: list[int] = []
        async with aclosing(self.generation.tokens) as parts:
            async for tokens, _ in parts:
                found += (token.id for token in tokens)
        return found

    async def events(self) -> AsyncIterator[Any]:
        """Yield the events of a stream that the handler writes."""
        feeding = asyncio.ensure_future(self.generation.feed())
        try:
            async for event in self.stream.body_iterator:
                yield event
        except Exception:
            logging.getLogger("uvicorn.error").exception("a request failed")
            yield event_of({"error": FAILED})
        finally:
            feeding.cancel()


class PromptKnown(Exception):
    """Raised when a handler has read its request and waits for the answer."""


class Generation(CBGenerateManager):
    """The generation of one answer, in the form of a batch of Transformers, as a handler expects it."""

    background_thread_status = SimpleNamespace(fatal_error=None)

    def __init__(self, admit: Admit) -> None:
        super().__init__()
        self._cb = self
        self._admit = admit
        self.name = str(uuid.uuid4())
        self.tokens: Any = None
        self.new_tokens = 0
        self.answer: list[int] | None = None
        self._pass_on: Callable[[Any], None] = lambda output: None

    def init_cb(self, model: Any, gen_config: Any) -> None:
        """No-op: the batches run already."""

    def generate_streaming(self, model: Any, processor: Any, inputs: Any, config: Any, *a: Any, **k: Any) -> Any:
        """Generate as Transformers does, after the server has admitted the prompt."""
        self._meet(inputs, config)
        return super().generate_streaming(model, processor, inputs, config, *a, **k)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, config: Any, *a: Any, **k: Any
    ) -> tuple[str, int, list[int]]:
        """Return the text of the answer, the length of the prompt, and the ids of the answer.

        Raises:
            PromptKnown: there is no answer yet.
        """
        if self.answer is None:
            self._meet(inputs, config)
            raise PromptKnown
        config.max_new_tokens = self.new_tokens
        text = processor.decode(self.answer, skip_special_tokens=True)
        return text, len(inputs["input_ids"]), self.answer

    def _meet(self, inputs: Any, config: Any) -> None:
        """Let the server admit the prompt, and keep the tokens of its answer."""
        asked = None if config.max_new_tokens == UNSAID else config.max_new_tokens
        self.tokens, self.new_tokens = self._admit(inputs["input_ids"], asked)
        config.max_new_tokens = self.new_tokens

    def add_request(self, *_: Any, request_id: str, **__: Any) -> str:
        """No-op, because `feed` begins the answer; returns the name of the request."""
        return request_id

    def register_result_handler(self, _: str, callback: Callable[[Any], None]) -> None:
        """Keep the handler's callback, which `feed` calls."""
        self._pass_on = callback

    def cancel_request(self, _: str) -> None:
        """No-op, because `Exchange.events` ends the answer."""

    async def feed(self) -> None:
        """Pass the tokens of the answer on to the handler."""
        ids: list[int] = []
        try:
            async with aclosing(self.tokens) as parts:
                async for tokens, last in parts:
                    ids += (token.id for token in tokens)
                    status = RequestStatus.FINISHED if last else RequestStatus.DECODING
                    self._pass_on(GenerationOutput(self.name, generated_tokens=ids, status=status))
        except Exception:
            logging.getLogger("uvicorn.error").exception("a request failed")
            self._pass_on(GenerationOutput(self.name, error=FAILED["message"], status=RequestStatus.FAILED))


class State(GenerationState):
    """The state of a handler that has one generation."""

    manager: Generation

    def get_manager(self, model_id: str, use_cb: bool = True) -> Generation:
        """Return the generation, in the place of a batch manager."""
        return self.manager


class OneModel(ModelManager):
    """A model manager whose only model is loaded already."""

    def __init__(self, name: str, *loaded: Any) -> None:
        self._loaded = loaded
        super().__init__(force_model=name)

    def load_model_and_processor(self, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Return the loaded model and tokenizer."""
        return self._loaded
