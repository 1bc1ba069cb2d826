"""The command line: `rope-patch COMMAND` runs a recipe, or looks at a checkpoint.

A command is a module with `Options`, a dataclass, and `main(options)`; its docstring is the help.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from rope_patch.errors import MissingPackage, did_you_mean
from rope_patch.shipped import recipes_folder
from rope_patch.version import __version__

COMMANDS = {
    "list": "rope_patch.cli.listing",
    "describe": "rope_patch.cli.describe",
    "plot": "recipes/pictures.py",
    "perplexity": "recipes/perplexity.py",
    "passkey": "recipes/passkey.py",
    "ruler": "recipes/ruler.py",
    "sweep": "recipes/sweep.py",
    "finetune": "recipes/finetune.py",
    "compare": "recipes/compare_encodings.py",
    "export": "rope_patch.cli.export",
    "doctor": "rope_patch.cli.doctor",
    "serve": "recipes/serve.py",
    "checkpoint": "recipes/checkpoint.py",
    "completion": "rope_patch.cli.completion",
}
"""What each runs; a recipe is a script that you can also copy, change and start by itself."""

HELP = """\
usage: rope-patch COMMAND [CONFIG.yaml] [OPTIONS]

Other position schemes for checkpoints of Transformers, and what they are worth. Begin with the small checkpoint that
comes with the recipes; then give the same command your own, with --model DIR --text FILE.

{commands}

examples:
  rope-patch sweep --target 4x --documents 4
  rope-patch perplexity --scheme yarn:target=auto --lengths 256,1024 --documents 4
  rope-patch COMMAND --help

Results go to stdout, sentences, progress and errors to stderr. exit status: 0 done; 2 wrong input, in one line;
130 interrupted by Ctrl-C; 141 where whoever read the output went away."""


def main(words: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        words: of the command line; default those of this process.

    Returns:
        exit status, see `HELP`.
    """
    first, *rest = (sys.argv[1:] if words is None else list(words)) or ["--help"]
    try:
        if first in ("--help", "-h"):
            print(HELP.format(commands="\n".join(f"  {name:<12}{_summary(name)}" for name in COMMANDS)))
        elif first == "--version":
            print(f"rope-patch {__version__}")
        elif first in COMMANDS:
            from rope_patch.cli.options import run

            command = load(first)
            return run(command.Options, command.main, rest, f"rope-patch {first}")
        else:
            print(f"rope-patch: there is no command {first!r}; {did_you_mean(first, COMMANDS)}", file=sys.stderr)
            return 2
    except MissingPackage as error:
        print(f"rope-patch: {error}", file=sys.stderr)
        return 2
    return 0


def load(command: str) -> ModuleType:
    """The module of a command."""
    from rope_patch.cli.options import load_recipe

    place = COMMANDS[command]
    return load_recipe(place[8:-3]) if place.startswith("recipes/") else import_module(place)


def _summary(command: str) -> str:
    """The first line of the docstring, which is read without tyro."""
    place = COMMANDS[command]
    of_package = Path(__file__).with_name(f"{place.rpartition('.')[2]}.py")
    file = recipes_folder() / place[8:] if place.startswith("recipes/") else of_package
    return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0].rstrip(".")
