"""The rows of a result file: a table for the terminal, and a headline, a chart and a table for the documents.

python -m benchmarks.report [benchmarks/results/cpu.json] [--page docs/benchmarks.md] [--picture FILE.png]
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.results import ResultFile, Row
from rope_patch.evaluation.scheme_specs import display_name

RESULTS = Path(__file__).parent / "results"

_HEADER = ("work", "yardstick", "time [quartiles]", "at most", "memory", "at most", "TFLOP/s", "met")
TABLE = re.compile(r"(?<=<!-- measured -->\n).*?(?=<!-- end -->)", re.DOTALL)
"""Where a page contains what was measured: docs/benchmarks.md the headline, and the site the table below it."""

PROCESSORS = ("cpu.json", "cpu_epyc.json")
"""The files of the processors on which all rows were measured."""

GPU_TABLE = re.compile(TABLE.pattern.replace("measured", "measured on a GPU"), re.DOTALL)
"""Where docs/benchmarks.md contains what was measured on a GPU."""

HEADLINE = {  # what is done, and the rows of schemes that do it
    "attention with rotations, 8,192 tokens": (
        "module/rerope/8192/float32",
        "module/dca/8192/float32",
        "module/self_extend/8192/float32",
        "module/alibi/8192/float32",
        "module/logn/8192/float32",
    ),
    "its forward and backward": ("module/rerope/training/8192/float32", "module/dca/training/8192/float32"),
    "a whole model, one decoded token after 8,192": (
        "decode/rerope/grouped/8192/float32",
        "decode/dca/grouped/8192/float32",
        "decode/self_extend/grouped/8192/float32",
    ),
    "a whole model under static frequencies": ("model/yarn/2048/float32",),
}
"""The rows of the headline and of its chart."""

GPU_SCHEMES = ("yarn", "logn", "rerope", "self_extend", "dca", "alibi")
"""The columns of the table of a GPU."""
GPU_WORK = {
    "attention alone, 8,192 tokens": "forward/{}/8192/bfloat16",
    "its forward and backward": "training/{}/8192/bfloat16",
    "attention alone, 32,768 tokens": "forward/{}/32768/bfloat16",
    "its forward and backward, 32,768": "training/{}/32768/bfloat16",
    "a whole model, prompt of 8,192": "read/{}/8192/bfloat16",
    "a compiled token after 8,192": "generate/{}/8192/bfloat16",
    "an eager token after 8,192": "token/{}/grouped/8192/bfloat16",
}
"""The lines of the table of a GPU, and their rows."""

_WIDTH = 150
_STYLES = {"yes": "green", "no": "bold red"}


def cells(row: Row) -> tuple[str, ...]:
    """One row of the table, a string per column."""
    time = rate = ""
    spread = ", ".join(map(_number, row.spread or ()))
    if row.value is not None:
        time = f"{row.value:.3g} {row.unit}"
        time += f" [{spread}]" if row.yardstick_value is None else f", beyond {row.yardstick_value:.3g}"
    elif row.ratio is not None:
        time = f"{_number(row.ratio)} [{spread if row.rounds > 1 else 'one round'}]"
    if row.tflops and row.yardstick_tflops:
        rate = f"{row.tflops:.3g} of {row.yardstick_tflops:.3g}"
    return (
        row.work,
        row.yardstick,
        "failed" if row.error else time,
        _number(row.target) if row.unit is None else f"{row.target:g}",
        _number(row.memory_ratio),
        _number(row.memory_target),
        rate,
        {None: "", True: "yes", False: "no"}[row.met],
    )


def notes(results: ResultFile) -> list[str]:
    """Notes on the numbers, one sentence each."""
    machine, versions = results.facts["machine"], results.facts["versions"]
    where = f"{machine['gpu']}, " if machine["gpu"] else ""
    changed = {name: value for name, value in results.facts["environment"].items() if value is not None}
    settings = ", ".join(f"{name}={value}" for name, value in changed.items()) or "none"
    commits = sorted({row.commit or "unknown" for row in results.rows})
    ceiling = ", ".join(f"{value:.3g} in {dtype}" for dtype, value in results.ceiling.items())
    return [
        f"{where}{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads, "
        f"{machine['memory_gib']:g} GiB.",
        ", ".join(f"{name} {value}" for name, value in versions.items()) + f"; {results.date}.",
        f"Commit {', '.join(commits)}.",
        f"Settings of allocator and threads: {settings}.",
        f"Ceiling, one large matrix product: {ceiling} TFLOP/s." if ceiling else "No ceiling was measured.",
        "Time is ours over the yardstick's: medians of runs in turn. "
        "Memory is our peak over the yardstick's, without the inputs"
        + ("." if machine["gpu"] else "; each side has its own process, which releases freed blocks at once."),
        *(f"{row.name} failed: {row.error}." for row in results.rows if row.error),
    ]


def table(results: ResultFile) -> Table:
    """The table for the terminal, with the short names of rows."""
    shown = Table(box=box.SIMPLE_HEAD)
    for name in _HEADER:
        shown.add_column(name, justify="left" if name in ("work", "yardstick") else "right")
    for row in results.rows:
        _, *rest, met = cells(row)
        shown.add_row(row.name, *map(Text, rest), Text(met, style=_STYLES.get(met, "")))
    return shown


def markdown(results: ResultFile) -> str:
    """The table and its notes as markdown, for the documents."""
    rows = [(f"{work}; {row.shape}", *rest) for row in results.rows for work, *rest in [cells(row)]]
    shown = ["| " + " | ".join(line) + " |" for line in (_HEADER, ("---",) * len(_HEADER), *rows)]
    return "\n".join([*shown, "", *notes(results)])


def headline(*files: ResultFile) -> str:
    """The table of several processors as markdown: the time of usual schemes over plain attention, and the number of
    targets that are met.
    """
    rows = [{row.name: row for row in file.rows} for file in files]

    def times(names: Sequence[str]) -> list[str]:
        shown = [[f"{scheme_of(name)} {_number(of[name].ratio)}" for name in names if name in of] for of in rows]
        return [", ".join(each) for each in shown]

    lines = [
        ["time over plain attention", *(file.facts["machine"]["processor"] for file in files)],
        ["---"] * (1 + len(files)),
        *([work, *times(names)] for work, names in HEADLINE.items()),
        ["**targets that are met**", *map(_met, files)],
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _met(file: ResultFile) -> str:
    targets = [row.met for row in file.rows if row.met is not None]
    return f"**{sum(targets)} of {len(targets)}**"


def gpu_table(results: ResultFile) -> str:
    """Table of a GPU as markdown: time over the unpatched model or plain attention, by work and scheme. A scheme that
    was not measured has an empty cell, and a target that was missed stands behind its figure.
    """
    rows = {row.name: row for row in results.rows}
    lines = [("", *map(display_name, GPU_SCHEMES)), ("---",) * (1 + len(GPU_SCHEMES))]
    for work, name in GPU_WORK.items():
        of_schemes = [rows.get(name.format(scheme)) for scheme in GPU_SCHEMES]
        lines.append((work, *map(_over_plain, of_schemes)))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _over_plain(row: Row | None) -> str:
    if row is None or row.ratio is None:
        return ""
    if row.target is not None and row.ratio > row.target:
        return f"{row.ratio:.3f} (of {row.target:g})"
    return _number(row.ratio)


def scheme_of(name: str) -> str:
    """The scheme in the name of a row, as people write it."""
    return display_name(name.split("/")[1])


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if value >= 0.2 else f"{value:.3f}"


def print_table(results: ResultFile, console: Console | None = None) -> None:
    """The table and its notes."""
    # a pipe has no width of its own, and the 80 columns that are assumed for it break every cell
    console = console or Console(width=None if sys.stdout.isatty() else _WIDTH)
    console.print(table(results))
    for note in notes(results):
        console.print(Text(note, style="dim"))


def main() -> int:
    """The command line.

    Returns:
        2 when there is nothing to show, else 0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report",
        description="Print measured rows as a markdown table.",
    )
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS / "cpu.json")
    parser.add_argument(
        "--page",
        type=Path,
        help="write the headline into this page, and its chart beside it; of results of a GPU, their table",
    )
    parser.add_argument("--picture", type=Path, help="also draw the curve over lengths into this PNG")
    options = parser.parse_args()
    try:
        results = ResultFile.read(options.results)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    if options.page or options.picture:
        from benchmarks import chart  # matplotlib is an extra
    if options.page and results.facts["machine"]["gpu"]:
        found = GPU_TABLE.sub(lambda _: f"{gpu_table(results)}\n", options.page.read_text())
        options.page.write_text(found)
    elif options.page:
        files = [ResultFile.read(RESULTS / name) for name in PROCESSORS]
        options.page.write_text(TABLE.sub(lambda _: f"{headline(*files)}\n", options.page.read_text()))
        chart.save_ratios(results, options.page.parent / "images" / "benchmarks.png", HEADLINE, scheme_of)
    else:
        print(markdown(results))
    if options.picture:
        chart.save(results, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
