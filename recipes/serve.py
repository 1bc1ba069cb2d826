# /// script
# dependencies = ["rope-patch[serve]"]
# ///
r"""Serve a checkpoint under a scheme: an OpenAI endpoint with continuous batching.

    rope-patch serve recipes/assets/tiny-llama --scheme rerope:window=128+logn
    rope-patch serve recipes/assets/tiny-llama --scheme yarn:target=auto --factors 1,2,4
    python recipes/serve.py DIR --port 8001 --api-key secret
    curl http://localhost:8000/v1/completions -H 'Content-Type: application/json' \
        -d '{"prompt": "import os\n", "max_tokens": 16}'

It serves completions, chat completions and responses, streamed or whole. Requests join and leave the batch at any
time, each with its own temperature, top_p, seed, stop strings, n and logprobs. A folder that was saved under a scheme
needs no --scheme. With --factors each request runs under the smallest one that covers it, or under its own rope_factor.
What the server does not do gets a 400 with the reason. SIGTERM ends the server after the running requests, or after ten
seconds.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import hmac
import json
import logging
import math
import secrets
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rope_patch.cli.options import Count, Numbers, OptionalLength, Positional, Text, in_one_process, run, say
from rope_patch.errors import EvaluationError, require

PAGE = 256  # tokens; the cache is given out in pages
LARGEST_BODY = 16 * 2**20  # bytes


@dataclass(kw_only=True)
class Options:
    checkpoint: Positional[str]  # checkpoint folder, GGUF file or Hub ID; its last part names the model in requests
    scheme: Text = None  # scheme such as rerope:window=512+logn; without it, the one that the folder records
    factors: Numbers = ()  # whole multiples of L that a request can reach, such as 1,2,4, for a scheme with target=auto
    max_length: OptionalLength = None  # longest prompt with its answer; without it, what the scheme reaches, or 4 L
    max_tokens: int = 256  # longest answer, unless a request sets it
    max_requests: int = 8  # number of the longest requests that the cache holds, under each factor
    max_batch_tokens: Count = None  # tokens in one step; without it, 512, or --max-length for dynamic schemes
    temperature: float = 0.0  # temperature, unless a request sets it; 0 takes the likeliest token
    top_p: float = 1.0  # share of the probability to sample from, unless a request sets it
    dtype: str = "auto"  # dtype of the weights: auto (the checkpoint's own), float32, bfloat16 or float16
    device: str = "auto"  # device to run on: auto, cpu, cuda, cuda:1, mps
    host: str = "localhost"  # host name to listen on
    port: int = 8000  # port to listen on
    api_key: Text = None  # bearer token that every request has to send; without it, none


def main(options: Options) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    in_one_process("serve")
    for package in ("fastapi", "uvicorn", "openai"):
        require(package, "the server", extra="serve")
    import uvicorn

    from rope_patch import patch, unpatch
    from rope_patch.models.find_stacks import read_stack
    from rope_patch.patching import find_handle, find_record
    from rope_patch.saving.loading import load_model, load_tokenizer, quiet_transformers
    from rope_patch.saving.resuming import recorded_factors
    from rope_patch.serving.batch import Batch, Sampling
    from rope_patch.serving.factors import Reaches, models_by_factor, schemes_by_factor

    for name, least in {
        "max_length": 1,
        "max_tokens": 1,
        "max_requests": 1,
        "max_batch_tokens": 1,
        "temperature": 0,
    }.items():
        if (value := getattr(options, name)) is not None and value < least:
            raise EvaluationError(f"--{name.replace('_', '-')} {value}: at least {least} is allowed")
    with quiet_transformers():
        model: Any = load_model(options.checkpoint, dtype=options.dtype, device=options.device)
        tokenizer = load_tokenizer(options.checkpoint)
    if not hasattr(model, "init_continuous_batching"):
        raise EvaluationError(f"{type(model).__name__} is not served by continuous batching of Transformers")
    checkpoint = read_stack(model).checkpoint
    trained = checkpoint.training_length
    models: dict[int | None, Any] = {None: model}
    schemes = {} if options.factors or options.scheme else recorded_factors(find_record(model))
    if schemes:
        unpatch(model)
    if options.factors:
        schemes = schemes_by_factor(options.scheme or "no scheme", options.factors, [checkpoint])
    if schemes:
        models = dict(models_by_factor(schemes, model))
    elif options.scheme is not None:
        patch(model, options.scheme)
    handles = [find_handle(one) for one in models.values()]
    for handle in filter(None, handles):
        if handle.scheme.stateful or "running_bias" in handle.scheme.methods:
            reason = "a paged cache cannot keep what it sums up over earlier tokens"
            raise EvaluationError(f"{handle.scheme} is not served: {reason}")
    longest = max(schemes) * trained if schemes else longest_text(handles[0], checkpoint)
    limit = options.max_length or longest
    if schemes and limit > longest:
        raise EvaluationError(f"--max-length {limit}: the factors reach {longest} tokens")
    reaches = Reaches(limit, {factor: min(limit, factor * trained) for factor in models if factor is not None})
    whole_prompts = any(handle and handle.scheme.length_dependent for handle in handles)  # see docs/how-to/serve.md
    default = Sampling(options.temperature, options.top_p)
    batches = {}
    for factor, one in models.items():
        settings = {
            "num_blocks": options.max_requests * math.ceil(reaches.of(factor) / PAGE),
            "max_batch_tokens": options.max_batch_tokens or (limit if whole_prompts else 512),
            "auto_switch_to_flash": False,  # it would bypass the scheme
            "max_blocks_per_request": 0,  # block tables, likewise
        }
        batches[factor] = Batch(one, tokenizer, settings, default)
    server = Server(options.checkpoint, model, batches, reaches, options.max_tokens, options.api_key)
    scheme, each = options.scheme if options.factors else getattr(handles[-1], "scheme", "no scheme"), ""
    if schemes:
        each = f", each under the smallest factor of {', '.join(map(str, reaches.by_factor))} that covers it"
    say(f"serving {options.checkpoint} (L = {trained}) under {scheme}, up to {limit} tokens a request{each}")
    uvicorn.run(
        server.application(),
        host=options.host,
        port=options.port,
        http="h11",  # refuses endless headers
        log_level="info",
        access_log=False,
        timeout_graceful_shutdown=10,
    )


def longest_text(handle: Any, checkpoint: Any) -> int:
    """What a model reaches, in tokens: its maximum, or what the scheme's fields say; 4 L where they set no limit."""
    from rope_patch.schemes.target import LONGEST, filled_for, takes_target

    if handle is None:
        return int(checkpoint.max_length)
    reaches = []
    groups = [group for stack, plan in handle.mounted for group in plan.by_layer or ((stack, plan),)]
    for stack, plan in groups:
        parts = [part for part in plan.scheme.resolve(stack.checkpoint).parts() if takes_target(type(part))]
        # a field that was set limits the length, and not only what a scheme could do at most
        if any(getattr(part, name) is not None for part in parts for name in filled_for(type(part), "auto")):
            reaches.append(max(reach_of(part, stack.checkpoint) for part in parts))
    longest = min(reaches, default=LONGEST)
    return longest if longest < LONGEST else 4 * int(checkpoint.training_length)


