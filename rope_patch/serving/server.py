"""The OpenAI endpoint of `rope-patch serve`: HTTP in front of the batches.

One event loop serves all clients, so it does no work that grows with a body or an answer: threads read bodies, render
templates, tokenise and write whole answers. Small bodies do not wait for large bodies, which are read one at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from fastapi import HTTPException
from jinja2 import TemplateError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from rope_patch.data.special_tokens import ids_to_continue
from rope_patch.serving import limits, requests
from rope_patch.serving.answers import FAILED, Answer, Chats, Completions, Format, json_of
from rope_patch.serving.batch import Batch, BatchEnded
from rope_patch.serving.factors import Reaches
from rope_patch.serving.handlers import Exchange
from rope_patch.serving.limits import Refusal
from rope_patch.serving.sampling import Sampling

OPEN_REQUESTS = 256
"""The most requests that the server works on at a time, including requests that wait for a place in a batch."""

OPEN_BYTES = 4 * limits.LARGEST_BODY
"""The most bytes, over all clients, of bodies that are still being read."""

READING = 60
"""Seconds that a client may take to send a body."""

SMALL = 2**16
"""The largest body in bytes that does not wait for larger ones."""

WRONG = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, TemplateError)
"""Errors that templates and handlers of Transformers raise for the content of a body."""

T = TypeVar("T")


class Server:
    """An OpenAI endpoint for one model that is loaded and patched.

    Args:
        checkpoint: the model's folder, GGUF file or Hub ID; requests name its last part, or all of it.
        batches: the batches by factor of `reaches`; under None without factors.
        max_tokens: maximum number of tokens of an answer, if a request does not set it.
    """

    def __init__(
        self,
        checkpoint: str,
        model: Any,
        batches: dict[int | None, Batch],
        reaches: Reaches,
        max_tokens: int,
        api_key: str | None = None,
    ) -> None:
        self.names = (Path(checkpoint).name, checkpoint)
        any_batch = next(iter(batches.values()))
        self.model, self.batches, self.reaches = model, batches, reaches
        self.tokenizer, self.default = any_batch.tokenizer, any_batch.default
        self.embeddings = int(model.get_input_embeddings().weight.shape[0])
        self.tokenizer("")  # sets what the first call sets, before threads share it
        self.max_tokens, self.api_key = max_tokens, api_key
        self.open_requests = self.open_bytes = 0
        self.small, self.large = (ThreadPoolExecutor(threads, "rope-patch") for threads in (2, 1))

    @property
    def error(self) -> BaseException | None:
        """The error that stopped a batch; None if all batches run."""
        return next((batch.error for batch in self.batches.values() if batch.error is not None), None)

    def application(self) -> Any:
        """Build the server as an ASGI application."""
        return Starlette(routes=self.routes(), lifespan=lambda _: self.running())

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the batches inside the block."""
        try:
            for batch in self.batches.values():
                await batch.start()
            yield
        finally:
            await asyncio.gather(*(batch.stop() for batch in self.batches.values()))
            for pool in (self.small, self.large):
                pool.shutdown(wait=False, cancel_futures=True)

    def routes(self) -> list[Route]:
        """List the routes of the server, by path."""
        return [
            Route("/v1/completions", Endpoint(self, self.completions, self.reply, limits.ANSWERS), methods=["POST"]),
            Route("/v1/chat/completions", Endpoint(self, self.chats, self.reply), methods=["POST"]),
            Route("/v1/responses", Endpoint(self, self.responses, self.reply), methods=["POST"]),
            Route("/v1/models", Endpoint(self, None, self.models), methods=["GET"]),
            Route("/health", self.health),
        ]

    def check_key(self, request: Request) -> None:
        """Refuse a request without the API key."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1")
        if self.api_key is not None and not hmac.compare_digest(given, os.fsencode(self.api_key)):
            raise Refusal("the API key is missing or wrong", 401)

    @contextlib.contextmanager
    def opened(self) -> Any:
        """Count a request as open while it is read and answered; refuse it if too many are open, or the model does not
        run.
        """
        if self.open_requests >= OPEN_REQUESTS:
            raise Refusal(f"the server works on {OPEN_REQUESTS} requests; ask again later", 503)
        if self.error is not None:
            raise Refusal("the model does not run; ask again later", 503)
        self.open_requests += 1
        try:
            yield
        finally:
            self.open_requests -= 1

    async def health(self, _: Any) -> Any:
        """Answer 200 while the batches run, else 503."""
        alive = self.error is None
        return json_response({"status": "ok" if alive else "unhealthy"}, 200 if alive else 503)

    async def models(self, _: Request, __: None) -> Any:
        """List the only model."""
        model = {"id": self.names[0], "object": "model", "created": 0, "owned_by": "rope_patch"}
        return json_response({"object": "list", "data": [model]})

    def completions(self, body: bytes) -> Asked:
        """Read a request for completions of one or several prompts."""
        asked = self.parse(requests.CompletionRequest, limits.read_json(body))
        limits.check_prompts(asked.prompt, asked.n or 1, self.reaches.limit)
        return Asked(asked, self.answers(asked, asked.prompt, asked.max_tokens), Completions)

    def chats(self, body: bytes) -> Asked | Exchange:
        """Read a request for the next message of a conversation."""
        self.check_template()
        content = limits.read_json(body)
        if content.get("tools"):
            return self.begin("chat", content)
        asked = self.parse(requests.ChatRequest, content)
        prompt = self.in_template([message.as_template_has_it() for message in asked.messages])
        return Asked(asked, self.answers(asked, [prompt], asked.max_completion_tokens or asked.max_tokens), Chats)

    def responses(self, body: bytes) -> Exchange:
        """Read a request for a response."""
        self.check_template()
        return self.begin("response", limits.read_json(body))

    async def read(self, request: Request, work: Callable[[bytes], T], prompts: int) -> T:
        """Run `work` on the body of a request, in a thread, and return its result.

        Args:
            prompts: maximum number of prompts in a body.
        """
        received = bytearray()
        try:
            await asyncio.wait_for(self.receive(request, received), READING)
            if len(received) > (most := limits.largest_body(self.reaches.limit, prompts)):
                each = f"{limits.BYTES_PER_TOKEN} for each of {self.reaches.limit} tokens, and {limits.BODY_SLACK} more"
                raise Refusal(f"the body has {len(received)} bytes; at most {most} are allowed, {each}")
            pool = self.small if len(received) <= SMALL else self.large
            return await asyncio.get_running_loop().run_in_executor(pool, work, bytes(received))
        except asyncio.TimeoutError:
            raise Refusal(f"the body did not come within {READING} seconds", 408) from None
        finally:
            self.open_bytes -= len(received)

    async def receive(self, request: Request, received: bytearray) -> None:
        """Add the body of a request to `received`, part by part."""
        most = limits.largest_body(self.reaches.limit, limits.ANSWERS)
        async for part in request.stream():
            received += part
            self.open_bytes += len(part)
            if len(received) > most:
                raise Refusal(f"the body is too large; at most {most} bytes are allowed", 413)
            if self.open_bytes > OPEN_BYTES:
                raise Refusal("the server is busy with large requests; ask again later", 503)

    def parse(self, kind: type[requests.Body], body: dict[str, Any]) -> requests.Body:
        """Parse the body of a request, and check the model that it names."""
        asked = requests.parse(kind, body)
        if asked.model not in (None, *self.names):
            raise Refusal(f"model={limits.shown(asked.model)}: only {self.names[0]!r} is served", 404)
        return asked

    def check_template(self) -> None:
        """Refuse conversations if there is no chat template."""
        if self.tokenizer.chat_template is None:
            advice = "ask for /v1/completions, or save a tokenizer with a chat_template"
            raise Refusal(f"{self.names[0]} has no chat template: {advice}")

    def in_template(self, messages: list[dict[str, Any]]) -> list[int]:
        """Convert a conversation to ids, up to the beginning of its next message."""
        try:
            return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except WRONG as wrong:
            raise Refusal(f"messages: {type(wrong).__name__}: {wrong!s:.400}") from wrong

    def answers(self, asked: Any, prompts: Sequence[str | list[int]], new_tokens: int | None) -> list[Answer]:
        """Prepare the answers to a request before they begin: n answers to each prompt."""
        n, admitted = asked.n or 1, []
        for place, given in enumerate(prompts):
            prompt = ids_to_continue(self.tokenizer, given) if isinstance(given, str) else given
            name = f"prompt {place}" if len(prompts) > 1 else "the prompt"
            admitted.append((prompt, *self.admit(asked, prompt, new_tokens, name)))
        limits.check_answers([new for _, _, new in admitted for _ in range(n)], asked.alternatives)
        answers: list[Answer] = []
        turn = object()  # the answers to one request share its turns
        for prompt, batch, new in admitted:
            for _ in range(n):
                pieces = batch.answer(turn, prompt, new, self.sampling(asked, len(answers)), asked.stop)
                answers.append(Answer(len(answers), prompt, pieces))
        return answers

    def sampling(self, asked: Any, answer: int = 0) -> Sampling:
        """The sampling settings of one answer, by its number."""
        settings = {"temperature": asked.temperature, "top_p": asked.top_p, "top_logprobs": asked.alternatives}
        settings = {name: value for name, value in settings.items() if value is not None}
        seed = secrets.randbits(63) if asked.seed is None else (asked.seed + answer) % 2**63
        return replace(self.default, **settings, seed=seed)

    def admit(
        self, asked: Any, prompt: list[int], new_tokens: int | None, name: str = "the prompt"
    ) -> tuple[Batch, int]:
        """Choose the batch that a request joins, and the maximum length of its answer.

        It refuses requests that do not fit into the cache, ids that the model does not know, and a factor that does not
        cover the request.
        """
        if not prompt:
            raise Refusal(f"{name} is empty")
        if new_tokens is not None and new_tokens < 1:
            raise Refusal(f"max_tokens={limits.shown(new_tokens)}: at least 1 is allowed")
        try:
            factor = asked.factor
            reach = self.reaches.of(factor)
        except ValueError as wrong:
            raise Refusal(str(wrong)) from wrong
        new = max(1, min(self.max_tokens, reach - len(prompt))) if new_tokens is None else new_tokens
        if len(prompt) + new > reach:
            under, instead = ("", "raise --max-length")
            if factor is not None:
                under, instead = f" under rope_factor={factor:g}", "ask for a larger factor"
            advice = f"{'lower max_tokens' if len(prompt) < reach else 'shorten the prompt'} or {instead}"
            tokens = f"{len(prompt)} + {limits.shown(new)} tokens"
            raise Refusal(f"{tokens} exceed the limit of {reach}{under}; {advice}")
        limits.check_ids(prompt, self.embeddings, name, self.tokenizer)
        return self.batches[self.reaches.choose(len(prompt) + new, factor)], new

    async def reply(self, request: Request, found: Asked | Exchange) -> Any:
        """Reply to a request with the whole answers, or with a stream of them."""
        if isinstance(found, Exchange):
            if found.stream is not None:
                return StreamingResponse(found.events(), media_type="text/event-stream")
            ids = await unless_hung_up(request, found.ids())
            return GONE if ids is None else await asyncio.to_thread(found.end, ids)
        asked, answers = found.request, found.answers
        formatted = found.form(self.names[0], self.tokenizer, asked.alternatives is not None)
        if asked.stream:
            usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
            return StreamingResponse(formatted.stream(answers, usage), media_type="text/event-stream")
        body = await unless_hung_up(request, formatted.all_of(answers))
        return GONE if body is None else Response(body, media_type="application/json")

    def begin(self, kind: str, body: dict[str, Any]) -> Exchange:
        """Let a handler of Transformers read a request."""
        drawn = {name: body.pop(name, None) for name in requests.DrawnRequest.model_fields}
        asked = self.parse(requests.DrawnRequest, drawn)

        def admit(prompt: list[int], new_tokens: int | None) -> tuple[Any, int]:
            batch, new = self.admit(asked, prompt, new_tokens)
            limits.check_answers([new], None)
            return batch.tokens(exchange, prompt, new, self.sampling(asked)), new

        exchange = Exchange(kind, self.names[0], self.model, self.tokenizer, body, admit)
        unread = exchange.handler._unused_fields | {"frequency_penalty", "generation_config", "logit_bias", "stop"}
        if problem := requests.ignored(body, unread):
            raise Refusal(problem)
        try:
            exchange.begin()
        except HTTPException as refusal:
            raise Refusal(f"{refusal.detail!s:.400}") from refusal
        except WRONG as wrong:
            raise Refusal(f"{type(wrong).__name__}: {wrong!s:.400}") from wrong
        return exchange


@dataclass
class Asked:
    """A parsed request: its answers before they begin, and the format of the reply."""

    request: requests.GenerationRequest
    answers: list[Answer]
    form: type[Format]


class Endpoint:
    """A route, as an ASGI application that answers every error in OpenAI's form.

    Args:
        read: a function from a body to the argument of `reply`, which runs in a thread; None for a request without a
            body.
        prompts: maximum number of prompts in a body.
    """

    def __init__(self, server: Server, read: Any, reply: Callable[[Request, Any], Any], prompts: int = 1) -> None:
        self.server, self.read, self.reply, self.prompts = server, read, reply, prompts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        request = Request(scope, receive)
        with contextlib.ExitStack() as stack:
            try:
                self.server.check_key(request)
                found = None
                if self.read is not None:
                    found = await self.server.read(request, self.read, self.prompts)
                    stack.enter_context(self.server.opened())
                response = await self.reply(request, found)
            except Refusal as refusal:
                response = error(str(refusal), refusal.status)
            except ClientDisconnect:
                response = GONE
            except BatchEnded:
                response = error("the model does not run; ask again later", 503)
            except Exception:  # its message may name files of this machine
                logging.getLogger("uvicorn.error").exception("a request failed")
                response = error(FAILED["message"], 500)
            await response(scope, receive, send)


GONE = Response(status_code=499)
"""The response to a client that has hung up; it is never read."""


async def unless_hung_up(request: Request, work: Any) -> Any:
    """Await `work` and return its result; None if the client hangs up first, which ends the work."""
    work, gone = asyncio.ensure_future(work), asyncio.ensure_future(hung_up(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        work.cancel()
        gone.cancel()


async def hung_up(request: Request) -> None:
    """Return when the client closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def json_response(body: Any, status: int = 200) -> Response:
    """Build a response from an object, as JSON."""
    return Response(json_of(body), status, media_type="application/json")


def error(message: str, status: int) -> Response:
    """Build an error in OpenAI's form."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    response = json_response({"error": {"message": message, "type": kind, "param": None, "code": None}}, status)
    if status == 503:
        response.headers["retry-after"] = "1"
    return response
