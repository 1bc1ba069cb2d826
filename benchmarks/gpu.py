"""All that a quarter of an hour with a GPU should tell, in one command that goes on after a stop: `make gpu`.

python -m benchmarks.gpu [--minutes 15] [--model FOLDER] [--only table parts] [--out runs/gpu]

Parts run in the order of their worth, each in a process of its own that is killed when its time is over. What a part
has found is on disk at once, and the next run goes on behind it. Time that a part leaves goes to the later ones.

- `tests`: the tests for a GPU, each failure with its whole text (tests.jsonl);
- `table`: what a user meets, over plain attention: eager tokens, a prefill, attention alone (cuda.json);
- `compiled`: tokens of compiled models, likewise (cuda.json);
- `profile`: what these times consist of, kernel by kernel (profile.json);
- `parts`: single kernels and executors, timed, and their values against the definition (cuda.json);
- `model`: perplexity, a repeated passage and far text of the checkpoint in --model (checkpoint.json);
- `rest`: all other rows of the catalogue, until the time is over (cuda.json);
- `finetune` and `serve`: only by name, on the checkpoint in --model.

It needs torch, transformers, accelerate and peft, and no network; `tests` also needs pytest, and takes pytest-xdist
where it is there. `--device cpu --quick` tries all of it at tiny sizes, which shows only that it runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import checkpoint, machine
from benchmarks.catalogue import COMPILED, PARTS, TABLE
from benchmarks.results import ResultFile
from rope_patch.errors import RopePatchError
from rope_patch.evaluation.row import provenance
from rope_patch.json_files import read_object, read_rows

ROOT = Path(__file__).parents[1]
WORTH = {"tests": 4, "table": 2, "compiled": 3, "profile": 1, "parts": 2, "model": 2, "rest": 1}
"""Parts in their order, with their minutes of fifteen."""
BY_NAME = {"finetune": 10, "serve": 5}
"""Parts that run only if they are named, with their weights."""
WORKERS = 12
"""Processes of the tests at most: each holds a context on the GPU."""
GRACE = 5.0
"""Seconds that a part has to end by itself after it was asked to."""


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        worth: its share of the time.
        words: the module that runs it, and its arguments.
        file: the name of the file with its rows.
        missing: why it cannot run; empty if it can.
    """

    worth: float
    words: tuple[str, ...]
    file: str
    missing: str = ""


def parts_of(options: argparse.Namespace) -> dict[str, Part]:
    """All parts by name."""
    device, out, sizes = options.device, ("--out", str(options.out)), []
    for name in ("device", "length", "steps", "rows", "prompt", "new"):
        sizes += [f"--{name}", str(getattr(options, name))]
    bench: tuple[str, ...] = ("benchmarks.run", "--device", device, "--catalogue", "cuda", "--resume", *out)
    bench += ("--seconds", "1")  # a GPU repeats most rows dozens of times in it
    bench += ("--picture", str(options.out / "growth.png"), *(("--quick",) if options.quick else ()))
    quick = ("--quick",) if options.quick else ()
    chosen = ("generate/rerope",) if options.quick else COMPILED
    compiled = ("benchmarks.compiled", "--device", device, "--resume", "--seconds", "1", *quick, *out)
    profile = ("benchmarks.profiled", "--device", device, *quick, *out)
    text = ("--text", str(options.text)) if options.text else ()
    model = ("benchmarks.checkpoint", "--model", str(options.model), *text, *sizes, *out, "--only")
    none = "" if options.model else "no --model is given: it takes the folder of a checkpoint"
    table = tuple(f"{group}/rerope" for group in TABLE) if options.quick else TABLE
    rest = ("--only", "flash", "module/rerope") if options.quick else ()
    return {
        "tests": Part(WORTH["tests"], tests(options), "tests.jsonl", _not_installed("pytest")),
        "table": Part(WORTH["table"], (*bench, "--only", *table), f"{device}.json"),
        "compiled": Part(WORTH["compiled"], (*compiled, "--only", *chosen), f"{device}.json"),
        "profile": Part(WORTH["profile"], profile, "profile.json"),
        "parts": Part(WORTH["parts"], (*bench, "--only", *PARTS), f"{device}.json"),
        "model": Part(WORTH["model"], (*model, "far"), "checkpoint.json", none),
        "rest": Part(WORTH["rest"], (*bench, *rest), f"{device}.json"),
        **{name: Part(worth, (*model, name), "checkpoint.json", none) for name, worth in BY_NAME.items()},
    }


def tests(options: argparse.Namespace) -> tuple[str, ...]:
    """The command of the tests: of all files that have some for a GPU, by as many processes as help."""
    outcomes = ("-p", "tests.outcomes", "--outcomes", str(options.out / "tests.jsonl"))
    if options.quick:
        return ("pytest", "-q", *outcomes, "-k", "two_devices", "tests/test_simulated_device.py")
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.cuda" in path.read_text(encoding="utf-8")]
    files += [ROOT / "tests" / "attention" / "test_fused.py"]
    workers = min(WORKERS, max(1, (os.cpu_count() or 1) - 2))
    split = () if _not_installed("xdist") else ("-n", str(workers), "--dist", "worksteal")
    return ("pytest", "-q", *outcomes, *split, *(path.relative_to(ROOT).as_posix() for path in files))


def _not_installed(module: str) -> str:
    return "" if importlib.util.find_spec(module) else f"{module} is not installed"


def limited(words: Sequence[str], seconds: float) -> str:
    """Run a module in a process of its own, and end it with all that it started when its time is over.

    Returns:
        `done`, `failed` where it ended with a status, or `cut`.
    """
    process = subprocess.Popen([sys.executable, "-m", *words], cwd=ROOT, start_new_session=True)
    try:
        return "failed" if process.wait(seconds) else "done"
    except subprocess.TimeoutExpired:
        return "cut"
    finally:  # also where you interrupt
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)


def found_in(path: Path) -> str:
    """The results that a part has written so far, in a few words."""
    try:
        return _counted(path)
    except FileNotFoundError:
        return "nothing was written"
    except (OSError, ValueError, KeyError, RopePatchError) as error:
        return f"the file is damaged: {error}"


def _counted(path: Path) -> str:
    if path.suffix == ".jsonl":
        rows, _ = read_rows(path, path.read_bytes(), json.loads)
        last = {row["test"]: row["outcome"] for row in rows if "test" in row}
        count = Counter(last.values())
        return f"{len(last)} tests ran, {count['failed']} failed, {count['skipped']} skipped"
    if path.stem == "profile":
        calls = read_object(path.read_text(encoding="utf-8"))["calls"]
        return f"{len(calls)} calls, {sum('error' in call for call in calls.values())} failed"
    if path.stem == "checkpoint":
        done = read_object(path.read_text(encoding="utf-8"))["done"]
        return f"{len(done)} measurements, {sum(part['error'] is not None for part in done.values())} failed"
    file = ResultFile.read(path)
    cut = f"; cut within {', '.join(file.unfinished)}" if file.unfinished else ""
    return f"{len(file.rows)} rows, {sum(row.error is not None for row in file.rows)} failed{cut}"


class Record:
    """The state of each part, in `gpu.json`.

    Attributes:
        path: of the file.
        facts: the machine, the commit and the sizes. Results of others are not continued.
        parts: by name, `state`, `seconds` and `limit`.
    """

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self.path, self.facts, self.parts = path, facts, dict[str, dict[str, Any]]()
        self.kept = checkpoint.kept_in(path)
        if self.is_continued:
            self.parts = self.kept["parts"]

    @property
    def is_continued(self) -> bool:
        """Whether the file is of the same machine, commit and sizes."""
        return bool(self.kept.get("facts") == self.facts)

    def put(self, name: str, **fields: Any) -> None:
        """Write what became of a part."""
        self.parts[name] = fields
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.path.with_suffix(".tmp")
        aside.write_text(json.dumps({"facts": self.facts, "parts": self.parts}, indent=1) + "\n")
        aside.replace(self.path)


def run(parts: dict[str, Part], names: Sequence[str], record: Record, minutes: float) -> None:
    """Run parts, each for its share of the time that is left."""
    waiting = [name for name in names if not parts[name].missing and record.parts.get(name, {}).get("state") != "done"]
    end = time.perf_counter() + 60 * minutes
    while waiting and (left := end - time.perf_counter()) > 0:
        limit = left * parts[waiting[0]].worth / sum(parts[name].worth for name in waiting)
        name = waiting.pop(0)
        print(f"== {name}: at most {limit:.0f} s", flush=True)
        record.put(name, state="cut", seconds=0.0, limit=round(limit, 1))  # if this process is killed too
        start = time.perf_counter()
        state = limited(parts[name].words, limit)
        record.put(name, state=state, seconds=round(time.perf_counter() - start, 1), limit=round(limit, 1))


def summary(parts: dict[str, Part], names: Sequence[str], record: Record) -> str:
    """A summary: the parts that ran, those that were cut, and the files of their rows."""
    lines = []
    for name in names:
        part, now = parts[name], record.parts.get(name)
        path = record.path.parent / part.file
        if part.missing or now is None:
            lines.append(f"{name:9} not run: {part.missing or 'no time was left'}")
        else:
            state = f"{now['state']} after {now['seconds']:.0f} s of {now['limit']:.0f}"
            lines.append(f"{name:9} {state}: {found_in(path)} ({path})")
    if any(record.parts.get(name, {}).get("state") != "done" for name in names if not parts[name].missing):
        lines.append("the same command goes on where this one stopped")
    return "\n".join([*lines, f"all of it: {record.path}"])


def main(words: Sequence[str] | None = None) -> int:
    """The command line.

    Returns:
        2 without the device or beside results of another machine, 1 if a part failed, else 0: a cut part is no error.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Measure all on a GPU.")
    parser.add_argument("--minutes", type=float, default=15.0, help="for all parts together (default %(default)s)")
    parser.add_argument("--model", type=Path, help="folder of a checkpoint; without it the part `model` is left out")
    checkpoint.add_options(parser)
    parser.add_argument("--only", nargs="+", choices=[*WORTH, *BY_NAME], default=[*WORTH], help="parts")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that everything runs")
    parser.add_argument("--out", type=Path, help="folder of the results (default runs/gpu)")
    options = parser.parse_args(words)
    if reason := machine.missing(options.device):
        print(reason, file=sys.stderr)
        return 2
    if options.quick:
        options.length, options.steps, options.rows, options.prompt, options.new = 512, 2, 2, 32, 4
        options.model = options.model or ROOT / "recipes" / "assets" / "tiny-llama"
    options.out = (options.out or Path("runs", "gpu-quick" if options.quick else "gpu")).resolve()
    options.model = options.model and options.model.resolve()
    options.text = options.text and options.text.resolve()
    settings = {name: str(value) for name, value in vars(options).items() if name not in ("only", "minutes", "out")}
    facts = {**machine.facts(options.device), "commit": provenance()["commit"], "options": settings}
    record = Record(options.out / "gpu.json", facts)
    if record.kept and not record.is_continued and not options.quick:
        print(f"{record.path} is of another machine, commit or size: give another --out", file=sys.stderr)
        return 2
    parts = parts_of(options)
    try:
        run(parts, options.only, record, options.minutes)
    finally:
        print(summary(parts, options.only, record))
    return int(any(record.parts.get(name, {}).get("state") == "failed" for name in options.only))


if __name__ == "__main__":
    sys.exit(main())
