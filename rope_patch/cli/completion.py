"""Print the script that lets bash or zsh complete commands and options.

    rope-patch completion bash > ~/.local/share/bash-completion/completions/rope-patch
    rope-patch completion zsh > _rope-patch    # in a folder of $fpath, before compinit

Open a new shell then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union

import tyro

from rope_patch.cli.options import Positional


@dataclass(kw_only=True)
class Options:
    shell: Positional[Literal["bash", "zsh"]]  # your shell


def main(options: Options) -> None:
    """Print the script that tyro writes for all commands together."""
    from rope_patch.cli import available, load

    commands: Any = Union[  # noqa: UP007  the members are computed
        tuple(Annotated[load(name).Options, tyro.conf.subcommand(name=name)] for name in available())
    ]
    try:
        tyro.cli(commands, prog="rope-patch", args=["--tyro-print-completion", options.shell])
    except SystemExit as end:
        if end.code:
            raise
