"""Check every model type and write docs/families.md: `python -m tests.zoo`, or `make zoo` (under forty minutes).

Each type has a process of its own and a time limit. `runs/zoo.jsonl` has a line per type: a run that was stopped
goes on, and `--only TYPE ...` repeats those types. The page is written from `docs/results/zoo/zoo.jsonl` when every
type has a line.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import resource
import sys
import time
import traceback
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from rope_patch import RopePatchError
from tests.zoo import page
from tests.zoo.builder import NotBuilt, model_types, run, specimen, text
from tests.zoo.checks import CHECKS, SPECS, TOLERANCE, Blind, PlainFails, difference, fits, table

ROWS = Path("runs/zoo.jsonl")
_SECONDS = 60


def checked(model_type: str) -> dict[str, Any]:
    """One row: the class, and a figure or a reason for each check."""
    try:
        found = specimen(model_type)
    except NotBuilt as error:
        return {"type": model_type, "reason": str(error)[:300]}
    name = type(found.model).__name__
    if not found.reads_text:
        rows = {scheme: _outcome(partial(fits, scheme=scheme), found) for scheme in (*SPECS.values(), "hierarchical")}
        if not all(str(outcome).startswith("refused") for outcome in rows.values()):
            return {"type": model_type, "class": name, "reason": "it reads more than text"}
        return {"type": model_type, "class": name, "checks": {"rerope": rows[SPECS["rerope"]]}}
    fails, draws = None, False
    try:
        draws = difference(run(found.fresh(), text()), run(found.fresh(), text())) > TOLERANCE
    except Exception as error:  # a table of positions ends before this text does
        fails = f"the plain model does not run: {_short(error)}"
    if draws:
        return {"type": model_type, "class": name, "reason": "it draws at random: one text has many outputs"}
    rows: dict[str, Any] = {check: _outcome(CHECKS[check], found) for check in CHECKS}
    if all(str(rows[scheme]).startswith("blind") for scheme in SPECS):
        return {"type": model_type, "class": name, "reason": "its outputs do not show its attention"}
    if all(str(rows[scheme]).startswith("refused") for scheme in SPECS):
        rows = {"rerope": rows["rerope"], "table": _outcome(table, found)}
    elif fails:
        return {"type": model_type, "class": name, "reason": fails}
    return {"type": model_type, "class": name, "checks": rows}


def _outcome(check: Any, found: Any) -> float | str:
    try:
        return float(f"{check(found):.1e}")
    except (Blind, PlainFails) as error:
        return f"{'blind' if isinstance(error, Blind) else 'plain'}: {_short(error)}"
    except RopePatchError as error:
        return f"refused: {_short(error)}"
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = next((f for f in reversed(frames) if "rope_patch/" in f.filename), frames[-1])
        return f"foreign: {type(error).__name__}: {_short(error)} ({Path(where.filename).name}:{where.lineno})"


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:240]


def alone(model_type: str) -> dict[str, Any]:
    """`checked` in a process of its own, which ends after some seconds of computing or many of waiting."""
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def work() -> None:
        torch.set_num_threads(1)  # a fork has none of the threads of its parent, and would wait for them
        gc.freeze()  # whoever collects garbage need not walk through all that was imported
        resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
        sender.send(checked(model_type))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    sender.close()  # so that a process that ended is seen
    try:
        if receiver.poll(10 * _SECONDS):
            return receiver.recv()
    except EOFError:
        pass
    finally:
        process.kill()
        process.join()
    return {"type": model_type, "reason": f"no answer within {_SECONDS} seconds"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="check these types again")
    parser.add_argument("--page", action="store_true", help="write the page from the committed rows alone")
    options = parser.parse_args()
    if not options.page:
        _check_all(options.only)
    page.write()


def _check_all(only: list[str] | None) -> None:
    ROWS.parent.mkdir(exist_ok=True)
    ROWS.touch()
    types = model_types()
    for model_type in only or types:
        if not only and model_type in page.read(ROWS):  # of a run that was stopped, or runs beside this one
            continue
        started = time.perf_counter()
        row = alone(model_type)
        with ROWS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{model_type}: {page.verdict(row)[0]}, {time.perf_counter() - started:.1f} s", flush=True)
    rows = page.read(ROWS)
    if set(types) <= rows.keys():
        page.store(rows[name] for name in types)


if __name__ == "__main__":
    sys.modules.setdefault("tests.zoo.__main__", sys.modules["__main__"])
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    main()
