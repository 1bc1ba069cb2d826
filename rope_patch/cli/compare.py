"""`rope-patch compare`: position encodings trained side by side."""

from __future__ import annotations

import argparse
import dataclasses
from textwrap import dedent
from typing import Any

from rope_patch.cli.common import INTERRUPTED, say, whole_numbers
from rope_patch.errors import EvaluationError


def add(commands: Any) -> None:
    """Register the command."""
    command = commands.add_parser(
        "compare",
        help="position encodings, each trained from scratch on the same data, and their perplexity against length",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=dedent("""\
            Train the same small model on the same bytes once per position encoding and seed, at a short length, then
            score the same held-out bytes from contexts of 1, 2, 4 and 8 times that length.

            Every row is written as soon as it is measured: the same command goes on where an interrupted one stopped.
            Two processes may share an output where each is told other encodings with --only.
        """),
        epilog=dedent("""\
            examples:
              rope-patch compare recipes/configs/compare.yaml
              rope-patch compare recipes/configs/compare.yaml --only rope nope alibi
              rope-patch compare recipes/configs/compare.yaml --costs
              rope-patch compare --schemes rope nope alibi --steps 300 --seeds 0,1 --output runs/three
        """),
    )
    command.add_argument("config", nargs="?", metavar="CONFIG", help="a description in YAML; the options overrule it")
    command.add_argument("--schemes", nargs="+", metavar="SCHEME", help="what to compare, such as rope nope alibi")
    command.add_argument("--only", nargs="+", default=[], metavar="SCHEME", help="work on these of them alone")
    command.add_argument("--steps", type=int, metavar="N", help="of each training")
    command.add_argument("--seeds", metavar="N,N,...", help="one training of every encoding for each")
    command.add_argument("--device", metavar="NAME", help="such as cpu or cuda")
    command.add_argument("--output", metavar="DIR", help="folder of the results")
    command.add_argument("--costs", action="store_true", help="do not train: time a step of each in turn with rope")
    command.add_argument("--retry", action="store_true", help="train again what failed before")
    command.set_defaults(run=_compare, interrupted=INTERRUPTED + ": {command}")


def _compare(arguments: argparse.Namespace) -> None:
    from rope_patch.evaluation.loading import quiet_transformers
    from rope_patch.training.comparison import Comparison
    from rope_patch.training.experiment import run
    from rope_patch.training.report import print_table

    given = {
        "encodings": tuple(arguments.schemes) if arguments.schemes is not None else None,
        "seeds": whole_numbers("seeds", arguments.seeds, "0,1,2") if arguments.seeds is not None else None,
        "steps": arguments.steps,
        "output": arguments.output,
        "device": arguments.device,
    }
    changed = {name: value for name, value in given.items() if value is not None}
    if arguments.config is not None:
        comparison = dataclasses.replace(Comparison.from_yaml(arguments.config), **changed)
    elif "encodings" in changed:
        comparison = Comparison(**changed)
    else:
        raise EvaluationError("nothing to compare: give a description in YAML, or --schemes such as rope nope alibi")
    with quiet_transformers():
        outcome = run(comparison, say, only=arguments.only, costs=arguments.costs, retry=arguments.retry)
    if outcome is None:
        return
    print_table(outcome.summary)
    for name in ("results", "table", "numbers", "picture"):
        print(f"{name:<8} {getattr(outcome, name)}")
