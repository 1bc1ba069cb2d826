"""`rope-patch export`: a checkpoint folder that others read without this library."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rope_patch.cli.common import busy
from rope_patch.cli.options import add_json
from rope_patch.cli.parser import add_command
from rope_patch.cli.showing import Output, print_json, print_paths


def add(commands: Any) -> None:
    """Register the command."""
    command = add_command(
        commands,
        "export",
        summary="a copy of a checkpoint whose config carries a scheme for Transformers, vLLM and llama.cpp",
        description="""\
Write a copy of a checkpoint folder whose config.json says a scheme in the words that others read.

Schemes of static frequencies can be said (pi, ntk, abf, yarn, ntk_by_parts, llama3, longrope); whatever acts inside
attention cannot, and is refused with the reason. Weights and tokenizer are not changed. A checkpoint that was saved
under a scheme needs no --scheme.
""",
        examples=(
            "rope-patch recipes copy demo",
            "rope-patch export recipes/assets/tiny-llama --scheme yarn:factor=4",
            "rope-patch export recipes/assets/tiny-llama --scheme yarn:factor=4 --output runs/tiny-llama-yarn4",
        ),
        written="the folder that --output names; nothing without it, or with --dry-run.",
    )
    command.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint folder")
    command.add_argument("--scheme", metavar="SCHEME", help="such as yarn:factor=4 (default: what it was saved under)")
    command.add_argument("--length", type=int, metavar="N", help="context to serve in tokens (default: factor times L)")
    command.add_argument("--output", metavar="DIR", help="the folder to write (default: only say what it would be)")
    command.add_argument("--link", action="store_true", help="hard links instead of copies of weights and tokenizer")
    command.add_argument("--dry-run", action="store_true", help="write nothing, even with --output")
    add_json(command)
    command.set_defaults(run=_export)


def _export(arguments: argparse.Namespace) -> None:
    from rope_patch.evaluation.loading import quiet_transformers
    from rope_patch.saving.export import describe_serving, export_checkpoint

    checkpoint, scheme, length = arguments.checkpoint, arguments.scheme, arguments.length
    with busy(f"exporting {checkpoint}"), quiet_transformers():
        if arguments.output is None or arguments.dry_run:
            serving = describe_serving(checkpoint, scheme, length)
        else:
            serving = export_checkpoint(checkpoint, arguments.output, scheme, length=length, link=arguments.link)
    if arguments.json:
        print_json(serving.to_dict())
    else:
        _show(serving)


def _show(serving: Any) -> None:
    from rich.table import Table
    from rich.text import Text

    console = Output()
    console.print(
        f"{serving.scheme}: L = {serving.training_length}, served up to {serving.length} tokens", highlight=False
    )
    console.print("config.json changes:")
    console.print_json(json.dumps(serving.changed))
    table = Table()
    table.add_column("reader", no_wrap=True)
    table.add_column("reads it", no_wrap=True)
    table.add_column("how, or why not", overflow="fold")
    styles = {"yes": "green", "partly": "yellow", "no": "red"}
    for reader in serving.readers:
        table.add_row(reader.name, Text(reader.reads, style=styles[reader.reads]), Text(reader.words))
    console.print(table)
    if serving.output is None:
        console.print("nothing was written; name a folder with --output")
    else:
        print_paths({"folder": serving.output})
