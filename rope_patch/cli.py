"""The command line: `rope-patch list | describe | perplexity | compare | plot`.

Errors that a user can mend are one line on stderr and exit status 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
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
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = _parser().parse_args(words)
    interrupted = arguments.interrupted.format(command=shlex.join(["rope-patch", *words]))
    return run_politely(lambda: arguments.run(arguments), interrupted=interrupted)


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

    arguments.lengths = _whole_numbers("lengths", arguments.lengths, "256,512,1024")
    names = [field.name for field in dataclasses.fields(Experiment)]
    experiment = Experiment(**{name: getattr(arguments, name) for name in names})
    outcome = run_perplexity(experiment)
    if arguments.json:
        print(json.dumps([json.loads(row.to_json()) for row in outcome.rows], indent=2))
    else:
        show_outcome(outcome)


def _compare(arguments: argparse.Namespace) -> None:
    from rope_patch.evaluation.loading import quiet_transformers
    from rope_patch.training.comparison import Comparison
    from rope_patch.training.experiment import run
    from rope_patch.training.report import print_table

    given = {
        "encodings": tuple(arguments.schemes) if arguments.schemes is not None else None,
        "seeds": _whole_numbers("seeds", arguments.seeds, "0,1,2") if arguments.seeds is not None else None,
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
        outcome = run(comparison, _say, only=arguments.only, costs=arguments.costs, retry=arguments.retry)
    if outcome is None:
        return
    print_table(outcome.summary)
    for name in ("results", "table", "numbers", "picture"):
        print(f"{name:<8} {getattr(outcome, name)}")


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


def _plot(arguments: argparse.Namespace) -> None:
    from rope_patch.plots.command import draw
    from rope_patch.plots.style import save

    ours = ("picture", "output", "run", "interrupted")
    options = {name: value for name, value in vars(arguments).items() if name not in ours and value is not None}
    print(save(draw(arguments.picture, options), arguments.output or f"{arguments.picture}.png"))


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
    _add_compare(commands)
    _add_plot(commands)
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


def _add_compare(commands: Any) -> None:
    from textwrap import dedent

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


def _add_plot(commands: Any) -> None:
    command = commands.add_parser("plot", help="the pictures by which one understands position encodings")
    command.add_argument(
        "picture",
        metavar="NAME",
        help="sinusoidal, inner_product, wavelengths, decay_bound, scores_by_distance, biases or position_maps",
    )
    command.add_argument("--output", metavar="FILE", help="a PNG (default: NAME.png)")
    options = command.add_argument_group("options; a picture says which of them it takes")
    options.add_argument("--scheme", action="append", metavar="SCHEME", help="such as yarn:factor=8, may be repeated")
    options.add_argument("--base", action="append", type=float, metavar="B", help="of the frequencies, may be repeated")
    options.add_argument("--dim", action="append", type=int, metavar="D", help="dimensions, may be repeated")
    options.add_argument("--length", type=int, metavar="N", help="of the text, or the longest distance, in tokens")
    options.add_argument("--training-length", type=int, metavar="L", help="in tokens")
    options.add_argument("--heads", type=int, metavar="N", help="number of heads")
    options.add_argument("--model", metavar="DIR", help="checkpoint folder (default: the one in the repository)")
    options.add_argument("--layer", type=int, metavar="N", help="of the checkpoint, from 0")
    options.add_argument("--text", metavar="PATH", help="a text file or a folder (default: Python's own source)")
    options.add_argument("--documents", type=int, metavar="N", help="how many texts at most")
    command.set_defaults(run=_plot, interrupted="interrupted")


INTERRUPTED = "interrupted; finished rows are kept, and the same command goes on from there"


def _whole_numbers(name: str, words: str, example: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in words.split(","))
    except ValueError:
        raise EvaluationError(f"{name} {words!r}: whole numbers with commas between them, such as {example}") from None


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


def _say(sentence: str) -> None:
    print(f"rope-patch: {sentence}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
