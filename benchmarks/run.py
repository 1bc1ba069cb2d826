"""Measure every row of the catalogue on one device, show the table, and draw the curve over lengths.

python -m benchmarks.run [--device cuda] [--only 'decode/*' growth] [--resume]
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks import machine, report
from benchmarks.catalogue import growth_makers, growth_shapes, rows
from benchmarks.comparison import Comparison, Figure, Shape
from benchmarks.measure import Patience, in_turn, matmul_tflops, peak_bytes
from benchmarks.results import Point, ResultFile, Row, describe_error
from rope_patch.evaluation.row import provenance

ASIDE = Path("runs/benchmarks")
"""Where the picture of the curve goes, which no page shows, and a quick run, whose numbers mean nothing."""


def measured(comparison: Comparison | Figure, patience: Patience) -> Row:
    """The row of a comparison or a figure; an error becomes a row too."""
    shape = comparison.shape
    try:
        if isinstance(comparison, Figure):
            return Row.of_figure(comparison, [comparison.read(shape) for _ in range(comparison.rounds)])
        makers = (comparison.ours, comparison.yardstick)
        times = in_turn([maker(shape) for maker in makers], shape.device, patience)
        memory = extra_bytes(comparison) if comparison.memory_target else []
        return Row.of(comparison, times, memory)
    except Exception as error:
        return Row.failed(comparison, error)
    finally:
        _release(shape.device)


def extra_bytes(comparison: Comparison) -> list[int]:
    """Peak memory of both sides, beyond their inputs and beyond what work that they share takes by itself."""
    shape = comparison.shape
    shared = peak_bytes(comparison.shared, shape) if comparison.shared else 0
    return [max(0, peak_bytes(maker, shape) - shared) for maker in (comparison.ours, comparison.yardstick)]


def measured_points(shape: Shape, patience: Patience) -> list[Point]:
    """The points of the curve at one length."""
    makers, commit = growth_makers(shape), provenance()["commit"]
    try:
        times = in_turn([maker(shape) for maker in makers.values()], shape.device, patience)
        return [
            Point(line, shape.length, str(shape), statistics.median(seconds), peak_bytes(maker, shape), commit)
            for (line, maker), seconds in zip(makers.items(), times, strict=True)
        ]
    except Exception as error:
        tqdm.write(f"growth at {shape}: {describe_error(error)}", file=sys.stderr)
        return []
    finally:
        _release(shape.device)


def run(results: ResultFile, jobs: Sequence[Comparison | Figure | Shape], patience: Patience) -> None:
    """Measure rows and points and write each as soon as it is there; those within which a run was cut come last."""
    jobs = sorted(jobs, key=lambda job: name_of(job) in results.unfinished)
    device = results.facts["machine"]["device"]
    for dtype in dict.fromkeys(job.dtype if isinstance(job, Shape) else job.shape.dtype for job in jobs):
        results.ceiling[dtype] = matmul_tflops(dtype, device)
    with tqdm(jobs, unit="row", file=sys.stderr, dynamic_ncols=True) as bar:
        for job in bar:
            bar.set_description(name_of(job))
            results.begin(name_of(job))
            if isinstance(job, Shape):
                results.end(name_of(job), *measured_points(job, patience))
                continue
            results.end(job.name, row := measured(job, patience))
            if row.error:
                tqdm.write(f"{row.name}: {row.error}", file=sys.stderr)


def name_of(job: Comparison | Figure | Shape) -> str:
    """What `--only` is compared with: the name of a row, or of a length of the curve."""
    return f"growth/{job.length}" if isinstance(job, Shape) else job.name


def jobs_for(
    device: str, only: Sequence[str], quick: bool, catalogue: str | None = None
) -> list[Comparison | Figure | Shape]:
    """What there is to measure: the rows and lengths whose names match any of the patterns, or all.

    Args:
        device: that measures.
        only: the patterns.
        quick: the same work at a length that takes no time; lengths that are equal then are measured once.
        catalogue: the device whose rows these are; default the one that measures.
    """
    catalogue = catalogue or device
    jobs: list[Comparison | Figure | Shape] = [*rows(catalogue), *growth_shapes(catalogue)]
    chosen = [job for job in jobs if not only or any(_matches(name_of(job), pattern) for pattern in only)]
    if device != catalogue:
        chosen = [_on(device, job) for job in chosen]
    return list(dict.fromkeys(job.small() for job in chosen)) if quick else chosen


def _on(device: str, job: Comparison | Figure | Shape) -> Comparison | Figure | Shape:
    """A job of another device; its memory is counted in another way there, and is left out."""
    if isinstance(job, Shape):
        return replace(job, device=device)
    return replace(job, shape=replace(job.shape, device=device), memory_target=None)


def _matches(name: str, pattern: str) -> bool:
    return fnmatch(name, pattern) or fnmatch(name, f"{pattern}/*")


def _release(device: str) -> None:
    torch.compiler.reset()  # Dynamo keeps eight graphs of a function, whichever model they are of
    gc.collect()  # a patched model and its hooks know each other
    if device == "cuda":
        torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Returns:
        2 where the device or the names are wrong, 130 when interrupted, else 0: a missed target is a result.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description="Measure what patching costs.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--catalogue", choices=("cpu", "cuda"), help="the rows of this device, measured on --device")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="rows by name, such as 'decode' 'growth'")
    parser.add_argument("--resume", action="store_true", help="leave rows alone that this code has measured already")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that everything runs")
    parser.add_argument(
        "--seconds", type=float, default=Patience.seconds, help="how long to repeat a row (default %(default)s)"
    )
    parser.add_argument("--out", type=Path, help=f"folder of the results (default {report.RESULTS.name}/ beside this)")
    parser.add_argument("--picture", type=Path, help=f"of the curve over lengths (default below {ASIDE})")
    options = parser.parse_args(arguments)
    if reason := machine.missing(options.device):
        print(reason, file=sys.stderr)
        return 2
    jobs = jobs_for(options.device, options.only, options.quick, options.catalogue)
    if not jobs:
        known = ", ".join(dict.fromkeys(job.name.split("/")[0] for job in rows(options.catalogue or options.device)))
        print(f"nothing is named {' or '.join(options.only)}; there are {known}, growth", file=sys.stderr)
        return 2
    path = (options.out or (ASIDE if options.quick else report.RESULTS)) / f"{options.device}.json"
    facts = machine.facts(options.device)
    results = ResultFile.continued(path, facts) if options.resume or options.only else ResultFile(path, facts)
    if options.resume:
        jobs = [job for job in jobs if not results.has(job)]
    code = 0
    try:
        run(results, jobs, Patience(0.0, least=1) if options.quick else Patience(options.seconds))
    except KeyboardInterrupt:
        print("interrupted; measured rows are kept: add --resume to continue", file=sys.stderr)
        code = 130
    report.print_table(results)
    if options.quick:
        print("at sizes this small, and once each, the numbers mean nothing")
    if results.points:
        picture = options.picture or (
            path.with_suffix(".png") if options.quick else ASIDE / f"growth-{options.device}.png"
        )
        if importlib.util.find_spec("matplotlib") is None:
            print(f"{path}; without matplotlib there is no picture")
        else:
            from benchmarks import chart

            print(f"{path}, {chart.save(results, picture)}")
    return code


if __name__ == "__main__":
    sys.exit(main())
