"""The options of measurements, which several commands share."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, NamedTuple

from rope_patch.errors import EvaluationError

MODEL = "checkpoint folder or hub id (default: the small one that comes with the library)"


class Groups(NamedTuple):
    """Where a command adds the options that it does not share.

    Attributes:
        text: options that say what is read.
        how: options that say how it is measured.
    """

    text: Any
    how: Any


def add_measuring(command: Any, *, text: str, seed: str, output: str) -> Groups:
    """Add the options of every measurement. One that is not given is None, so that the description's default holds.

    Args:
        command: their parser.
        text: what is read where nothing else is said.
        seed: what it is the seed of.
        output: the default folder.
    """
    command.add_argument("--model", metavar="DIR", help=MODEL)
    groups = Groups(command.add_argument_group("text", text), command.add_argument_group("how"))
    groups.text.add_argument("--text", metavar="PATH", help=".txt/.jsonl/.parquet files, a folder, or a pattern")
    groups.text.add_argument("--dataset", metavar="NAME", help="a dataset that `datasets.load_dataset` knows, instead")
    groups.text.add_argument("--split", metavar="NAME", help="its split (default: test)")
    groups.text.add_argument("--column", metavar="NAME", help="the column with the text (default: text)")
    groups.how.add_argument("--seed", type=int, help=f"of {seed} (default: 0)")
    groups.how.add_argument("--dtype", help="auto, float32, bfloat16 or float16 (default: the checkpoint's)")
    groups.how.add_argument("--device", help="such as cpu or cuda:0 (default: an accelerator, else the CPU)")
    groups.how.add_argument("--attention", metavar="NAME", help="attention implementation of Transformers")
    out = command.add_argument_group("output")
    out.add_argument("--output", metavar="DIR", help=f"folder of the results (default: {output})")
    add_json(out)
    return groups


def add_json(options: Any) -> None:
    """Add `--json`."""
    options.add_argument("--json", action="store_true", help="print what was found as one JSON document")


def add_documents(text: Any) -> None:
    """Add the options that say which documents are scored, to the group of the text."""
    text.add_argument("--documents", type=int, metavar="N", help="how many documents (default: all)")
    text.add_argument(
        "--windows-per-document", type=int, metavar="N", help="places scored in each (default: 1, the end)"
    )


def add_schemes_at_lengths(command: Any, what: str) -> None:
    """Add the options that say which schemes are measured at which lengths.

    Args:
        command: their parser.
        what: a scheme is in what is printed.
    """
    command.add_argument(
        "--scheme",
        dest="schemes",
        metavar="SCHEME",
        action="append",
        help=f"{what}, may be repeated; factor=auto and group_size=auto follow each length",
    )
    command.add_argument("--lengths", required=True, metavar="N,N,...", help="context lengths in tokens, ascending")
    command.add_argument(
        "--no-references",
        dest="references",
        action="store_const",
        const=False,
        help="without the lines plain and window",
    )


def given(arguments: argparse.Namespace, description: type[Any]) -> dict[str, Any]:
    """The fields of a description that the command line says."""
    names = [field.name for field in dataclasses.fields(description)]
    return {name: value for name in names if (value := getattr(arguments, name, None)) is not None}


def whole_numbers(name: str, words: str, example: str) -> tuple[int, ...]:
    """Numbers with commas between them.

    Args:
        name: of the option, for the message.
        words: as they were typed.
        example: of what is allowed, for the message.

    Raises:
        EvaluationError: they are something else.
    """
    try:
        return tuple(int(word) for word in words.split(","))
    except ValueError:
        raise EvaluationError(f"{name} {words!r}: whole numbers with commas between them, such as {example}") from None
