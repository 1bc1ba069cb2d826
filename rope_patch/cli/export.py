"""`rope-patch export`: a checkpoint folder that others read without this library."""

from __future__ import annotations

import argparse
import json
from textwrap import dedent
from typing import Any

from rope_patch.cli.common import print_json


def add(commands: Any) -> None:
    """Register the command."""
    command = commands.add_parser(
        "export",
        help="a copy of a checkpoint whose config carries a scheme for Transformers, vLLM and llama.cpp",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=dedent("""\
            Write a copy of a checkpoint folder whose config.json says a scheme in the words that others read.

            Schemes of static frequencies can be said (pi, ntk, abf, yarn, ntk_by_parts, llama3, longrope); whatever
            acts inside attention cannot, and is refused with the reason. Weights and tokenizer are not changed.
        """),
        epilog=dedent("""\
            examples:
              rope-patch export DIR --scheme yarn:factor=4
              rope-patch export DIR --scheme yarn:factor=4 --output DIR-yarn4 --link
              rope-patch export DIR-saved-under-a-scheme --output DIR-for-others
        """),
    )
    command.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint folder")
    command.add_argument("--scheme", metavar="SCHEME", help="such as yarn:factor=4 (default: what it was saved under)")
    command.add_argument("--length", type=int, metavar="N", help="context to serve in tokens (default: factor times L)")
    command.add_argument("--output", metavar="DIR", help="the folder to write (default: only say what it would be)")
    command.add_argument("--link", action="store_true", help="hard links instead of copies of weights and tokenizer")
    command.add_argument("--dry-run", action="store_true", help="write nothing, even with --output")
    command.add_argument("--json", action="store_true", help="as JSON")
    command.set_defaults(run=_export, interrupted="interrupted; nothing was written")


def _export(arguments: argparse.Namespace) -> None:
    from rope_patch.evaluation.loading import quiet_transformers
    from rope_patch.serving import describe_serving, export_checkpoint

    checkpoint, scheme, length = arguments.checkpoint, arguments.scheme, arguments.length
    with quiet_transformers():
        if arguments.output is None or arguments.dry_run:
            serving = describe_serving(checkpoint, scheme, length)
        else:
            serving = export_checkpoint(checkpoint, arguments.output, scheme, length=length, link=arguments.link)
    if arguments.json:
        print_json(serving.to_dict())
    else:
        _show(serving)


def _show(serving: Any) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
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
        print(f"folder   {serving.output}")
