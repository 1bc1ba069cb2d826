"""Many clients at once on `rope-patch serve`: is every answer that of the request alone, and how long do they wait?

    python -m benchmarks.server_load --seconds 120 --clients 64
    python -m benchmarks.server_load --seconds 120 --clients 64 --scheme yarn:target=auto --factors 1,2,4
    python -m benchmarks.server_load --seconds 120 --clients 64 --hostile 8

Clients join at random times. One in eight hangs up during its stream, one in eight asks for more than the server holds.
Hostile clients send the requests of `HOSTILE` beside them: each is refused, or cut off by the client, and fails nobody.
Prints a JSON object: answers, refusals, hang-ups, wrong answers, errors; the median and the 99th percentile of the
seconds that an answer takes; the slowest answer of /health; the server's memory (MiB) before the load, after a quarter
of the time and at the end. Errors go to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from http.client import HTTPConnection, HTTPException
from multiprocessing import get_context
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import openai

from rope_patch.saving.loading import default_checkpoint

TEXT = "".join(f"def value_{i}(x):\n    return x + {i}\n\n" for i in range(60))
PROMPTS = [TEXT[:size] for size in (1, 40, 200, 400, 800, 1200)]
LIMIT = 700  # tokens of prompt and answer


WORDS = "the quick brown fox jumps over a lazy dog "
LONG = {"max_tokens": 300, "n": 128}
TOOL = {"type": "function", "function": {"name": "f"}}
HOSTILE: dict[str, tuple[str, dict[str, object] | str, float | None]] = {
    # path, body, and seconds after which the client hangs up
    "answers": ("completions", {"prompt": ["a"] * 4000, "n": 128}, None),
    "n": ("completions", {"prompt": WORDS * 5, **LONG}, 2),
    "n, streamed": ("completions", {"prompt": WORDS * 5, **LONG, "stream": True}, 2),
    "log-probabilities": ("completions", {"prompt": WORDS, "n": 40, "logprobs": 20, "max_tokens": 200}, 2),
    "text": ("completions", {"prompt": WORDS * 25_000}, None),
    "texts": ("completions", {"prompt": [WORDS * 200] * 128}, None),
    "a large body": ("completions", {"prompt": WORDS * 400_000}, None),
    "stop strings": ("completions", {"prompt": "a", "stop": ["stop"] * 100_000}, None),
    "ids": ("completions", {"prompt": [1, 10**6]}, None),
    "many ids": ("completions", {"prompt": [1] * 400_000}, None),
    "surrogate": ("completions", {"prompt": "\ud800"}, None),
    "depth": ("completions", '{"prompt": ' + "[" * 30_000 + "]" * 30_000 + "}", None),
    "lists": ("completions", '{"prompt": [' + "[]," * 300_000 + "[]]}", None),
    "fields": ("completions", {f"field{number}": 1 for number in range(100_000)}, None),
    "a chat": ("chat/completions", {"messages": [{"role": "user", "content": WORDS * 25_000}]}, None),
    "tools": ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL] * 1000}, None),
    "a response": ("responses", {"input": WORDS * 25_000}, None),
    "half a body": ("completions", '{"prompt', 1),
}


def memory(process: int) -> float:
    """Resident memory of a process, in MiB."""
    line = next(line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def client(address: str, stop: float, expected: dict[str, str], tally: Counter[str], waits: list[float]) -> None:
    """One client after another, until the time is over."""
    chosen = random.Random(threading.get_ident())
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=120) as api:
        while time.monotonic() < stop:
            time.sleep(chosen.random())
            prompt, kind = chosen.choice(PROMPTS), chosen.randrange(8)
            began = time.monotonic()
            try:
                if kind == 0:
                    stream = api.completions.create(model="tiny-llama", prompt=prompt, max_tokens=100, stream=True)
                    next(iter(stream))
                    stream.close()
                    tally["hang-ups"] += 1
                elif kind == 1:
                    api.completions.create(model="tiny-llama", prompt=TEXT, max_tokens=LIMIT)
                    tally["errors"] += 1
                else:
                    answer = api.completions.create(model="tiny-llama", prompt=prompt, max_tokens=12)
                    tally["answers" if answer.choices[0].text == expected[prompt] else "wrong"] += 1
                    waits.append(time.monotonic() - began)
            except openai.BadRequestError:
                tally["refusals" if kind == 1 else "errors"] += 1
            except openai.OpenAIError as error:
                tally["errors"] += 1
                print(f"{type(error).__name__}: {error}", file=sys.stderr)


def hostile(address: str, stop: float, tally: Counter[str]) -> None:
    """One hostile request after another, until the time is over."""
    chosen = random.Random(threading.get_ident())
    place = urlsplit(address)
    while time.monotonic() < stop:
        name = chosen.choice(list(HOSTILE))
        path, body, patience = HOSTILE[name]
        raw = body if isinstance(body, str) else json.dumps(body)
        connection = HTTPConnection(str(place.hostname), place.port or 80, timeout=patience or 120)
        more = 100 if name == "half a body" else 0
        headers = {"Content-Type": "application/json", "Content-Length": str(len(raw) + more)}
        try:
            connection.request("POST", f"/v1/{path}", raw, headers)
            answer = connection.getresponse()
            if answer.status == 200 and patience is not None:
                answer.read(4096)
            kind = "hostile refused" if 400 <= answer.status < 500 else "hostile answered"
            tally[f"hostile {answer.status}" if answer.status >= 500 else kind] += 1
        except (TimeoutError, OSError, HTTPException) as failure:
            expected = patience is not None or isinstance(failure, BrokenPipeError | ConnectionError)
            tally["hostile hang-ups" if expected else f"hostile {type(failure).__name__}"] += 1
        finally:
            connection.close()


def watch(address: str, seconds: float) -> float:
    """The slowest answer of /health in seconds, in a process of its own, which the clients do not slow down."""
    slowest, stop = 0.0, time.monotonic() + seconds
    while time.monotonic() < stop:
        began = time.monotonic()
        with urlopen(f"{address}/health", timeout=120) as answer:
            answer.read()
        slowest = max(slowest, time.monotonic() - began)
        time.sleep(0.1)
    return slowest


def main() -> None:
    """Start a server, load it, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--scheme", default="rerope:window=64+logn")
    parser.add_argument("--factors", default="", help="as of rope-patch serve")
    parser.add_argument("--hostile", type=int, default=0, help="clients that send the requests of HOSTILE")
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    words = [default_checkpoint(), "--scheme", options.scheme, "--max-length", str(LIMIT), "--port", str(port)]
    words += ["--factors", options.factors] if options.factors else []
    server = subprocess.Popen([sys.executable, "-m", "rope_patch.cli", "serve", *words], stderr=subprocess.DEVNULL)
    try:
        address = f"http://localhost:{port}"
        while True:
            try:
                urlopen(f"{address}/health").close()
                break
            except OSError:
                time.sleep(0.2)
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as api:
            alone = {
                prompt: api.completions.create(model="tiny-llama", prompt=prompt, max_tokens=12).choices[0].text
                for prompt in PROMPTS
            }
        tally: Counter[str] = Counter()
        waits: list[float] = []
        idle = memory(server.pid)
        stop = time.monotonic() + options.seconds
        work = (f"{address}/v1", stop, alone, tally, waits)
        threads = [threading.Thread(target=client, args=work) for _ in range(options.clients)]
        threads += [threading.Thread(target=hostile, args=(address, stop, tally)) for _ in range(options.hostile)]
        watcher = ProcessPoolExecutor(1, get_context("spawn"))
        slowest = watcher.submit(watch, address, options.seconds)
        for thread in threads:
            thread.start()
        time.sleep(options.seconds / 4)
        early = memory(server.pid)
        for thread in threads:
            thread.join()
        measured = {
            "scheme": options.scheme,
            "factors": options.factors,
            "clients": options.clients,
            "seconds": options.seconds,
            **{kind: tally[kind] for kind in ("answers", "refusals", "hang-ups", "wrong", "errors")},
            **{kind: tally[kind] for kind in sorted(tally) if kind.startswith("hostile")},
            "slowest_health_seconds": round(slowest.result(), 3),
            "p50_seconds": round(statistics.median(waits), 3),
            "p99_seconds": round(statistics.quantiles(waits, n=100)[98], 3),
            "memory_mib": [round(size, 1) for size in (idle, early, memory(server.pid))],
            "cores": os.cpu_count(),
        }
        began = time.monotonic()
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=30)
        print(json.dumps({**measured, "drained_seconds": round(time.monotonic() - began, 2)}, indent=1))
    finally:
        server.kill()


if __name__ == "__main__":
    main()
