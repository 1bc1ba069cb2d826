"""The command line: `rope-patch COMMAND`, one module for each command.

Errors that a user can mend are one line on stderr and exit status 2.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from rope_patch.cli import (
    compare,
    completion,
    describe,
    export,
    finetune,
    listing,
    passkey,
    perplexity,
    plot,
    recipes,
    sweep,
)
from rope_patch.cli.common import as_typed, busy, in_own_process, run_politely
from rope_patch.cli.parser import STATUSES, Purposes
from rope_patch.version import __version__

COMMANDS = {
    "look": (listing, describe, plot),
    "measure": (perplexity, passkey, sweep),
    "train": (finetune, compare),
    "hand on": (export, recipes, completion),
}
"""By purpose, in the order in which `--help` names them; each adds its own parser."""

FIRST_STEPS = """\
Other position schemes for checkpoints of Transformers, and what they are worth.

Begin with the small checkpoint that comes with the library, trained at 256 tokens: the first command below says which
scheme suits it best at four times that length. Then give the same command your own checkpoint and text, with --model
DIR --text FILE.
"""

EXAMPLES = """\
examples:
  rope-patch sweep --target 4x --documents 4
  rope-patch perplexity --scheme yarn:factor=auto --lengths 256,1024 --documents 4
  rope-patch COMMAND --help

Every command but completion takes --json, which prints one JSON document on stdout; sentences, progress and errors go
to stderr.

"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: its words; default those of this process, which then ends with the command.

    Returns:
        exit status: 0, 2 for wrong input, 130 when interrupted; as a process also 143 and 141, see `in_own_process`.

    Raises:
        SystemExit: after `--help` and `--version`, and with status 2 where the words are no command.
    """
    if argv is None:
        return in_own_process(lambda: _run(sys.argv[1:], as_typed()))
    return _run(argv, shlex.join(["rope-patch", *argv]))


def main_of_recipe(command: str) -> int:
    """`python recipes/NAME.py ...` as `rope-patch COMMAND ...`.

    Args:
        command: of this name.
    """
    return in_own_process(lambda: _run([command, *sys.argv[1:]], as_typed()))


def make_parser() -> Purposes:
    """The parser of all commands."""
    parser = Purposes(prog="rope-patch", description=FIRST_STEPS, epilog=EXAMPLES + STATUSES)
    parser.add_argument("--version", action="version", version=f"rope-patch {__version__}")
    for purpose, modules in COMMANDS.items():
        parser.add_purpose(purpose, modules)
    return parser


def _run(words: Sequence[str], again: str) -> int:
    arguments = make_parser().parse_args(words)

    def run() -> None:
        if arguments.heavy:
            with busy("importing torch and Transformers"):
                import transformers  # noqa: F401  takes seconds, once
        arguments.run(arguments)

    return run_politely(run, arguments.kept, again)
