"""`rope-patch passkey`: retrieval against depth and length."""

from __future__ import annotations

import argparse
import dataclasses
import json
from textwrap import dedent
from typing import Any

from rope_patch.cli.common import INTERRUPTED, say, whole_numbers
from rope_patch.errors import EvaluationError


def add(commands: Any) -> None:
    """Register the command."""
    command = commands.add_parser(
        "passkey",
        help="retrieval of what stands at some depth of a long context, as tables, JSON lines and heat maps",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=dedent("""\
            Hide something at several depths of contexts of several lengths and ask for it, under several schemes.

            Task passkey hides five digits in English filler and wants them back. Task spans is synthetic and for small
            checkpoints: a span of text is to be repeated from its beginning.
            The plain checkpoint (plain) and attention cut at the training length (window) are always among the lines.
            Every row is written as soon as it is measured: the same command goes on where an interrupted one stopped.
        """),
        epilog=dedent("""\
            examples:
              rope-patch passkey --task spans --scheme yarn:factor=auto --scheme rerope:window=128 --lengths 256,1024
              rope-patch passkey --model DIR --scheme yarn:factor=auto --lengths 4096,8192,16384 --depths 10
              rope-patch passkey --model DIR --scheme rerope:window=1024+logn --lengths 8192 --depths 0,0.1,0.5
        """),
    )
    command.add_argument("--model", metavar="DIR", help="checkpoint folder (default: the one in the repository)")
    command.add_argument("--task", default="passkey", metavar="NAME", help="passkey or spans (default: passkey)")
    command.add_argument(
        "--scheme",
        dest="schemes",
        metavar="SCHEME",
        action="append",
        default=[],
        help="a heat map, may be repeated; factor=auto and group_size=auto follow each length",
    )
    command.add_argument("--lengths", required=True, metavar="N,N,...", help="context lengths in tokens, ascending")
    command.add_argument(
        "--depths", default="5", metavar="N", help="how many, or a list of shares such as 0,0.5,1 (default: 5)"
    )
    command.add_argument("--trials", type=int, default=10, metavar="N", help="prompts in each cell (default: 10)")
    command.add_argument("--seed", type=int, default=0, help="of the prompts (default: 0)")
    spans = command.add_argument_group("task spans")
    spans.add_argument("--span", type=int, default=32, metavar="N", help="tokens of a span (default: 32)")
    spans.add_argument(
        "--text",
        metavar="PATH",
        help="a text file, or a folder of .txt, .md, .rst and .py files (default: the held-out modules of Python's "
        "standard library)",
    )
    spans.add_argument("--dataset", metavar="NAME", help="a dataset that `datasets.load_dataset` knows, instead")
    spans.add_argument("--split", metavar="NAME", help="its split (default: test)")
    spans.add_argument("--column", metavar="NAME", default="text", help="its column with the text (default: text)")
    how = command.add_argument_group("how")
    how.add_argument("--batch-size", type=int, default=1, metavar="N", help="prompts answered together (default: 1)")
    how.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: the checkpoint's)")
    how.add_argument("--device", default="auto", help="such as cpu or cuda:0 (default: an accelerator, else the CPU)")
    how.add_argument("--attention", default="auto", metavar="NAME", help="attention implementation of Transformers")
    how.add_argument(
        "--no-references", dest="references", action="store_false", help="without the lines plain and window"
    )
    out = command.add_argument_group("output")
    out.add_argument("--output", default="runs/retrieval", metavar="DIR", help="(default: runs/retrieval)")
    out.add_argument("--json", action="store_true", help="print the rows as JSON instead of the tables")
    command.set_defaults(run=_passkey, interrupted=INTERRUPTED)


def run_retrieval(retrieval: Any) -> Any:
    """Run a `Retrieval`, saying on stderr what it does; the recipe calls this too.

    Returns:
        the `Outcome`.
    """
    from rope_patch.evaluation.loading import quiet_transformers
    from rope_patch.evaluation.retrieval.experiment import run

    with quiet_transformers():
        return run(retrieval, say)


def show_outcome(outcome: Any) -> None:
    """Print the tables and where the files are."""
    from rope_patch.evaluation.retrieval.report import print_tables

    print_tables(outcome.rows)
    print(f"rows     {outcome.results}\npicture  {outcome.picture}")


def _passkey(arguments: argparse.Namespace) -> None:
    from rope_patch.evaluation.retrieval.experiment import Retrieval

    arguments.lengths = whole_numbers("lengths", arguments.lengths, "4096,8192,16384")
    arguments.depths = _depths(arguments.depths)
    names = [field.name for field in dataclasses.fields(Retrieval)]
    outcome = run_retrieval(Retrieval(**{name: getattr(arguments, name) for name in names}))
    if arguments.json:
        print(json.dumps([json.loads(row.to_json()) for row in outcome.rows], indent=2))
    else:
        show_outcome(outcome)


def _depths(words: str) -> int | tuple[float, ...]:
    """How many, or which."""
    try:
        return int(words) if words.isdecimal() else tuple(float(word) for word in words.split(","))
    except ValueError:
        raise EvaluationError(f"depths {words!r}: how many, such as 5, or shares, such as 0,0.5,1") from None
