"""The command line: `rope-patch COMMAND` runs a recipe or a tool, or inspects a checkpoint.

A command is a module with `Options`, a dataclass, and `main(options)`; its docstring is the help. `doctor` parses its
own arguments, because it runs without the packages that `rope_patch` requires.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

from rope_patch.cli.refusals import no_command
from rope_patch.errors import MissingPackage
from rope_patch.shipped import recipes_folder
from rope_patch.version import __version__

_OWN, _ROOT = Path(__file__).parent, recipes_folder().parent

COMMANDS = {
    "list": _OWN / "listing.py",
    "describe": _OWN / "describe.py",
    "plot": _ROOT / "tools" / "pictures.py",
    "perplexity": _ROOT / "recipes" / "perplexity.py",
    "measure": _ROOT / "recipes" / "measure.py",
    "passkey": _ROOT / "recipes" / "passkey.py",
    "sweep": _ROOT / "recipes" / "sweep.py",
    "search": _ROOT / "recipes" / "search.py",
    "finetune": _ROOT / "recipes" / "finetune.py",
    "compare": _ROOT / "recipes" / "compare_encodings.py",
    "export": _OWN / "export.py",
    "doctor": _OWN.parent / "doctor" / "command.py",
    "serve": _ROOT / "recipes" / "serve.py",
    "demo-chat": _OWN / "demo_chat.py",
    "checkpoint": _ROOT / "tools" / "fetch_checkpoint.py",
    "completion": _OWN / "completion.py",
}
"""The commands, each with its module: in the package, a recipe to copy and change, or a tool, which only a checkout
has.
"""

HELP = """\
usage: rope-patch COMMAND [CONFIG.yaml] [OPTIONS]

Patch checkpoints of Transformers with other position schemes, and measure how much each helps. Start with the small
checkpoint that comes with the recipes; then pass your own: --model DIR --text FILE.

{commands}

examples:
  rope-patch sweep --target 4x --documents 4
  rope-patch perplexity --scheme yarn:target=auto --lengths 256,1024 --documents 4
  rope-patch COMMAND --help

Results go to stdout; messages, progress and errors go to stderr. Exit status: 0 done; 2 wrong input, in one line;
130 interrupted by Ctrl-C; 141 stdout was closed."""


def main(words: Sequence[str] | None = None) -> int:
    """Run one command, by default the command line of this process, and return the exit status, see `HELP`."""
    command, *rest = (sys.argv[1:] if words is None else list(words)) or ["--help"]
    if command == "help" and rest:
        command, rest = rest[0], ["--help"]
    try:
        if command in ("--help", "-h", "help"):  # docstrings are read without tyro
            docs = {name: ast.get_docstring(ast.parse(COMMANDS[name].read_text())) or "" for name in available()}
            shown = (f"  {name:<12}{doc.partition(chr(10))[0].rstrip('.')}" for name, doc in docs.items())
            print(HELP.format(commands="\n".join(shown)))
            return 0
        if command in ("--version", "-V", "-v", "version"):
            print(f"rope-patch {__version__}")
            return 0
        if command == "doctor":
            from rope_patch.doctor.command import main as doctor

            return doctor(rest, "rope-patch doctor")
        if command in available():
            from rope_patch.cli.options import run

            module = load(command)
            return run(module.Options, module.main, rest, f"rope-patch {command}")
        refusal = no_command(command, available())
        if command in COMMANDS:
            refusal = f"{command} comes with the repository; there, run `pip install -e .`"
    except MissingPackage as error:
        refusal = str(error)
    print(f"rope-patch: {refusal}", file=sys.stderr)
    return 2


def available() -> list[str]:
    """The commands whose file is installed: a wheel has no tools."""
    return [command for command, file in COMMANDS.items() if file.is_file()]


def load(command: str) -> ModuleType:
    """Load the module of a command from its file: a wheel and a checkout have the recipes in different places."""
    file = COMMANDS[command]
    name = f"{__name__ if file.parent == _OWN else file.parent.name}.{file.stem}"
    if name not in sys.modules:
        if file.parent.name == "tools":
            sys.path.insert(0, str(_ROOT))  # tools import one another
        spec: Any = util.spec_from_file_location(name, file)
        sys.modules[name] = util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
