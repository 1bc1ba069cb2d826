"""Print the script that lets bash or zsh complete commands and options.

    rope-patch completion bash > ~/.local/share/bash-completion/completions/rope-patch
    rope-patch completion zsh > _rope-patch    # in a folder of $fpath, before compinit

Then open a new shell.
"""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass
from typing import Annotated, Any, Literal, Union

import tyro

from rope_patch.cli.options import Positional


@dataclass(kw_only=True)
class Options:
    shell: Positional[Literal["bash", "zsh"]]  # your shell


def main(options: Options) -> None:
    """Print the script that tyro writes for all commands together."""
    from rope_patch.cli import available, load

    def options_of(name: str) -> type:
        return _of_doctor() if name == "doctor" else load(name).Options

    commands: Any = Union[  # noqa: UP007  the members are computed
        tuple(Annotated[options_of(name), tyro.conf.subcommand(name=name)] for name in available())
    ]
    try:
        tyro.cli(commands, prog="rope-patch", args=["--tyro-print-completion", options.shell])
    except SystemExit as end:
        if end.code:
            raise


def _of_doctor() -> type:
    """The options of `doctor`, which argparse parses, as a dataclass that tyro can complete."""
    from rope_patch.doctor.command import OPTIONS

    fields: list[Any] = [("checkpoints", Positional[tuple[str, ...]], ())]
    for index, (word, settings) in enumerate(OPTIONS.items()):
        if word.startswith("--"):
            flag = settings["action"] == "store_true"
            named = tyro.conf.arg(name=word.removeprefix("--"), help=settings["help"])
            kind: Any = Annotated[bool if flag else str, named]
            fields.append((f"option{index}", kind, field(default=False if flag else "")))
    return make_dataclass("Doctor", fields)
