"""Rows of compiled generation: each compiles in a process of its own, all at once, then one after the other is timed.

python -m benchmarks.compiled [--device cuda] [--only 'generate/*'] [--resume] [--out runs/gpu]

A compiler takes a minute for a row, on one core: together they take little more than the slowest of them. While a row
is timed, the others wait.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.catalogue import COMPILED
from benchmarks.comparison import Comparison
from benchmarks.measure import Patience, in_turn
from benchmarks.results import ResultFile, Row
from benchmarks.run import jobs_for

PATIENCE = 240.0
"""Seconds that the rows have to compile before those that are ready are timed."""


def compiled_and_timed(job: Comparison, path: Path, patience: Patience, compiled: Any, free: Any, turn: Any) -> None:
    """Compile both sides of a row, say so, wait until all have done so, and time it in its turn.

    Args:
        job: the row.
        path: of the results.
        patience: how long to repeat it.
        compiled: a queue that receives the name of the row.
        free: an event: nothing compiles any more.
        turn: a lock of the device and of the file.
    """
    device, sides, reason = job.shape.device, [], None
    try:
        sides = [maker(job.shape) for maker in (job.ours, job.yardstick)]
        for side in sides:
            for _ in range(2):  # CUDA graphs are recorded in the second
                side.reset()
                side.run()
    except Exception as error:
        reason = error
    compiled.put(job.name)
    free.wait()
    with turn:
        results = ResultFile.continued(path, machine.facts(device))
        results.begin(job.name)
        try:
            row = Row.failed(job, reason) if reason else Row.of(job, in_turn(sides, device, patience))
        except Exception as error:
            row = Row.failed(job, error)
        results.end(job.name, row)


def run(jobs: Sequence[Comparison], path: Path, patience: Patience, seconds: float = PATIENCE) -> None:
    """Measure rows; a row that is not compiled after so many seconds is timed when it is ready, behind the others."""
    context = multiprocessing.get_context("spawn")
    compiled, free, turn = context.Queue(), context.Event(), context.Lock()
    processes = [
        context.Process(target=compiled_and_timed, args=(job, path, patience, compiled, free, turn), daemon=True)
        for job in jobs
    ]
    for process in processes:
        process.start()
    end, left = time.perf_counter() + seconds, {job.name for job in jobs}
    while left and time.perf_counter() < end and any(process.is_alive() for process in processes):
        try:
            left.discard(name := compiled.get(timeout=1))
            print(f"{name}: compiled", file=sys.stderr, flush=True)
        except queue.Empty:
            continue
    free.set()
    for process in processes:
        process.join()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Returns:
        2 without the device or without such a row, else 0.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled", description="Time compiled generation.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--only", nargs="+", default=COMPILED, metavar="NAME", help="rows by name (default: all)")
    parser.add_argument("--resume", action="store_true", help="leave rows alone that this code has measured already")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that everything runs")
    parser.add_argument("--seconds", type=float, default=Patience.seconds, help="how long to repeat a row")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the results (%(default)s)")
    options = parser.parse_args(arguments)
    if reason := machine.missing(options.device):
        print(reason, file=sys.stderr)
        return 2
    path = options.out / f"{options.device}.json"
    jobs = jobs_for(options.device, options.only, options.quick, "cuda")
    rows = [job for job in jobs if isinstance(job, Comparison) and job.name.partition("/")[0] in COMPILED]
    if not rows:
        print(f"no compiled row is named {' or '.join(options.only)}; there are {', '.join(COMPILED)}", file=sys.stderr)
        return 2
    if options.resume:
        results = ResultFile.continued(path, machine.facts(options.device))
        rows = [row for row in rows if not results.has(row)]
    run(rows, path, Patience(0.0, least=1) if options.quick else Patience(options.seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
