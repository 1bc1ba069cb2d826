"""What the commands share: errors in one line, sentences on stderr, the options of measurements and their results."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rope_patch.errors import EvaluationError, RopePatchError

INTERRUPTED = "interrupted; finished rows are kept, and the same command goes on from there"
"""What a command says on Ctrl-C whose rows are kept."""


class Groups(NamedTuple):
    """Where a command adds the options that it does not share."""

    text: Any
    how: Any


def run_politely(action: Callable[[], object], interrupted: str = "interrupted") -> int:
    """Run `action()` with errors in one line instead of a traceback; of several processes the first says it.

    Args:
        action: called without arguments.
        interrupted: what to say on Ctrl-C.

    Returns:
        exit status: 0, 2 for wrong input, 130 when interrupted.
    """
    try:
        action()
    except (RopePatchError, OSError) as error:
        if is_first():
            say(_one_line(error))
        return 2
    except KeyboardInterrupt:
        if is_first():
            print(f"\nrope-patch: {interrupted}", file=sys.stderr)
        return 130
    return 0


def run_recipe(words: str, action: Callable[[str], object]) -> int:
    """The command line of a recipe: `python recipes/NAME.py CONFIG`.

    Args:
        words: what `--help` says.
        action: called with the path of a description in YAML.

    Returns:
        exit status, see `run_politely`.
    """
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", metavar="CONFIG")
    config = parser.parse_args().config
    return run_politely(lambda: action(config), interrupted=INTERRUPTED)


def is_first() -> bool:
    """Whether this process is the one that prints, also where the others have not been joined yet."""
    return int(os.environ.get("WORLD_SIZE", "1")) == 1 or int(os.environ.get("RANK", "0")) == 0


def add_measuring(command: Any, *, text: str, seed: str, output: str, shown: str = "table") -> Groups:
    """Add the options of every measurement. One that is not given is None, so that the description's default holds.

    Args:
        command: their parser.
        text: title of the group of options that say what is read.
        seed: what it is the seed of.
        output: the default folder.
        shown: what `--json` prints the results instead of.
    """
    command.add_argument("--model", metavar="DIR", help="checkpoint folder (default: the one in the repository)")
    groups = Groups(command.add_argument_group(text), command.add_argument_group("how"))
    groups.text.add_argument("--text", metavar="PATH", help=".txt/.jsonl/.parquet files, a folder, or a pattern")
    groups.text.add_argument("--dataset", metavar="NAME", help="a dataset that `datasets.load_dataset` knows, instead")
    groups.text.add_argument("--split", metavar="NAME", help="its split (default: test)")
    groups.text.add_argument("--column", metavar="NAME", help="the column with the text (default: text)")
    groups.how.add_argument("--seed", type=int, help=f"of {seed} (default: 0)")
    groups.how.add_argument("--dtype", help="auto, float32, bfloat16 or float16 (default: the checkpoint's)")
    groups.how.add_argument("--device", help="such as cpu or cuda:0 (default: an accelerator, else the CPU)")
    groups.how.add_argument("--attention", metavar="NAME", help="attention implementation of Transformers")
    out = command.add_argument_group("output")
    out.add_argument("--output", metavar="DIR", help=f"(default: {output})")
    out.add_argument("--json", action="store_true", help=f"print JSON instead of the {shown}")
    return groups


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


def run_quietly(run: Callable[[Any, Callable[[str], None]], Any], description: Any) -> Any:
    """`run(description, say)`, without what Transformers would say meanwhile."""
    from rope_patch.evaluation.loading import quiet_transformers

    with quiet_transformers():
        return run(description, say)


def show_outcome(outcome: Any, show: Callable[[], object]) -> None:
    """Print what was found and where the files are, once, however many processes measured.

    Args:
        outcome: with the paths of `results` and `picture`.
        show: prints what was found.
    """
    if is_first():
        show()
        print(f"rows     {outcome.results}\npicture  {outcome.picture}")


def print_json(found: Any) -> None:
    """Print what was found as JSON, once, however many processes measured."""
    if is_first():
        print(json.dumps(found, indent=2))


def print_rows(rows: Sequence[Any]) -> None:
    """Print rows as a list in JSON."""
    print_json([json.loads(row.to_json()) for row in rows])


def whole_numbers(name: str, words: str, example: str) -> tuple[int, ...]:
    """Numbers with commas between them.

    Raises:
        EvaluationError: they are something else.
    """
    try:
        return tuple(int(word) for word in words.split(","))
    except ValueError:
        raise EvaluationError(f"{name} {words!r}: whole numbers with commas between them, such as {example}") from None


def say(sentence: str) -> None:
    """A sentence for the reader, on stderr, so that stdout holds the results alone."""
    print(f"rope-patch: {sentence}", file=sys.stderr)


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())
