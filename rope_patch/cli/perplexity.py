"""`rope-patch perplexity`: perplexity against context length."""

from __future__ import annotations

import argparse
import dataclasses
import json
from textwrap import dedent
from typing import Any

from rope_patch.cli.common import INTERRUPTED, say, whole_numbers


def add(commands: Any) -> None:
    """Register the command."""
    command = commands.add_parser(
        "perplexity",
        help="perplexity against context length, as a table, JSON lines and a chart",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=dedent("""\
            Score the same tokens from contexts of several lengths, under several schemes.

            The plain checkpoint (plain) and attention cut at the training length (window) are always among the lines.
            Every row is written as soon as it is measured: the same command goes on where an interrupted one stopped.
            Several processes that torchrun or accelerate started divide the windows; the rows are those of one.
        """),
        epilog=dedent("""\
            examples:
              rope-patch perplexity --scheme yarn:factor=8 --scheme rerope:window=128+logn --lengths 256,512,1024,2048
              rope-patch perplexity --model DIR --text book.txt --scheme yarn:factor=auto --lengths 4096,8192,16384
              torchrun --nproc-per-node 4 -m rope_patch.cli perplexity --protocol sliding --lengths 4096,8192
        """),
    )
    command.add_argument("--model", metavar="DIR", help="checkpoint folder (default: the one in the repository)")
    command.add_argument(
        "--scheme",
        dest="schemes",
        metavar="SCHEME",
        action="append",
        default=[],
        help="a line of the table, may be repeated; factor=auto and group_size=auto follow each length",
    )
    command.add_argument("--lengths", required=True, metavar="N,N,...", help="context lengths in tokens, ascending")
    text = command.add_argument_group("text (default: the held-out modules of Python's standard library)")
    text.add_argument("--text", metavar="PATH", help="a text file, or a folder of .txt, .md, .rst and .py files")
    text.add_argument("--dataset", metavar="NAME", help="a dataset that `datasets.load_dataset` knows, instead")
    text.add_argument("--split", metavar="NAME", help="its split (default: test)")
    text.add_argument("--column", metavar="NAME", default="text", help="its column with the text (default: text)")
    text.add_argument("--documents", type=int, metavar="N", help="how many documents (default: all)")
    text.add_argument(
        "--windows-per-document", type=int, default=1, metavar="N", help="places scored in each (default: 1, the end)"
    )
    text.add_argument(
        "--tokens-per-document", type=int, metavar="N", help="where whole documents are scored (default: all tokens)"
    )
    text.add_argument("--seed", type=int, default=0, help="of the draw of documents (default: 0)")
    how = command.add_argument_group("how")
    how.add_argument(
        "--protocol",
        default="auto",
        metavar="NAME",
        help="last: the same targets at every length; by_position: one pass at the longest length; span_corruption: "
        "the same hidden spans at every length, for models of T5's style; sliding, disjoint: all tokens of whole "
        "documents; yarn_compat, yarn_truncate: what YaRN's script gives, without and with its --truncate "
        "(default: last, or span_corruption where the model calls for it)",
    )
    how.add_argument("--targets", type=int, metavar="T", help="scored tokens per window (default: min(L, 4096))")
    how.add_argument("--stride", type=int, metavar="S", help="of sliding and yarn_compat, in tokens (default: 256)")
    how.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: the checkpoint's)")
    how.add_argument("--device", default="auto", help="such as cpu or cuda:0 (default: an accelerator, else the CPU)")
    how.add_argument("--attention", default="auto", metavar="NAME", help="attention implementation of Transformers")
    how.add_argument(
        "--no-references", dest="references", action="store_false", help="without the lines plain and window"
    )
    out = command.add_argument_group("output")
    out.add_argument("--output", default="runs/perplexity", metavar="DIR", help="(default: runs/perplexity)")
    out.add_argument("--json", action="store_true", help="print the rows as JSON instead of the table")
    command.set_defaults(run=_perplexity, interrupted=INTERRUPTED)


def run_perplexity(experiment: Any) -> Any:
    """Run an `Experiment`, saying on stderr what it does; the recipe calls this too.

    Returns:
        the `Outcome`.
    """
    from rope_patch.evaluation.experiment import run
    from rope_patch.evaluation.loading import quiet_transformers

    with quiet_transformers():
        return run(experiment, say)


def show_outcome(outcome: Any) -> None:
    """Print the table and where the files are, once, however many processes measured."""
    from rope_patch.evaluation.report import print_table
    from rope_patch.evaluation.sharing import is_main

    if is_main():
        print_table(outcome.rows)
        print(f"rows     {outcome.results}\npicture  {outcome.picture}")


def _perplexity(arguments: argparse.Namespace) -> None:
    from rope_patch.evaluation.experiment import Experiment
    from rope_patch.evaluation.sharing import is_main

    arguments.lengths = whole_numbers("lengths", arguments.lengths, "256,512,1024")
    names = [field.name for field in dataclasses.fields(Experiment)]
    experiment = Experiment(**{name: getattr(arguments, name) for name in names})
    outcome = run_perplexity(experiment)
    if not arguments.json:
        show_outcome(outcome)
    elif is_main():
        print(json.dumps([json.loads(row.to_json()) for row in outcome.rows], indent=2))
