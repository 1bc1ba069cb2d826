"""`rope-patch sweep`: which scheme suits a checkpoint at a target length."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from rope_patch.cli.common import ROWS, is_first, quietly
from rope_patch.cli.options import add_documents, add_measuring, given
from rope_patch.cli.parser import add_command
from rope_patch.cli.showing import print_json, show_outcome
from rope_patch.errors import EvaluationError


def add(commands: Any) -> None:
    """Register the command."""
    command = add_command(
        commands,
        "sweep",
        summary="try many schemes at a target length within a budget, and recommend one",
        description="""\
Score the same tokens under many schemes, from the training length up to a target, and recommend one.

The best guess of every scheme comes first, then log-n, other values and values in between for the best of them. The
plain checkpoint (plain) and attention cut at the training length (window) are always measured. Every row is written as
soon as it is measured: the same command goes on where an interrupted one stopped. Several processes that torchrun or
accelerate started divide the windows; the rows are those of one.

The examples measure the small checkpoint that comes with the library; add --model DIR --text FILE for your own.
""",
        examples=(
            "rope-patch sweep --target 4x --dry-run",
            "rope-patch sweep --target 4x --documents 4",
            "rope-patch sweep --target 2x --documents 4 --schemes rerope yarn --budget-minutes 1",
            "rope-patch recipes copy sweep_tiny",
            "rope-patch sweep recipes/configs/sweep_tiny.yaml",
        ),
        written="DIR/sweep.jsonl, a row for each scheme and length, and DIR/sweep.png, the chart; DIR is --output.",
    )
    command.add_argument("config", nargs="?", metavar="CONFIG", help="a description in YAML; the options overrule it")
    command.add_argument("--target", metavar="N", help="the length that matters, in tokens, or as 4x in multiples of L")
    what = command.add_argument_group("what to try")
    what.add_argument("--schemes", nargs="+", metavar="NAME", help="these alone, such as rerope yarn (default: all)")
    what.add_argument("--regime", metavar="NAME", help="fine-tune: schemes made to be fine-tuned, too; training-free")
    what.add_argument("--budget-minutes", type=float, metavar="N", help="begin no other line after as many minutes")
    what.add_argument(
        "--budget-measurements", type=int, metavar="N", help="at most as many new measurements of a line at a length"
    )
    text, how = add_measuring(
        command,
        text="default: the held-out modules of Python's standard library",
        seed="the draw of documents",
        output="runs/sweep",
    )
    add_documents(text)
    how.add_argument("--targets", type=int, metavar="T", help="scored tokens per window (default: min(L, 4096))")
    how.add_argument("--dry-run", action="store_true", help="say what would be tried, and measure nothing")
    command.set_defaults(run=_sweep, kept=ROWS)


def _sweep(arguments: argparse.Namespace) -> None:
    from rope_patch.evaluation.sweep import plan_of, run
    from rope_patch.evaluation.sweep_report import print_outcome, show_plan, to_dict

    sweep = _described(arguments)
    if arguments.dry_run:
        plan = quietly(lambda sweep, _: plan_of(sweep), sweep)
        if arguments.json:
            print_json({"lengths": plan.lengths, "first_round": plan.first_round})
        elif is_first():
            print(show_plan(plan))
        return
    outcome = quietly(run, sweep)
    if arguments.json:
        print_json(to_dict(outcome))
    else:
        show_outcome(outcome, lambda console: print_outcome(outcome, console))


def _described(arguments: argparse.Namespace) -> Any:
    from rope_patch.evaluation.sweep import Sweep

    settings = given(arguments, Sweep)
    if arguments.config is not None:
        return dataclasses.replace(Sweep.from_yaml(arguments.config), **settings)
    if "target" not in settings:
        raise EvaluationError("no target was given: name a length in tokens, or 4x, with --target")
    return Sweep(**settings)
