r"""An OpenAI endpoint for a checkpoint under a scheme: the server of Transformers with continuous batching.

    rope-patch serve recipes/assets/tiny-llama --scheme rerope:window=128+logn
    python recipes/serve.py DIR --port 8001
    curl http://localhost:8000/v1/completions -H 'Content-Type: application/json' \
        -d '{"prompt": "import os\n", "max_tokens": 16}'

It serves completions, chat completions and responses, streamed or whole. Requests join and leave the batch at any
time. A folder that was saved under a scheme needs no --scheme. A batch of Transformers has one setting for sampling,
so you set it here; a request for another gets a 400. SIGTERM ends the server after the running requests, or after ten
seconds.
"""

from __future__ import annotations

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


@dataclass(kw_only=True)
class Options:
    checkpoint: Positional[str]  # checkpoint folder, GGUF file or Hub ID; also the name of the model in requests
    scheme: str | None = None  # such as rerope:window=512+logn; default what it was saved under
    max_length: Length | None = None  # prompt and answer of a request in tokens; default 4 L
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
    from rope_patch.evaluation.checkpoints import load_model, load_tokenizer, quiet_transformers
    from rope_patch.models.reading import read_stack
    from rope_patch.patching import find_handle

    for name, least in {"max_length": 1, "max_requests": 1, "max_batch_tokens": 1, "temperature": 0}.items():
        if (value := getattr(options, name)) is not None and value < least:
            raise EvaluationError(f"--{name.replace('_', '-')} {value}: at least {least} is allowed")
    with quiet_transformers():
        model: Any = load_model(options.checkpoint, dtype=options.dtype, device=options.device)
        tokenizer = load_tokenizer(options.checkpoint)
    if not hasattr(model, "init_continuous_batching"):
        raise EvaluationError(f"{type(model).__name__} is not served by continuous batching of Transformers")
    trained = read_stack(model).training_length
    if options.scheme is not None:
        patch(model, options.scheme)
    handle = find_handle(model)
    scheme = "no scheme" if handle is None else handle.scheme
    limit = options.max_length or 4 * trained
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
    app = application(options.checkpoint, model, tokenizer, limit, batches)
    say(f"serving {options.checkpoint} (L = {trained}) under {scheme}, up to {limit} tokens a request")
    uvicorn.run(
        app, host=options.host, port=options.port, log_level="info", access_log=False, timeout_graceful_shutdown=10
    )


def application(name: str, model: Any, tokenizer: Any, limit: int, batches: dict[str, Any]) -> Any:
    """The server of Transformers around one model that is loaded already.

    Args:
        name: under which requests ask for it.
        limit: prompt and answer of one request, in tokens.
        batches: settings of the `ContinuousBatchingConfig`.
    """
    from fastapi import HTTPException
    from fastapi.responses import JSONResponse
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

    def check(inputs: Any, asked: Any) -> None:
        prompt, served = len(inputs["input_ids"]), model.generation_config
        if asked.max_new_tokens == UNSAID:
            asked.max_new_tokens = max(1, limit - prompt)
        wanted, allowed = prompt + asked.max_new_tokens, f"{limit} tokens of prompt and answer are allowed"
        problems = {
            "the prompt is empty": prompt == 0,
            f"{prompt} tokens of prompt and max_tokens={asked.max_new_tokens}: {allowed}": wanted > limit,
            f"stop={asked.stop_strings!r}: a batch of Transformers knows no stop strings": bool(asked.stop_strings),
        }
        for field in ("temperature", "top_p", "repetition_penalty"):
            one, other = getattr(asked, field), getattr(served, field)
            problems[f"{field}={one}: this server was started with {other} for all requests"] = one != other
        for problem, holds in problems.items():
            if holds:
                raise HTTPException(status_code=400, detail=problem)

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
    known = {field: value for field, value in batches.items() if field in fields}

    class State(GenerationState):
        manager = Limited(ContinuousBatchingConfig(**known))

        def get_manager(self, model_id: str, use_cb: bool = True) -> Limited:
            self._cb_manager = self.manager  # for /health, and to be stopped
            return self.manager

    state = State(continuous_batching=True)
    models = OneModel(force_model=name)
    handlers = dict.fromkeys(name for name in inspect.signature(build_server).parameters if name.endswith("_handler"))
    handlers |= {
        "chat_handler": ChatCompletionHandler(models, state),
        "completion_handler": CompletionHandler(models, state),
        "response_handler": ResponseHandler(models, state),
    }
    app = build_server(models, **handlers, generation_state=state)
    app.router.routes[:] = [route for route in app.routes if route.path in SERVED]

    @app.exception_handler(HTTPException)
    async def as_openai_has_it(_: Any, error: HTTPException) -> JSONResponse:
        found = {"message": error.detail, "type": "invalid_request_error", "param": None, "code": None}
        return JSONResponse({"error": found}, status_code=error.status_code)

    return app


if __name__ == "__main__":
    run(Options, main)
