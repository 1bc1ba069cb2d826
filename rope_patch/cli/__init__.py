"""The command line: `rope-patch COMMAND`, one module for each command.

Errors that a user can mend are one line on stderr and exit status 2.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from rope_patch.cli import compare, describe, export, finetune, listing, passkey, perplexity, plot, sweep
from rope_patch.cli.common import run_politely
from rope_patch.version import __version__

COMMANDS = (listing, describe, perplexity, passkey, sweep, finetune, compare, export, plot)
"""In the order in which `--help` names them; each adds its own parser."""


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rope-patch",
        description="Other position schemes for checkpoints of Transformers, and what they are worth.",
    )
    parser.add_argument("--version", action="version", version=f"rope-patch {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser
