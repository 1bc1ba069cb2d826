"""Puts faults into a copy of the package, one at a time, and names those that no test sees: `make faults`.

    python -m tests.faults [WORD ...] [--faults FILE]

A WORD picks the faults with it in their name or file; a word that picks none is an error. A fault replaces a text that
its file has once; its tests must pass without it and fail with it. The tests of `tests/faults/faults.yaml` belong to
the usual run, so a suite that was made faster has lost nothing as long as every fault is still seen.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
FAULTS = Path(__file__).with_name("faults.yaml")
PASSED, FAILED = 0, 1  # exit codes of pytest; others mean that it could not run the tests
_TIMES = itertools.count(1)


@dataclass(frozen=True)
class Fault:
    """A wrong text in place of a right one, and the tests that must fail with it."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]

    def put_into(self, root: Path) -> str:
        """Change the file below `root`, and return its old text; a `LookupError` if the fault has no place there."""
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if text.count(self.old) != 1:
            raise LookupError(f"{self.file} has {text.count(self.old)} places with {self.old!r}; write this fault anew")
        write(path, text.replace(self.old, self.new))
        return text


def write(path: Path, text: str) -> None:
    """Each text of a file at another time, or bytecode of one would be read for another of its size."""
    path.write_text(text, encoding="utf-8")
    time_of_text = next(_TIMES)
    os.utime(path, (time_of_text, time_of_text))


def read(path: Path) -> list[Fault]:
    """The faults of a list."""
    return [Fault(**entry) for entry in yaml.safe_load(path.read_text(encoding="utf-8"))]


def run(root: Path, tests: list[str]) -> tuple[int, str]:
    """Exit code and output of the tests below `root`, up to the first that fails."""
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # most modules are the same for every fault
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def verdict(root: Path, fault: Fault) -> str:
    """`seen`, or why this is not known."""
    try:
        text = fault.put_into(root)
    except LookupError as error:
        return f"STALE: {error}"
    try:
        code, output = run(root, fault.tests)
    finally:
        write(root / fault.file, text)
    if code == PASSED:
        return "SURVIVED"
    return "seen" if code == FAILED else f"NOT RUN:\n{output[-2000:]}"


def picked(faults: list[Fault], words: list[str]) -> list[Fault]:
    """The faults that one of the words picks; all without a word.

    Raises:
        LookupError: a word picks none.
    """
    places = {fault.name: f"{fault.name} {fault.file}" for fault in faults}
    for word in words:
        if not any(word in place for place in places.values()):
            raise LookupError(f"no fault has {word!r} in its name or file; {len(faults)} faults are known")
    return [fault for fault in faults if not words or any(word in places[fault.name] for word in words)]


def main() -> None:
    """Try the faults that were asked for; the exit status is 1 if any is not seen."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--faults", type=Path, default=FAULTS, metavar="FILE")
    asked = parser.parse_args()
    try:
        faults = picked(read(asked.faults), asked.words)
    except LookupError as error:
        parser.error(error.args[0])
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "copy")
        others = shutil.ignore_patterns(".*", "__pycache__", "runs", "build", "dist", "site")
        shutil.copytree(ROOT, root, ignore=others)
        code, output = run(root, sorted({test for fault in faults for test in fault.tests}))
        if code != PASSED:
            sys.exit(f"the tests fail without any fault:\n{output[-4000:]}")
        unseen = 0
        for number, fault in enumerate(faults, 1):
            start, found = time.perf_counter(), verdict(root, fault)
            unseen += found != "seen"
            took = time.perf_counter() - start
            print(f"{number}/{len(faults)} {fault.file}: {fault.name} ({took:.0f} s): {found}", flush=True)
    print(f"{len(faults) - unseen} of {len(faults)} faults are seen")
    sys.exit(unseen > 0)


if __name__ == "__main__":
    main()
