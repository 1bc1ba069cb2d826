"""The command line: `rope-patch list | describe | perplexity`.

Errors that a user can mend are one line on stderr and exit status 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from rope_patch.errors import EvaluationError, RopePatchError
from rope_patch.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: its words; default `sys.argv[1:]`.

    Returns:
        exit status: 0, 2 for wrong input, 130 when interrupted.
    """
    arguments = _parser().parse_args(argv)
    return run_politely(lambda: arguments.run(arguments), interrupted=arguments.interrupted)


def run_politely(action: Any, interrupted: str = "interrupted") -> int:
    """Run `action()` with errors in one line instead of a traceback.

    Args:
        action: called without arguments.
        interrupted: what to say on Ctrl-C.

    Returns:
        exit status: 0, 2 for wrong input, 130 when interrupted.
    """
    try:
        action()
    except (RopePatchError, OSError) as error:
        _say(_one_line(error))
        return 2
    except KeyboardInterrupt:
        print(f"\nrope-patch: {interrupted}", file=sys.stderr)
        return 130
    return 0


def run_perplexity(experiment: Any) -> Any:
    """Run an `Experiment`, saying on stderr what it does; the recipe calls this too.

    Returns:
        the `Outcome`.
    """
    from rope_patch.evaluation.experiment import run
    from rope_patch.evaluation.loading import quiet_transformers

    with quiet_transformers():
        return run(experiment, _say)


def show_outcome(outcome: Any) -> None:
    """Print the table and where the files are."""
    from rope_patch.evaluation.report import print_table

    print_table(outcome.rows)
    print(f"rows     {outcome.results}\npicture  {outcome.picture}")


def _perplexity(arguments: argparse.Namespace) -> None:
    from rope_patch.evaluation.experiment import Experiment

    arguments.lengths = _lengths(arguments.lengths)
    names = [field.name for field in dataclasses.fields(Experiment)]
    experiment = Experiment(**{name: getattr(arguments, name) for name in names})
    outcome = run_perplexity(experiment)
    if arguments.json:
        print(json.dumps([json.loads(row.to_json()) for row in outcome.rows], indent=2))
    else:
        show_outcome(outcome)


def _list(arguments: argparse.Namespace) -> None:
    from rope_patch.schemes import list_schemes
    from rope_patch.schemes.registry import scheme_class

    schemes = [_entry(scheme_class(name)) for name in list_schemes()]
    if arguments.json:
        print(json.dumps(schemes, indent=2, ensure_ascii=False))
        return
    if arguments.markdown:
        print(_markdown(schemes))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=True)  # two facts to a cell, so that it fits 80 columns
    for column in ("name, class", "slot, needs", "year"):
        table.add_column(column, no_wrap=True)
    table.add_column("equation, source", overflow="fold")
    for entry in schemes:
        table.add_row(
            f"[bold]{entry['name']}[/bold]\n{entry['class']}",
            f"{', '.join(entry['slots'])}\n{entry['needs']}",
            str(entry["year"]),
            Text(f"{entry['equation']}\n{entry['link'] or entry['source']}"),
        )
    Console().print(table)


def _markdown(schemes: list[dict[str, Any]]) -> str:
    """The table of the README."""
    lines = ["| scheme | class | year | slot | needs | equation |", "|---|---|---|---|---|---|"]
    for entry in schemes:
        year = f"[{entry['year']}]({entry['link']})" if entry["link"] else entry["year"]
        equation = entry["equation"].replace("|", "\\|")
        lines.append(
            f"| `{entry['name']}` | {entry['class']} | {year} | {', '.join(entry['slots'])} | {entry['needs']} "
            f"| {equation} |"
        )
    return "\n".join(lines)


