"""Profiles of calls on a GPU: the time that the host needs, and the kernels by their time on the device.

python -m benchmarks.profiled [--device cuda] [--only 'token*'] [--out runs/gpu]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import attention, machine, models
from benchmarks.comparison import Maker, Shape, Side
from rope_patch.evaluation.row import provenance
from rope_patch.json_files import read_object

_ROUNDS = 8
_MOST = 16
"""Kernels of a call that are listed, the longest first."""


def cases(device: str) -> dict[str, tuple[Maker, Shape]]:
    """The calls by name: work, scheme and length."""
    long = Shape(32768, 32, 8, 128, "bfloat16", device)
    short = replace(long, length=8192)
    whole, found = replace(short, head_dim=64), dict[str, tuple[Maker, Shape]]()
    for scheme in (None, "rerope", "dca", "self_extend", "logn", "alibi"):
        name = scheme or "plain"
        found[f"token/{name}"] = partial(models.decoding, scheme=scheme, layers=4), whole
        found[f"module/{name}"] = partial(models.attention_module, scheme=scheme), short
        found[f"read/{name}"] = partial(models.forward, scheme=scheme), whole
    for scheme in ("rerope", "dca"):
        for shape in (short, long):
            found[f"forward/{scheme}/{shape.length}"] = partial(attention.regions, scheme=scheme), shape
            training = partial(attention.regions, scheme=scheme, backward=True)
            found[f"training/{scheme}/{shape.length}"] = training, shape
    return found


def profiled(side: Side, device: str) -> dict[str, Any]:
    """Milliseconds of a call: `host` until it has started all kernels, `whole` until the last has ended, `device` that
    kernels run; and the kernels by name, with their number and milliseconds.
    """
    host, whole = [], []
    for number in range(3 + _ROUNDS):
        side.reset()
        _wait(device)
        start = time.perf_counter()
        side.run()
        started = time.perf_counter()
        _wait(device)
        if number >= 3:
            host.append(1000 * (started - start))
            whole.append(1000 * (time.perf_counter() - start))
    side.reset()
    of_gpu = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if of_gpu else ProfilerActivity.CPU]) as recorded:
        side.run()
        _wait(device)
    counts, times = Counter[str](), defaultdict[str, float](float)
    for event in recorded.events() or ():
        if (event.device_type == torch.autograd.DeviceType.CUDA) == of_gpu:
            counts[event.name[:120]] += 1
            times[event.name[:120]] += (event.device_time if of_gpu else event.self_cpu_time_total) / 1000
    longest = sorted(times, key=lambda name: -times[name])[:_MOST]
    return {
        "host": round(statistics.median(host), 3),
        "whole": round(statistics.median(whole), 3),
        "device": round(sum(times.values()), 3),
        "launches": counts.total(),
        "kernels": [[name, counts[name], round(times[name], 3)] for name in longest],
    }


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Calls that this commit has profiled on this machine are left alone.

    Returns:
        2 without the device, 1 if a call failed, else 0.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profiled", description="List the kernels of calls.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--only", nargs="+", default=("*",), metavar="NAME", help="calls by name (default: all)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that everything runs")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the results (%(default)s)")
    options = parser.parse_args(arguments)
    if reason := machine.missing(options.device):
        print(reason, file=sys.stderr)
        return 2
    path, facts = options.out / "profile.json", {**machine.facts(options.device), "commit": provenance()["commit"]}
    try:
        kept = read_object(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        kept = {}
    found: dict[str, Any] = kept["calls"] if kept.get("facts") == facts else {}
    options.out.mkdir(parents=True, exist_ok=True)
    for name, (maker, shape) in cases(options.device).items():
        if "host" in found.get(name, {}) or not any(fnmatch(name, pattern) for pattern in options.only):
            continue
        try:
            found[name] = profiled(maker(shape.small() if options.quick else shape), options.device)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        aside = path.with_suffix(".tmp")
        aside.write_text(json.dumps({"facts": facts, "calls": found}, indent=1) + "\n")
        aside.replace(path)
        print(
            f"{name}: {json.dumps({key: value for key, value in found[name].items() if key != 'kernels'})}", flush=True
        )
    return int(any("error" in call for call in found.values()))


if __name__ == "__main__":
    sys.exit(main())
