"""`rope-patch perplexity`: perplexity against context length."""

from __future__ import annotations

import argparse
from typing import Any

from rope_patch.cli.common import ROWS, quietly
from rope_patch.cli.options import add_documents, add_measuring, add_schemes_at_lengths, given, whole_numbers
from rope_patch.cli.parser import add_command
from rope_patch.cli.showing import print_rows, show_outcome


def add(commands: Any) -> None:
    """Register the command."""
    command = add_command(
        commands,
        "perplexity",
        summary="perplexity against context length, as a table, JSON lines and a chart",
        description="""\
Score the same tokens from contexts of several lengths, under several schemes.

The plain checkpoint (plain) and attention cut at the training length (window) are always among the lines, unless
--no-references says otherwise. Every row is written as soon as it is measured: the same command goes on where an
interrupted one stopped. Several processes that torchrun or accelerate started divide the windows; the rows are those
of one.

The examples measure the small checkpoint that comes with the library; add --model DIR --text FILE for your own.
""",
        examples=(
            "rope-patch perplexity --scheme yarn:factor=auto --lengths 256,512,1024 --documents 4",
            "rope-patch perplexity --scheme rerope:window=128+logn --lengths 256,1024 --targets 64 --documents 4",
            "rope-patch perplexity --protocol sliding --lengths 256,512 --documents 1 --tokens-per-document 1024",
            "torchrun --nproc-per-node 2 -m rope_patch.cli perplexity --lengths 256,512 --documents 4",
        ),
        written="DIR/perplexity.jsonl, a row for each scheme and length, and DIR/perplexity.png, the chart; DIR is "
        "--output.",
    )
    add_schemes_at_lengths(command, "a line of the table")
    text, how = add_measuring(
        command,
        text="default: the held-out modules of Python's standard library",
        seed="the draw of documents",
        output="runs/perplexity",
    )
    add_documents(text)
    text.add_argument(
        "--tokens-per-document", type=int, metavar="N", help="where whole documents are scored (default: all tokens)"
    )
    how.add_argument(
        "--protocol",
        metavar="NAME",
        help="last: the same targets at every length; by_position: one pass at the longest length; span_corruption: "
        "the same hidden spans at every length, for models of T5's style; sliding, disjoint: all tokens of whole "
        "documents; yarn_compat, yarn_truncate: what YaRN's script gives, without and with its --truncate "
        "(default: last, or span_corruption where the model calls for it)",
    )
    how.add_argument("--targets", type=int, metavar="T", help="scored tokens per window (default: min(L, 4096))")
    how.add_argument(
        "--stride", type=int, metavar="S", help="of sliding and yarn_compat, in tokens (default: 256, or less)"
    )
    command.set_defaults(run=_perplexity, kept=ROWS)


def _perplexity(arguments: argparse.Namespace) -> None:
    from rope_patch.evaluation.experiment import Experiment, run
    from rope_patch.evaluation.report import print_table

    arguments.lengths = whole_numbers("lengths", arguments.lengths, "256,512,1024")
    outcome = quietly(run, Experiment(**given(arguments, Experiment)))
    if arguments.json:
        print_rows(outcome.rows)
    else:
        show_outcome(outcome, lambda console: print_table(outcome.rows, console))
