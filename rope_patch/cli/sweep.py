"""`rope-patch sweep`: which scheme suits a checkpoint at a target length."""

from __future__ import annotations

import argparse
import dataclasses
import json
from textwrap import dedent
from typing import Any

from rope_patch.cli.common import INTERRUPTED, say
from rope_patch.errors import EvaluationError


def add(commands: Any) -> None:
    """Register the command."""
    command = commands.add_parser(
        "sweep",
        help="try many schemes at a target length within a budget, and recommend one",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=dedent("""\
            Score the same tokens under many schemes, from the training length up to a target, and recommend one.

            The best guess of every scheme comes first, then log-n, other values and values in between for the best of
            them. The plain checkpoint (plain) and attention cut at the training length (window) are always measured.
            Every row is written as soon as it is measured: the same command goes on where an interrupted one stopped.
        """),
        epilog=dedent("""\
            examples:
              rope-patch sweep --target 4x --documents 6
              rope-patch sweep --model DIR --text book.txt --target 32768 --budget-minutes 60
              rope-patch sweep --model DIR --target 8x --dry-run
              rope-patch sweep recipes/configs/sweep_tiny.yaml
        """),
    )
    command.add_argument("config", nargs="?", metavar="CONFIG", help="a description in YAML; the options overrule it")
    command.add_argument("--target", metavar="N", help="the length that matters, in tokens, or as 4x in multiples of L")
    command.add_argument("--model", metavar="DIR", help="checkpoint folder (default: the one in the repository)")
    what = command.add_argument_group("what to try")
    what.add_argument("--schemes", nargs="+", metavar="NAME", help="these alone, such as rerope yarn (default: all)")
    what.add_argument("--regime", metavar="NAME", help="fine-tune: schemes made to be fine-tuned, too; training-free")
    what.add_argument("--budget-minutes", type=float, metavar="N", help="begin no other line after as many minutes")
    what.add_argument(
        "--budget-measurements", type=int, metavar="N", help="at most as many new measurements of a line at a length"
    )
    text = command.add_argument_group("text (default: the held-out modules of Python's standard library)")
    text.add_argument("--text", metavar="PATH", help="a text file, or a folder of .txt, .md, .rst and .py files")
    text.add_argument("--dataset", metavar="NAME", help="a dataset that `datasets.load_dataset` knows, instead")
    text.add_argument("--split", metavar="NAME", help="its split (default: test)")
    text.add_argument("--column", metavar="NAME", help="its column with the text (default: text)")
    text.add_argument("--documents", type=int, metavar="N", help="how many documents (default: all)")
    text.add_argument("--windows-per-document", type=int, metavar="N", help="places scored in each (default: 1)")
    text.add_argument("--seed", type=int, help="of the draw of documents (default: 0)")
    how = command.add_argument_group("how")
    how.add_argument("--targets", type=int, metavar="T", help="scored tokens per window (default: min(L, 4096))")
    how.add_argument("--dtype", help="auto, float32, bfloat16 or float16 (default: the checkpoint's)")
    how.add_argument("--device", help="such as cpu or cuda:0 (default: an accelerator, else the CPU)")
    how.add_argument("--attention", metavar="NAME", help="attention implementation of Transformers")
    how.add_argument("--dry-run", action="store_true", help="say what would be tried, and measure nothing")
    out = command.add_argument_group("output")
    out.add_argument("--output", metavar="DIR", help="(default: runs/sweep)")
    out.add_argument("--json", action="store_true", help="print what was found as JSON instead of the table")
    command.set_defaults(run=_sweep, interrupted=INTERRUPTED)


def run_sweep(sweep: Any) -> Any:
    """Run a `Sweep`, saying on stderr what it does; the recipe calls this too.

    Returns:
        the `Outcome`.
    """
    from rope_patch.evaluation.loading import quiet_transformers
    from rope_patch.evaluation.sweep import run

    with quiet_transformers():
        return run(sweep, say)


def _sweep(arguments: argparse.Namespace) -> None:
    from rope_patch.evaluation.loading import quiet_transformers
    from rope_patch.evaluation.sweep import plan_of
    from rope_patch.evaluation.sweep_report import print_outcome, show_plan, to_dict

    sweep = _described(arguments)
    if arguments.dry_run:
        with quiet_transformers():
            plan = plan_of(sweep)
        if arguments.json:
            print(json.dumps({"lengths": plan.lengths, "first_round": plan.first_round}, indent=2))
        else:
            print(show_plan(plan))
        return
    outcome = run_sweep(sweep)
    if arguments.json:
        print(json.dumps(to_dict(outcome), indent=2))
    else:
        print_outcome(outcome)


def _described(arguments: argparse.Namespace) -> Any:
    from rope_patch.evaluation.sweep import Sweep

    names = [field.name for field in dataclasses.fields(Sweep)]
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if arguments.config is not None:
        return dataclasses.replace(Sweep.from_yaml(arguments.config), **given)
    if "target" not in given:
        raise EvaluationError("no target was given: name a length in tokens, or 4x, with --target")
    return Sweep(**given)
