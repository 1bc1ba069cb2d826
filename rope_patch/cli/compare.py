"""`rope-patch compare`: position encodings trained side by side."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from rope_patch.cli.common import ROWS, say
from rope_patch.cli.options import add_json, whole_numbers
from rope_patch.cli.parser import add_command
from rope_patch.cli.showing import print_json, show_outcome
from rope_patch.errors import EvaluationError

PATHS = ("table", "numbers", "picture")
"""The files of a comparison, besides its rows."""


def add(commands: Any) -> None:
    """Register the command."""
    command = add_command(
        commands,
        "compare",
        summary="position encodings, each trained from scratch on the same data, and their perplexity against length",
        description="""\
Train the same small model on the same bytes once per position encoding and seed, at a short length, then score the
same held-out bytes from contexts of 1, 2, 4 and 8 times that length.

Every row is written as soon as it is measured: the same command goes on where an interrupted one stopped. Two
processes may share an output where each is told other encodings with --only.
""",
        examples=(
            "rope-patch compare --schemes rope nope alibi --steps 100 --output runs/three",
            "rope-patch compare --schemes rope nope alibi --steps 100 --output runs/three --costs",
            "rope-patch recipes copy compare_demo",
            "rope-patch compare recipes/configs/compare_demo.yaml --only rope alibi",
        ),
        written="DIR/results.jsonl, a row for each encoding, seed and length; DIR/table.md and DIR/summary.json, what "
        "they come to; DIR/comparison.png; DIR/runs, the state of every training. DIR is --output.",
    )
    command.add_argument("config", nargs="?", metavar="CONFIG", help="a description in YAML; the options overrule it")
    command.add_argument("--schemes", nargs="+", metavar="SCHEME", help="what to compare, such as rope nope alibi")
    command.add_argument("--only", nargs="+", default=[], metavar="SCHEME", help="work on these of them alone")
    command.add_argument("--steps", type=int, metavar="N", help="of each training")
    command.add_argument("--seeds", metavar="N,N,...", help="one training of every encoding for each")
    command.add_argument("--device", metavar="NAME", help="such as cpu or cuda")
    command.add_argument("--output", metavar="DIR", help="folder of the results (default: runs/compare)")
    command.add_argument("--costs", action="store_true", help="do not train: time a step of each in turn with rope")
    command.add_argument("--retry", action="store_true", help="train again what failed before")
    add_json(command)
    command.set_defaults(run=_compare, kept=ROWS)


def _compare(arguments: argparse.Namespace) -> None:
    from rope_patch.evaluation.loading import quiet_transformers
    from rope_patch.training.experiment import run
    from rope_patch.training.report import print_table, to_dict

    comparison = _described(arguments)
    with quiet_transformers():
        outcome = run(comparison, say, only=arguments.only, costs=arguments.costs, retry=arguments.retry)
    if arguments.json:
        print_json(None if outcome is None else to_dict(outcome.summary))
    elif outcome is not None:
        show_outcome(outcome, lambda console: print_table(outcome.summary, console), PATHS)


def _described(arguments: argparse.Namespace) -> Any:
    from rope_patch.training.comparison import Comparison

    given = {
        "encodings": tuple(arguments.schemes) if arguments.schemes is not None else None,
        "seeds": whole_numbers("seeds", arguments.seeds, "0,1,2") if arguments.seeds is not None else None,
        "steps": arguments.steps,
        "output": arguments.output,
        "device": arguments.device,
    }
    changed = {name: value for name, value in given.items() if value is not None}
    if arguments.config is not None:
        return dataclasses.replace(Comparison.from_yaml(arguments.config), **changed)
    if "encodings" not in changed:
        raise EvaluationError("nothing to compare: give a description in YAML, or --schemes such as rope nope alibi")
    return Comparison(**changed)
