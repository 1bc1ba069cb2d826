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
needs no --scheme. With --factors each request runs under the smallest factor that covers it, or under its own
rope_factor. A request for anything else gets a 400 with the reason. SIGTERM ends the server after the running requests,
or after ten seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rope_patch.cli.options import (
    Count,
    Folder,
    Name,
    Numbers,
    OptionalLength,
    OptionalScheme,
    Positional,
    Text,
    in_one_process,
    run,
    say,
)
from rope_patch.errors import EvaluationError
from rope_patch.serving.listening import check_packages, check_port, listen


@dataclass(kw_only=True)
class Options:
    checkpoint: Positional[Folder]  # checkpoint folder, GGUF file or Hub ID; its last part names the model in requests
    scheme: OptionalScheme = None  # scheme such as rerope:window=512+logn (default: the one that the folder records)
    factors: Numbers = ()  # whole multiples of L that a request can reach, such as 1,2,4, for a scheme with target=auto
    max_length: OptionalLength = None  # longest prompt with its answer (default: what the scheme reaches, or 4 L)
    max_tokens: int = 256  # longest answer, unless a request sets it
    max_requests: int = 8  # number of the longest requests that the cache holds, under each factor
    max_batch_tokens: Count = None  # tokens in one step (default: 512, or --max-length for dynamic schemes)
    temperature: float = 0.0  # temperature, unless a request sets it; 0 takes the likeliest token
    top_p: float = 1.0  # share of the probability to sample from, unless a request sets it
    dtype: Name = "auto"  # dtype of the weights: auto (the checkpoint's own), float32, bfloat16 or float16
    device: Name = "auto"  # device to run on: auto, cpu, cuda, cuda:1, mps
    host: Name = "localhost"  # host name to listen on
    port: int = 8000  # port to listen on
    api_key: Text = None  # bearer token that every request has to send (default: none)


def main(options: Options) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    in_one_process("serve")
    check_packages()
    check_port(options.host, options.port)
    from rope_patch import patch, unpatch
    from rope_patch.models.find_stacks import read_stack
    from rope_patch.models.record import Record
    from rope_patch.mounting.longest_text import longest_text
    from rope_patch.patching import find_handle
    from rope_patch.serving.batch import Batch
    from rope_patch.serving.factors import Reaches, models_by_factor, schemes_by_factor
    from rope_patch.serving.sampling import Sampling
    from rope_patch.serving.server import Server
    from rope_patch.serving.start import batch_settings, check_memory, check_paged, load_served

    for name, least in {
        "max_length": 1,
        "max_tokens": 1,
        "max_requests": 1,
        "max_batch_tokens": 1,
        "temperature": 0,
    }.items():
        if (value := getattr(options, name)) is not None and value < least:
            raise EvaluationError(f"--{name.replace('_', '-')} {value}: at least {least} is allowed")
    model, tokenizer = load_served(options.checkpoint, options.dtype, options.device)
    checkpoint = read_stack(model).checkpoint
    trained = checkpoint.max_length
    models: dict[int | None, Any] = {None: model}
    record = None if options.factors or options.scheme else Record.find(model)
    schemes = {} if record is None else record.per_request
    if schemes:
        unpatch(model)
    if options.factors:
        schemes = schemes_by_factor(options.scheme or "no scheme", options.factors, [checkpoint])
    if schemes:
        models = dict(models_by_factor(schemes, model))
    elif options.scheme is not None:
        patch(model, options.scheme)
    handles = [find_handle(one) for one in models.values()]
    for handle in handles:
        check_paged(handle)
    longest = max(schemes) * trained if schemes else longest_text(handles[0], checkpoint)
    limit = options.max_length or longest
    if schemes and limit > longest:
        raise EvaluationError(f"--max-length {limit}: the factors reach {longest} tokens")
    reaches = Reaches(limit, {factor: min(limit, factor * trained) for factor in models if factor is not None})
    whole_prompts = any(handle and handle.scheme.length_dependent for handle in handles)  # see docs/how-to/serve.md
    default = Sampling(options.temperature, options.top_p)
    batches = {}
    for factor, one in models.items():
        check_memory(one, options.max_requests * reaches.of(factor))
        step = options.max_batch_tokens or (limit if whole_prompts else 512)
        settings = batch_settings(reaches.of(factor), options.max_requests, step)
        batches[factor] = Batch(one, tokenizer, settings, default)
    server = Server(options.checkpoint, model, batches, reaches, options.max_tokens, options.api_key)
    scheme, each = options.scheme if options.factors else getattr(handles[-1], "scheme", "no scheme"), ""
    if schemes:
        each = f", each under the smallest factor of {', '.join(map(str, reaches.by_factor))} that covers it"
    say(f"serving {options.checkpoint} (L = {trained}) under {scheme}, up to {limit} tokens a request{each}")
    listen(server.application(), options.host, options.port)


if __name__ == "__main__":
    run(Options, main)