def reach_of(part: Any, checkpoint: Any) -> int:
    """The longest text in tokens that a scheme reaches on a checkpoint, which is the target that its fields are for."""
    from rope_patch.errors import InvalidField
    from rope_patch.schemes.slots import Target
    from rope_patch.schemes.target import LONGEST

    own = {name: value for name, value in vars(part).items() if value is not None}
    given: dict[str, Any] = {name: own[name] for name in ("window", "original_max_position_embeddings") if name in own}

    def fields_for(tokens: int) -> Any:
        return part.fields_for(Target(part.name, tokens, checkpoint, given))

    def is_beyond(tokens: int) -> bool:
        try:
            start, wanted = fields_for(checkpoint.training_length), fields_for(tokens)
        except InvalidField:
            return True
        return any(value > own.get(name, value) for name, value in wanted.items() if value != start.get(name))

    lengths = range(checkpoint.training_length, LONGEST + 1)
    return lengths[0] + max(1, bisect.bisect_left(lengths, True, key=is_beyond)) - 1


class Refusal(Exception):
    """A request that gets no answer: the status, and the reason."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.status = status


class Server:
    """The endpoint around one model that is loaded and patched.

    Args:
        checkpoint: its folder, GGUF file or Hub ID; requests name the last part of it, or all of it.
        batches: by the factors of `reaches`; under None where it has none.
        max_tokens: of an answer, where a request does not set it.
    """

    def __init__(
        self, checkpoint: str, model: Any, batches: Any, reaches: Any, max_tokens: int, api_key: str | None = None
    ) -> None:
        self.names = (Path(checkpoint).name, checkpoint)
        any_batch = next(iter(batches.values()))
        self.model, self.batches, self.reaches = model, batches, reaches
        self.tokenizer, self.default = any_batch.tokenizer, any_batch.default
        self.max_tokens, self.api_key = max_tokens, api_key

    @property
    def error(self) -> BaseException | None:
        """Why a batch ended, if one did."""
        return next((batch.error for batch in self.batches.values() if batch.error is not None), None)

    def application(self) -> Any:
        """The server as an ASGI application."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        @contextlib.asynccontextmanager
        async def lifespan(_: Any) -> AsyncIterator[None]:
            for batch in self.batches.values():
                batch.manager.start()
            yield
            stops = [partial(batch.manager.stop, block=True, timeout=2) for batch in self.batches.values()]
            await asyncio.gather(*map(asyncio.to_thread, stops))

        routes = [
            Route("/v1/completions", self.endpoint(self.complete), methods=["POST"]),
            Route("/v1/chat/completions", self.endpoint(self.chat), methods=["POST"]),
            Route("/v1/responses", self.endpoint(self.respond), methods=["POST"]),
            Route("/v1/models", self.endpoint(self.models)),
            Route("/health", self.health),
        ]
        return Starlette(routes=routes, lifespan=lifespan)

    def endpoint(self, handle: Any) -> Any:
        """A route that answers every error as OpenAI has it."""
        from starlette.requests import Request

        async def answer(request: Request) -> Any:
            try:
                given = request.headers.get("authorization", "").removeprefix("Bearer ")
                if self.api_key is not None and not hmac.compare_digest(given.encode(), self.api_key.encode()):
                    raise Refusal("the API key is missing or wrong", 401)
                body = await read(request) if request.method == "POST" else {}
                return await handle(request, body)
            except Refusal as refusal:
                return error(str(refusal), refusal.status)
            except Exception:  # its text may name files of this machine
                logging.getLogger("uvicorn.error").exception("a request failed")
                return error("the server failed on this request", 503 if self.error else 500)

        return answer

    async def health(self, _: Any) -> Any:
        """200 as long as the batch runs."""
        from starlette.responses import JSONResponse

        alive = self.error is None
        return JSONResponse({"status": "ok" if alive else "unhealthy"}, 200 if alive else 503)

    async def models(self, _: Any, __: Any) -> Any:
        """The one model."""
        from starlette.responses import JSONResponse

        model = {"id": self.names[0], "object": "model", "created": 0, "owned_by": "rope_patch"}
        return JSONResponse({"object": "list", "data": [model]})

    async def complete(self, request: Any, body: dict[str, Any]) -> Any:
        """The endings of one or several prompts."""
        from rope_patch.data.special_tokens import ids_to_continue
        from rope_patch.serving.answers import Completions
        from rope_patch.serving.requests import CompletionRequest

        asked = self.parse(CompletionRequest, body)
        prompts = [ids_to_continue(self.tokenizer, one) if isinstance(one, str) else one for one in asked.prompts]
        answers = self.answers(asked, prompts, asked.max_tokens)
        return await self.reply(request, asked, answers, Completions)

    async def chat(self, request: Any, body: dict[str, Any]) -> Any:
        """The next message of a conversation."""
        from jinja2 import TemplateError

        from rope_patch.serving.answers import Chats
        from rope_patch.serving.requests import ChatRequest

        if self.tokenizer.chat_template is None:
            raise Refusal(self.no_template)
        if body.get("tools"):
            return await self.handle("chat", body)
        asked = self.parse(ChatRequest, body)
        try:
            messages = [message.as_template_has_it() for message in asked.messages]
            prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except (LookupError, TypeError, ValueError, TemplateError) as wrong:
            raise Refusal(f"messages: {type(wrong).__name__}: {wrong}") from wrong
        answers = self.answers(asked, [prompt], asked.max_completion_tokens or asked.max_tokens)
        return await self.reply(request, asked, answers, Chats)

    def parse(self, kind: Any, body: dict[str, Any]) -> Any:
        """The request in a body."""
        from rope_patch.serving.requests import parse

        try:
            asked = parse(kind, body)
        except ValueError as wrong:
            raise Refusal(str(wrong)) from wrong
        self.check_model(asked.model)
        return asked

    def check_model(self, model: Any) -> str:
        """The name of the model, where a request means it."""
        if model not in (None, *self.names):
            raise Refusal(f"model={model!r:.80}: this server has {self.names[0]!r} alone", 404)
        return self.names[0]

    @property
    def no_template(self) -> str:
        """Why there are no chats."""
        advice = "ask for /v1/completions, or save a tokenizer with a chat_template"
        return f"{self.names[0]} has no chat template: {advice}"

    def answers(self, asked: Any, prompts: list[list[int]], new_tokens: int | None) -> list[Any]:
        """The answers that a request wants, before they begin: n to each prompt."""
        from rope_patch.serving.answers import Answer

        answers: list[Any] = []
        for prompt in prompts:
            batch, new = self.admit(asked, prompt, new_tokens)
            for _ in range(asked.n or 1):
                pieces = batch.answer(prompt, new, self.sampling(asked, len(answers)), asked.stops)
                answers.append(Answer(len(answers), prompt, pieces))
        return answers

    def sampling(self, asked: Any, answer: int = 0) -> Any:
        """How the tokens of an answer with this number are drawn."""
        settings = {"temperature": asked.temperature, "top_p": asked.top_p, "top_logprobs": asked.alternatives}
        settings = {name: value for name, value in settings.items() if value is not None}
        seed = secrets.randbits(63) if asked.seed is None else (asked.seed + answer) % 2**63
        return replace(self.default, **settings, seed=seed)

    def admit(self, asked: Any, prompt: list[int], new_tokens: int | None) -> tuple[Any, int]:
        """The batch that a request joins, and the most tokens of its answer.

        Refuses what no cache holds, ids that the model does not know, and a factor that does not cover the request.
        """
        if not prompt:
            raise Refusal("the prompt is empty")
        if new_tokens is not None and new_tokens < 1:
            raise Refusal(f"max_tokens={new_tokens}: at least 1 is allowed")
        if not all(0 <= token < len(self.tokenizer) for token in prompt):
            raise Refusal(f"the prompt has ids beyond the vocabulary of {len(self.tokenizer)} tokens")
        try:
            factor = asked.factor
            reach = self.reaches.of(factor)
        except ValueError as wrong:
            raise Refusal(str(wrong)) from wrong
        new = max(1, min(self.max_tokens, reach - len(prompt))) if new_tokens is None else new_tokens
        try:
            return self.batches[self.reaches.choose(len(prompt) + new, factor)], new
        except ValueError as wrong:
            raise Refusal(f"{len(prompt)} tokens of prompt and max_tokens={new}: {wrong}") from wrong

    async def reply(self, request: Any, asked: Any, answers: list[Any], form: Any) -> Any:
        """The whole answers, or a stream of them."""
        from starlette.responses import JSONResponse, Response, StreamingResponse

        formatted = form(self.names[0], self.tokenizer, asked.alternatives is not None)
        if asked.stream:
            usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
            return StreamingResponse(formatted.stream(answers, usage), media_type="text/event-stream")
        work = asyncio.ensure_future(formatted.all_of(answers))
        gone = asyncio.ensure_future(hung_up(request))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            return JSONResponse(work.result()) if work.done() else Response(status_code=499)  # nobody reads it
        finally:
            work.cancel()
            gone.cancel()

    async def respond(self, _: Any, body: dict[str, Any]) -> Any:
        """A response, by the handler of Transformers."""
        return await self.handle("response", body)

    async def handle(self, kind: str, body: dict[str, Any]) -> Any:
        """Responses, and chats with tools: by the handlers of Transformers, in the same batches."""
        from fastapi import HTTPException
        from jinja2 import TemplateError

        from rope_patch.serving.handlers import handler_of
        from rope_patch.serving.requests import DrawnRequest, ignored

        if self.tokenizer.chat_template is None:
            raise Refusal(self.no_template)
        asked = self.parse(DrawnRequest, {name: body.pop(name, None) for name in DrawnRequest.model_fields})

        def admit(prompt: list[int], new_tokens: int | None) -> tuple[Any, int]:
            return self.admit(asked, prompt, new_tokens)

        name = self.names[0]
        handler = handler_of(kind, name, self.model, self.tokenizer, admit, self.sampling(asked))
        unread = handler._unused_fields | {"frequency_penalty", "generation_config", "logit_bias", "stop"}
        if problem := ignored(body, unread):
            raise Refusal(problem)
        try:
            return await handler.handle_request({"stream": False, **body, "model": name}, str(uuid.uuid4()))
        except HTTPException as refusal:
            raise Refusal(str(refusal.detail)) from refusal
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, TemplateError) as wrong:
            raise Refusal(f"{type(wrong).__name__}: {wrong}") from wrong


async def read(request: Any) -> dict[str, Any]:
    """The JSON object of a request."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > LARGEST_BODY:
            raise Refusal(f"the body is too large; at most {LARGEST_BODY} bytes are allowed", 413)
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as wrong:
        raise Refusal(f"the body is not JSON: {wrong}") from wrong
    if not isinstance(content, dict):
        raise Refusal("the body is not a JSON object")
    return content


async def hung_up(request: Any) -> None:
    """Returns when the client closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def error(message: str, status: int) -> Any:
    """An error as OpenAI has it."""
    from starlette.responses import JSONResponse

    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": None}}, status)


if __name__ == "__main__":
    run(Options, main)
