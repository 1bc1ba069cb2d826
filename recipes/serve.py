# /// script
# dependencies = ["rope-patch[serve]"]
# ///
r"""An OpenAI endpoint for a checkpoint under a scheme: the server of Transformers with continuous batching.

    rope-patch serve recipes/assets/tiny-llama --scheme rerope:window=128+logn
    python recipes/serve.py DIR --port 8001
    curl http://localhost:8000/v1/completions -H 'Content-Type: application/json' \
        -d '{"prompt": "import os\n", "max_tokens": 16}'

It serves completions, chat completions and responses, streamed or whole. Requests join and leave the batch at any
time. A folder that was saved under a scheme needs no --scheme. A batch of Transformers has one setting for sampling,
so you set it here. A request for another, or for anything else that the server does not do (n=2, logprobs, a chat
without a template), gets a 400 with the reason. SIGTERM ends the server after the running requests, or after ten
seconds.
"""

from __future__ import annotations

import bisect
import dataclasses
import inspect
import math
from dataclasses import dataclass
from typing import Any

from rope_patch.cli.options import Length, Positional, run, say
from rope_patch.errors import EvaluationError, require

PAGE = 256  # tokens; the cache is given out in pages
SERVED = {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models", "/health"}
UNSAID = 1 << 30  # `max_new_tokens` of a request that does not say
HARMLESS = {"user", "metadata", "store", "service_tier", "stream_options", "parallel_tool_calls", "truncation"}
NEUTRAL: dict[str, tuple[Any, ...]] = {  # values with which a field that is not served asks for nothing
    **dict.fromkeys(("n", "best_of"), (1,)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "top_logprobs"), (0,)),
    **dict.fromkeys(("logit_bias", "include", "functions"), ({}, [])),
    **dict.fromkeys(("tool_choice", "function_call"), ("auto", "none")),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "text": ({}, {"format": {"type": "text"}}),
}


@dataclass(kw_only=True)
class Options:
    checkpoint: Positional[str]  # checkpoint folder, GGUF file or Hub ID; also the name of the model in requests
    scheme: str | None = None  # such as rerope:window=512+logn; default what it was saved under
    max_length: Length | None = None  # prompt and answer in tokens; default what the scheme reaches; 4 L if any length
    max_tokens: int = 256  # of an answer, where a request does not say
    max_requests: int = 8  # how many requests of max_length the cache holds
    max_batch_tokens: int | None = None  # of one step; default 512, or max_length where frequencies follow the length
    temperature: float = 0.0  # 0 takes the likeliest token
    top_p: float = 1.0  # of the probability, from which tokens are drawn
    dtype: str = "auto"  # auto (of the checkpoint; float32 on a CPU without bfloat16), float32, bfloat16 or float16
    device: str = "auto"  # auto, or a name that torch knows
    host: str = "localhost"  # to listen at
    port: int = 8000  # to listen at


