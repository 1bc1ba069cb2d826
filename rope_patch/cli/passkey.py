"""`rope-patch passkey`: retrieval against depth and length."""

from __future__ import annotations

import argparse
from typing import Any

from rope_patch.cli.common import ROWS, quietly
from rope_patch.cli.options import add_measuring, add_schemes_at_lengths, given, whole_numbers
from rope_patch.cli.parser import add_command
from rope_patch.cli.showing import print_rows, show_outcome
from rope_patch.errors import EvaluationError


def add(commands: Any) -> None:
    """Register the command."""
    command = add_command(
        commands,
        "passkey",
        summary="retrieval of what stands at some depth of a long context, as tables, JSON lines and heat maps",
        description="""\
Hide something at several depths of contexts of several lengths and ask for it, under several schemes.

Task passkey hides five digits in English filler and wants them back. Task spans is synthetic and for small
checkpoints: a span of text is to be repeated from its beginning.

The plain checkpoint (plain) and attention cut at the training length (window) are always among the lines, unless
--no-references says otherwise. Every row is written as soon as it is measured: the same command goes on where an
interrupted one stopped. Several processes that torchrun or accelerate started divide the prompts; the rows are those
of one.

The examples measure the small checkpoint that comes with the library, which can do task spans alone; for a checkpoint
that reads English leave --task out and add --model DIR.
""",
        examples=(
            "rope-patch passkey --task spans --scheme yarn:factor=auto --lengths 256,1024 --trials 2",
            "rope-patch passkey --task spans --scheme rerope:window=128+logn --lengths 512 --depths 0,0.1,0.5",
        ),
        written="DIR/TASK.jsonl, a row for each scheme, length and depth, and DIR/TASK.png, the heat maps; DIR is "
        "--output.",
    )
    command.add_argument("--task", metavar="NAME", help="passkey or spans (default: passkey)")
    add_schemes_at_lengths(command, "a heat map")
    command.add_argument("--depths", metavar="N", help="how many, or a list of shares such as 0,0.5,1 (default: 5)")
    command.add_argument("--trials", type=int, metavar="N", help="prompts in each cell (default: 10)")
    spans, how = add_measuring(
        command,
        text="of task spans; default: the held-out modules of Python's standard library",
        seed="the prompts",
        output="runs/retrieval",
    )
    spans.add_argument("--span", type=int, metavar="N", help="tokens of a span (default: 32)")
    how.add_argument("--batch-size", type=int, metavar="N", help="prompts answered together (default: 1)")
    command.set_defaults(run=_passkey, kept=ROWS)


def _passkey(arguments: argparse.Namespace) -> None:
    from rope_patch.evaluation.retrieval.experiment import Retrieval, run
    from rope_patch.evaluation.retrieval.report import print_tables

    arguments.lengths = whole_numbers("lengths", arguments.lengths, "4096,8192,16384")
    if arguments.depths is not None:
        arguments.depths = _depths(arguments.depths)
    outcome = quietly(run, Retrieval(**given(arguments, Retrieval)))
    if arguments.json:
        print_rows(outcome.rows)
    else:
        show_outcome(outcome, lambda console: print_tables(outcome.rows, console))


def _depths(words: str) -> int | tuple[float, ...]:
    """How many, or which."""
    try:
        return int(words) if words.isdecimal() else tuple(float(word) for word in words.split(","))
    except ValueError:
        raise EvaluationError(f"depths {words!r}: how many, such as 5, or shares, such as 0,0.5,1") from None
