"""Many clients at once on `rope-patch serve`: is every answer that of the request alone, and how long do they wait?

    python -m benchmarks.server_load --seconds 120 --clients 64
    python -m benchmarks.server_load --seconds 120 --clients 64 --scheme yarn:target=auto --factors 1,2,4

Clients join at random times. One in eight hangs up during its stream, one in eight asks for more than the server holds.
Prints a JSON object: answers, refusals, hang-ups, wrong answers, errors; the median and the 99th percentile of the
seconds that an answer takes; the server's memory (MiB) after a quarter of the time and at the end. Errors go to stderr.
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
from pathlib import Path
from urllib.request import urlopen

import openai

from rope_patch.saving.loading import default_checkpoint

TEXT = "".join(f"def value_{i}(x):\n    return x + {i}\n\n" for i in range(60))
PROMPTS = [TEXT[:size] for size in (1, 40, 200, 400, 800, 1200)]
LIMIT = 700  # tokens of prompt and answer


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


def main() -> None:
    """Start a server, load it, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--scheme", default="rerope:window=64+logn")
    parser.add_argument("--factors", default="", help="as of rope-patch serve")
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
        stop = time.monotonic() + options.seconds
        work = (f"{address}/v1", stop, alone, tally, waits)
        threads = [threading.Thread(target=client, args=work) for _ in range(options.clients)]
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
            "p50_seconds": round(statistics.median(waits), 3),
            "p99_seconds": round(statistics.quantiles(waits, n=100)[98], 3),
            "memory_mib": [round(early, 1), round(memory(server.pid), 1)],
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