def _entry(cls: Any) -> dict[str, Any]:
    from rope_patch.schemes.base import SLOTS, Scheme

    fields = {
        field.name: "required" if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(cls)
    }
    return {
        "name": cls.name,
        "class": cls.__name__,
        "slots": list(
            dict.fromkeys(slot for name, slot in SLOTS.items() if getattr(cls, name) is not getattr(Scheme, name))
        ),
        "needs": cls.regime,
        "fields": fields,
        "equation": cls.equation,
        "year": cls.source.year,
        "source": cls.source.title,
        "link": cls.source.link,
        "code": cls.source.code,
    }


def _describe(arguments: argparse.Namespace) -> None:
    from rope_patch.describe import describe
    from rope_patch.evaluation.loading import default_checkpoint, load_model, quiet_transformers
    from rope_patch.export import native_scheme
    from rope_patch.patch import find_handle, patch

    with quiet_transformers():
        model = load_model(arguments.model or default_checkpoint(), device="cpu")
    if arguments.scheme:
        patch(model, arguments.scheme)
    if not arguments.json:
        print(describe(model))
        return
    handle = find_handle(model)
    scheme = handle.scheme if handle else native_scheme(model)
    description = {
        "model": type(model).__name__,
        "patched": handle is not None,
        "scheme": scheme.to_dict(),
        "mount": handle.plan.mounts() if handle else "none",
        "left_alone": handle.plan.left_alone if handle else {},
    }
    print(json.dumps(description, indent=2))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rope-patch",
        description="Other position schemes for checkpoints of Transformers, and what they are worth.",
    )
    parser.add_argument("--version", action="version", version=f"rope-patch {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_list(commands)
    _add_describe(commands)
    _add_perplexity(commands)
    return parser


def _add_list(commands: Any) -> None:
    command = commands.add_parser("list", help="the schemes, with equation and source")
    form = command.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON, with the fields and their defaults")
    form.add_argument("--markdown", action="store_true", help="as the table of the README")
    command.set_defaults(run=_list, interrupted="interrupted")


def _add_describe(commands: Any) -> None:
    command = commands.add_parser("describe", help="what a checkpoint does about positions, or would under a scheme")
    command.add_argument("--model", metavar="DIR", help="checkpoint folder (default: the one in the repository)")
    command.add_argument("--scheme", metavar="SCHEME", help="such as yarn:factor=8 or rerope:window=128+logn")
    command.add_argument("--json", action="store_true", help="as JSON")
    command.set_defaults(run=_describe, interrupted="interrupted")


def _add_perplexity(commands: Any) -> None:
    from textwrap import dedent

    command = commands.add_parser(
        "perplexity",
        help="perplexity against context length, as a table, JSON lines and a chart",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=dedent("""\
            Score the same tokens from contexts of several lengths, under several schemes.

            The plain checkpoint (plain) and attention cut at the training length (window) are always among the lines.
            Every row is written as soon as it is measured: the same command goes on where an interrupted one stopped.
        """),
        epilog=dedent("""\
            examples:
              rope-patch perplexity --scheme yarn:factor=8 --scheme rerope:window=128+logn --lengths 256,512,1024,2048
              rope-patch perplexity --model DIR --text book.txt --scheme yarn:factor=auto --lengths 4096,8192,16384
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
    text.add_argument("--seed", type=int, default=0, help="of the draw of documents (default: 0)")
    how = command.add_argument_group("how")
    how.add_argument(
        "--protocol",
        default="auto",
        metavar="NAME",
        help="last: the same targets at every length; by_position: one pass at the longest length; span_corruption: "
        "the same hidden spans at every length, for models of T5's style (default: by the model)",
    )
    how.add_argument("--targets", type=int, metavar="T", help="scored tokens per window (default: min(L, 4096))")
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


INTERRUPTED = "interrupted; finished rows are kept, and the same command goes on from there"


def _lengths(words: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in words.split(","))
    except ValueError:
        raise EvaluationError(
            f"lengths {words!r}: whole numbers with commas between them, such as 256,512,1024"
        ) from None


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


def _say(sentence: str) -> None:
    print(f"rope-patch: {sentence}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
