"""The command line: `rope-patch COMMAND` runs a recipe or a tool, or looks at a checkpoint.

A command is a module with `Options`, a dataclass, and `main(options)`; its docstring is the help.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from importlib import import_module, util
from pathlib import Path
from types import ModuleType

from rope_patch.errors import MissingPackage, did_you_mean
from rope_patch.shipped import recipes_folder
from rope_patch.version import __version__

COMMANDS = {
    "list": "rope_patch.cli.listing",
    "describe": "rope_patch.cli.describe",
    "plot": "tools/pictures.py",
    "perplexity": "recipes/perplexity.py",
    "passkey": "recipes/passkey.py",
    "ruler": "recipes/ruler.py",
    "sweep": "recipes/sweep.py",
    "finetune": "recipes/finetune.py",
    "compare": "recipes/compare_encodings.py",
    "export": "rope_patch.cli.export",
    "doctor": "rope_patch.cli.doctor",
    "serve": "recipes/serve.py",
    "checkpoint": "tools/fetch_checkpoint.py",
    "completion": "rope_patch.cli.completion",
}
"""What each runs: a module of the package, a recipe to copy and change, or a tool, which only a checkout has."""

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
            print(HELP.format(commands="\n".join(f"  {name:<12}{_summary(name)}" for name in available())))
        elif first == "--version":
            print(f"rope-patch {__version__}")
        elif first in available():
            from rope_patch.cli.options import run

            command = load(first)
            return run(command.Options, command.main, rest, f"rope-patch {first}")
        elif first in COMMANDS:
            print(f"rope-patch: {first} comes with the repository; run it in a checkout of rope_patch", file=sys.stderr)
            return 2
        else:
            print(f"rope-patch: there is no command {first!r}; {did_you_mean(first, available())}", file=sys.stderr)
            return 2
    except MissingPackage as error:
        print(f"rope-patch: {error}", file=sys.stderr)
        return 2
    return 0


def available() -> list[str]:
    """The commands whose file is here: an installed wheel has no tools."""
    return [command for command in COMMANDS if _file(command).is_file()]


def load(command: str) -> ModuleType:
    """The module of a command. A script is loaded from its file, because a wheel has the recipes elsewhere."""
    if not COMMANDS[command].endswith(".py"):
        return import_module(COMMANDS[command])
    name = COMMANDS[command].removesuffix(".py").replace("/", ".")
    if name not in sys.modules:
        if name.startswith("tools."):
            sys.path.insert(0, str(_file(command).parents[1]))  # tools import one another
        spec = util.spec_from_file_location(name, _file(command))
        sys.modules[name] = util.module_from_spec(spec)  # type: ignore[arg-type]
        spec.loader.exec_module(sys.modules[name])  # type: ignore[union-attr]
    return sys.modules[name]


def _file(command: str) -> Path:
    place = COMMANDS[command]
    if place.endswith(".py"):
        return recipes_folder().parent / place
    return Path(__file__).with_name(f"{place.rpartition('.')[2]}.py")


def _summary(command: str) -> str:
    """The first line of the docstring, which is read without tyro."""
    return (ast.get_docstring(ast.parse(_file(command).read_text())) or "").partition("\n")[0].rstrip(".")
