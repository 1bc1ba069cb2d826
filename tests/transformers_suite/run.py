"""Runs Transformers' own model and generation tests unpatched and under schemes, and prints what fails only patched.

    python -m tests.transformers_suite.run CHECKOUT [--models llama,t5] [--schemes native,rerope:window=4,alibi]

CHECKOUT is a working tree of Transformers at the release that is installed; its tests run against the installed
package. They want `parameterized` and `httpx`, and the time limit wants `pytest-timeout`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MODELS = "llama,mistral,qwen3,phi3,gpt_neox,olmo2,gemma3,t5"
SCHEMES = "native,native-late,rerope:window=4,alibi"
UNPATCHED = "unpatched"

Outcome = dict[str, Any]


def main() -> None:
    """Run what was asked for, and compare."""
    asked = _parser().parse_args()
    checkout, out = asked.checkout.resolve(), asked.out.resolve()
    models, schemes = asked.models.split(","), split_schemes(asked.schemes)
    paths = {model: _tests_of(model) for model in models}
    if missing := [path for path in paths.values() if not (checkout / path).is_file()]:
        sys.exit(f"{checkout} has no {', '.join(missing)}")
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Outcome]] = {}
    for scheme in [UNPATCHED, *schemes]:
        found[scheme] = {}
        for model, path in paths.items():
            file = out / f"{re.sub('[^a-z0-9=]+', '-', scheme)}.{model}.jsonl"
            if not (asked.resume and file.is_file()):
                print(f"{scheme}, {model}", flush=True)
                _run(checkout, path, scheme, file, asked)
            found[scheme] |= read_outcomes(file)
    report(found)


def split_schemes(text: str) -> list[str]:
    """Schemes divided by commas, which may also stand between the fields of one: `native,selfextend:a=1,b=2`."""
    return re.split(r",(?!\w+=)", text)


def read_outcomes(file: Path) -> dict[str, Outcome]:
    """What became of each test, by its name; nothing where no test began."""
    lines = file.read_text().splitlines() if file.is_file() else []
    return {line["test"]: line for line in map(json.loads, lines)}


def report(found: dict[str, dict[str, Outcome]]) -> None:
    """Print how many tests passed under each scheme, and those that fail only there."""
    baseline = found[UNPATCHED]
    print(f"\n{'':24}{'passed':>8}{'failed':>8}{'skipped':>8}{'passed on patched models':>28}")
    for scheme, outcomes in found.items():
        counts = Counter(line["outcome"] for line in outcomes.values())
        saw = sum(line["outcome"] == "passed" and line["patched"] > 0 for line in outcomes.values())
        print(f"{scheme:24}{counts['passed']:8}{counts['failed']:8}{counts['skipped']:8}{saw:28}")
    for scheme, outcomes in found.items():
        only = only_patched(baseline, outcomes)
        if scheme != UNPATCHED:
            print(f"\n{scheme}: {len(only)} tests fail only under the patch")
        for line in only:
            print(f"  {line['test']}\n      {line['error']}")
        left: Counter[str] = sum((Counter(line["left"]) for line in outcomes.values()), Counter())
        for reason, count in left.most_common():
            print(f"  left unpatched {count} times: {reason}")
        for test in baseline.keys() - outcomes.keys():
            print(f"  never ended: {test}")


def only_patched(baseline: dict[str, Outcome], outcomes: dict[str, Outcome]) -> list[Outcome]:
    """The failures of tests that do not fail unpatched."""
    return [
        line
        for test, line in outcomes.items()
        if line["outcome"] == "failed" and baseline.get(test, {}).get("outcome") != "failed"
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.transformers_suite.run", description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path, help="a working tree of Transformers")
    parser.add_argument("--models", default=MODELS, help=f"default {MODELS}; also generation, which wants the network")
    parser.add_argument("--schemes", default=SCHEMES, help=f"default {SCHEMES}")
    parser.add_argument("--out", type=Path, default=Path("runs/transformers_suite"), help="folder for the outcomes")
    parser.add_argument("--only", help="expression on the names of tests, as pytest's -k")
    parser.add_argument("--limit", type=int, default=120, help="seconds a test may take, 120 by default")
    parser.add_argument("--resume", action="store_true", help="keep the outcomes that are there")
    return parser


def _tests_of(model: str) -> str:
    if model == "generation":
        return "tests/generation/test_utils.py"
    return f"tests/models/{model}/test_modeling_{model}.py"


def _run(checkout: Path, path: str, scheme: str, file: Path, asked: argparse.Namespace) -> None:
    """Run one file of tests in a process of its own; what it prints goes beside its outcomes."""
    partial = file.with_suffix(".part")
    for old in (partial, file):
        old.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "plugin", "--patch-scheme", scheme, "--outcomes", str(partial)]
    for setting in ("addopts=", "filterwarnings=", "log_cli=false"):  # the checkout's are those of its own machines
        command += ["-o", setting]
    command += ["--noconftest", "-p", "no:cacheprovider", f"--timeout={asked.limit}"]
    command += ["-q", "-W", "ignore", "--tb=short", "--show-capture=no", path]
    command += ["-k", asked.only] if asked.only else []
    places = os.pathsep.join(map(str, (HERE, HERE.parents[1])))  # of the plugin, and of this library
    environment = {**os.environ, "PYTHONPATH": places, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["DISABLE_SAFETENSORS_CONVERSION"] = "true"
    with file.with_suffix(".log").open("w") as log:
        code = subprocess.run(command, cwd=checkout, env=environment, stdout=log, stderr=log, check=False).returncode
    if code not in (0, 1):
        print(f"  pytest ended with {code}; see {file.with_suffix('.log')}")
    if partial.is_file():
        partial.rename(file)


if __name__ == "__main__":
    main()