def main(options: Options) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    for package in ("fastapi", "uvicorn", "openai"):
        require(package, "the server", extra="serve")
    import uvicorn

    from rope_patch import patch
    from rope_patch.models.find_stacks import read_stack
    from rope_patch.patching import find_handle
    from rope_patch.saving.loading import load_model, load_tokenizer, quiet_transformers

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
    if options.scheme is not None:
        patch(model, options.scheme)
    handle = find_handle(model)
    scheme = "no scheme" if handle is None else handle.scheme
    if handle is not None and (handle.scheme.stateful or "running_bias" in handle.scheme.methods):
        raise EvaluationError(f"{scheme} is not served: a paged cache cannot keep what it sums up over earlier tokens")
    limit = options.max_length or longest_text(handle, checkpoint)
    whole_prompts = handle is not None and handle.scheme.length_dependent  # see docs/how-to/serve.md
    model.generation_config.update(
        max_new_tokens=UNSAID,
        do_sample=options.temperature > 0,
        temperature=options.temperature,
        top_p=options.top_p,
    )
    batches = {
        "num_blocks": options.max_requests * math.ceil(limit / PAGE),
        "max_batch_tokens": options.max_batch_tokens or (limit if whole_prompts else 512),
        "auto_switch_to_flash": False,  # it would bypass the scheme
        "max_blocks_per_request": 0,  # block tables, likewise
    }
    app = application(options.checkpoint, model, tokenizer, limit, batches, options.max_tokens)
    say(f"serving {options.checkpoint} (L = {trained}) under {scheme}, up to {limit} tokens a request")
    uvicorn.run(
        app, host=options.host, port=options.port, log_level="info", access_log=False, timeout_graceful_shutdown=10
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


def application(
    name: str, model: Any, tokenizer: Any, limit: int, batches: dict[str, Any], max_tokens: int = 256
) -> Any:
    """The server of Transformers around one model that is loaded already.

    Args:
        name: under which requests ask for it.
        limit: prompt and answer of one request, in tokens.
        batches: settings of the `ContinuousBatchingConfig`.
        max_tokens: of an answer, where a request does not say.
    """
    from fastapi import HTTPException
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from jinja2 import TemplateError
    from transformers import ContinuousBatchingConfig
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.response import ResponseHandler
    from transformers.cli.serving.server import build_server
    from transformers.cli.serving.utils import CBGenerateManager, GenerationState

    class Limited(CBGenerateManager):
        """Refuses what a batch cannot give, before it joins one."""

        def init_cb(self, model: Any, gen_config: Any) -> None:
            super().init_cb(model, model.generation_config)

        def generate_streaming(
            self, model: Any, processor: Any, inputs: Any, gen_config: Any, *more: Any, **named: Any
        ) -> Any:
            check(inputs, gen_config)
            return super().generate_streaming(model, processor, inputs, gen_config, *more, **named)

        async def generate_non_streaming(
            self, model: Any, processor: Any, inputs: Any, gen_config: Any, *more: Any, **named: Any
        ) -> Any:
            check(inputs, gen_config)
            return await super().generate_non_streaming(model, processor, inputs, gen_config, *more, **named)

    def check(inputs: Any, settings: Any) -> None:
        prompt, served = len(inputs["input_ids"]), model.generation_config
        if settings.max_new_tokens == UNSAID:
            settings.max_new_tokens = max(1, min(max_tokens, limit - prompt))
        wanted, allowed = prompt + settings.max_new_tokens, f"{limit} tokens of prompt and answer are allowed"
        problems = {
            "the prompt is empty": prompt == 0,
            f"max_tokens={settings.max_new_tokens}: at least 1 is allowed": settings.max_new_tokens < 1,
            f"{prompt} tokens of prompt and max_tokens={settings.max_new_tokens}: {allowed}": wanted > limit,
            f"stop={settings.stop_strings!r}: a batch of Transformers knows no stop strings": bool(
                settings.stop_strings
            ),
        }
        for field in ("temperature", "top_p"):
            one, other = getattr(settings, field), getattr(served, field)
            problems[f"{field}={one}: this server was started with {other} for all requests"] = one != other
        for problem, holds in problems.items():
            if holds:
                raise HTTPException(status_code=400, detail=problem)

    class Strict:
        """Before a handler of Transformers: what it would ignore, or break on, is a 400."""

        async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
            try:
                return await super().handle_request(body, request_id)  # type: ignore[misc]
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, TemplateError) as error:
                raise HTTPException(status_code=400, detail=f"{type(error).__name__}: {error}") from error

        def _validate_request(self, body: dict[str, Any]) -> None:
            super()._validate_request(body)  # type: ignore[misc]
            if not isinstance(self, CompletionHandler) and tokenizer.chat_template is None:
                advice = "ask for /v1/completions, or save a tokenizer with a chat_template"
                raise HTTPException(status_code=400, detail=f"{name} has no chat template: {advice}")
            ignored: set[str] = self._unused_fields | {"frequency_penalty", "logit_bias", "generation_config"}  # type: ignore[attr-defined]
            for field in sorted(ignored & body.keys() - HARMLESS):
                value = body[field]
                if value is not None and value is not False and value not in NEUTRAL.get(field, ()):
                    raise HTTPException(status_code=400, detail=f"{field}={value!r:.80} is not served; leave it out")

    class Chat(Strict, ChatCompletionHandler): ...

    class Completion(Strict, CompletionHandler): ...

    class Response(Strict, ResponseHandler): ...

    class OneModel(ModelManager):
        """The model that is there, under its name."""

        def load_model_and_processor(self, *_: Any, **__: Any) -> tuple[Any, Any]:
            return model, tokenizer

        def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
            return [{"id": name, "object": "model", "created": 0, "owned_by": "rope_patch"}]

        def shutdown(self) -> None:
            state.shutdown()

    # Transformers 5.17 cannot be told to leave attention alone, and asks no patched module either
    fields = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    supported = {field: value for field, value in batches.items() if field in fields}

    class State(GenerationState):
        manager = Limited(ContinuousBatchingConfig(**supported))

        def get_manager(self, model_id: str, use_cb: bool = True) -> Limited:
            self._cb_manager = self.manager  # for /health, and to be stopped
            return self.manager

    state = State(continuous_batching=True)
    models = OneModel(force_model=name)
    handlers = dict.fromkeys(name for name in inspect.signature(build_server).parameters if name.endswith("_handler"))
    handlers |= {
        "chat_handler": Chat(models, state),
        "completion_handler": Completion(models, state),
        "response_handler": Response(models, state),
    }
    app = build_server(models, **handlers, generation_state=state)
    app.router.routes[:] = [route for route in app.routes if route.path in SERVED]

    def as_openai_has_it(message: str, status: int) -> JSONResponse:
        kind = "invalid_request_error" if status < 500 else "server_error"
        return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": None}}, status)

    @app.exception_handler(HTTPException)
    async def refuse(_: Any, error: HTTPException) -> JSONResponse:
        return as_openai_has_it(str(error.detail), 400 if error.status_code == 422 else error.status_code)

    @app.exception_handler(RequestValidationError)
    async def refuse_body(_: Any, error: RequestValidationError) -> JSONResponse:
        return as_openai_has_it(f"the body is not a JSON object: {error.errors()[0]['msg']}", 400)

    @app.exception_handler(Exception)
    async def fail(_: Any, error: Exception) -> JSONResponse:
        return as_openai_has_it(f"{type(error).__name__}: {error}", 500)

    return app


if __name__ == "__main__":
    run(Options, main)
