"""`rope-patch finetune`: train a checkpoint at a longer context, with the evidence before and after."""

from __future__ import annotations

import argparse
from typing import Any

from rope_patch.cli.common import quietly
from rope_patch.cli.options import MODEL, add_json, given, whole_numbers
from rope_patch.cli.parser import add_command
from rope_patch.cli.showing import print_paths, show_outcome
from rope_patch.errors import EvaluationError


def add(commands: Any) -> None:
    """Register the command."""
    command = add_command(
        commands,
        "finetune",
        summary="train a checkpoint at a longer context, and measure perplexity before, during and after",
        description="""\
Train a causal checkpoint under one scheme or several, each from the same start, on text of your own.

The state is saved every few minutes: the same command goes on where an interrupted one stopped, with the same result.
Under `accelerate launch` or `torchrun` several processes train together.

The examples train the small checkpoint that comes with the library on Python's standard library; add --model DIR
--text FILE for your own. Every key of the YAML can be given with --set; they are the fields of
rope_patch.finetuning.description.FineTuning.
""",
        examples=(
            "rope-patch finetune --scheme yarn:factor=auto --length 512 --steps 10 --batch-size 4 --output runs/first",
            "rope-patch recipes copy finetune_tiny",
            "rope-patch finetune recipes/configs/finetune_tiny.yaml",
            "rope-patch finetune recipes/configs/finetune_tiny.yaml --set method=lora merge=true --output runs/lora",
        ),
        written="in the folder that --output names: for each scheme a folder with its state, its log and its "
        "checkpoint; points.jsonl and perplexity.jsonl, what was measured; finetune.png and loss.png.",
    )
    command.add_argument(
        "description", nargs="?", metavar="CONFIG", help="a description in YAML; the options overrule it"
    )
    command.add_argument("--model", metavar="DIR", help=MODEL)
    command.add_argument(
        "--scheme", dest="schemes", metavar="SCHEME", action="append", help="such as yarn:factor=auto, may be repeated"
    )
    command.add_argument("--length", type=int, metavar="N", help="tokens of a training row")
    command.add_argument("--device", metavar="NAME", help="such as cpu or cuda (default: an accelerator, else the CPU)")
    text = command.add_argument_group("text", "default: Python's standard library")
    text.add_argument("--text", metavar="PATH", help=".txt/.jsonl/.parquet files, a folder, or a pattern")
    text.add_argument("--dataset", metavar="NAME", help="a dataset that `datasets.load_dataset` knows, instead")
    text.add_argument("--split", metavar="NAME", help="its split (default: train)")
    text.add_argument("--column", metavar="NAME", help="the column with the text (default: text)")
    text.add_argument("--layout", metavar="NAME", help="packed, padded, or pose for positions that skip")
    text.add_argument("--eval-text", metavar="PATH", help="what is measured (default: held-out modules of the library)")
    text.add_argument("--lengths", metavar="N,N,...", help="context lengths that are measured (default: L to N)")
    how = command.add_argument_group("training")
    how.add_argument("--method", metavar="NAME", help="full (default), lora or lora_norms_embeddings")
    how.add_argument("--merge", action="store_const", const=True, help="save adapters merged into the weights")
    how.add_argument("--steps", type=int, metavar="N", help="(default: 400)")
    how.add_argument("--batch-size", type=int, metavar="N", help="rows per step, over all processes (default: 64)")
    how.add_argument("--micro-batch-size", type=int, metavar="N", help="rows that pass through the model at once")
    how.add_argument("--learning-rate", type=float, metavar="X", help="(default: 2e-5)")
    how.add_argument("--precision", metavar="NAME", help="float32 (default) or bfloat16")
    how.add_argument("--gradient-checkpointing", action="store_const", const=True, help="less memory, more time")
    how.add_argument("--seed", type=int, metavar="N", help="of texts, new parameters and dropout (default: 0)")
    out = command.add_argument_group("output")
    out.add_argument("--output", metavar="DIR", help="folder of the results (default: runs/finetune)")
    out.add_argument("--report-to", action="append", metavar="NAME", help="a tracker, such as tensorboard or wandb")
    command.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="any other key of the YAML")
    add_json(out)
    command.set_defaults(run=_finetune, kept="the last state that was saved is kept")


def _finetune(arguments: argparse.Namespace) -> None:
    from rope_patch.evaluation.description import describe
    from rope_patch.finetuning.description import FineTuning
    from rope_patch.finetuning.experiment import run
    from rope_patch.finetuning.report import as_json, print_table

    if arguments.lengths is not None:
        arguments.lengths = whole_numbers("lengths", arguments.lengths, "256,512,1024")
    changed = given(arguments, FineTuning)
    changed |= dict(_setting(word) for word in arguments.set)
    if arguments.description is not None:
        description = FineTuning.from_yaml(arguments.description, changed)
    else:
        description = describe(FineTuning, changed, "the command line")
    outcome = quietly(run, description)
    if outcome is None:
        return
    if arguments.json:
        print(as_json(outcome.points))
        return
    show_outcome(outcome, lambda console: print_table(outcome.points, console), ("picture", "curves"))
    print_paths({f"checkpoint under {spec}": folder for spec, folder in outcome.checkpoints.items()})


def _setting(word: str) -> tuple[str, Any]:
    from rope_patch.evaluation.description import parse_yaml

    key, equals, value = word.partition("=")
    if not equals:
        raise EvaluationError(f"--set {word!r}: KEY=VALUE is needed, such as batch_size=8")
    return key, parse_yaml(value, f"--set {word!r}")
