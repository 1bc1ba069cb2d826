"""`rope-patch recipes`: the scripts and descriptions that come with the library."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from pathlib import Path
from typing import Any

from rope_patch.cli import cookbook
from rope_patch.cli.options import add_json
from rope_patch.cli.parser import Parser, add_command
from rope_patch.cli.showing import Output, print_json


def add(commands: Any) -> None:
    """Register the command, which has two of its own."""
    command = add_command(
        commands,
        "recipes",
        summary="the scripts and descriptions that come with the library, listed or copied to where you are",
        description="""\
A recipe is a description in YAML with the script that carries it out. They come with the library; `copy` writes one,
with the small checkpoint that it names, to a folder where it can be read, changed and run.
""",
        examples=("rope-patch recipes list", "rope-patch recipes copy demo", "rope-patch recipes copy --help"),
        heavy=False,
    )
    ours = command.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=Parser)

    listed = add_command(
        ours,
        "list",
        summary="names, and what each is for",
        description="List the recipes.",
        examples=("rope-patch recipes list", "rope-patch recipes list --json"),
        heavy=False,
    )
    add_json(listed)
    listed.set_defaults(run=_list)

    copied = add_command(
        ours,
        "copy",
        summary="write a recipe and what it needs to a folder",
        description="""\
Copy a recipe: description, script and the small checkpoints that they name, laid out as in the library, so that the
commands in their first lines run as they are from the folder that --to names.
""",
        examples=("rope-patch recipes copy demo", "rope-patch recipes copy passkey_tiny --to runs/passkey"),
        written="DIR/recipes/...; DIR is --to. A file that is there already is left alone where it is the same; one "
        "that was changed is refused without --force, and then nothing is written.",
        heavy=False,
    )
    copied.add_argument("name", metavar="NAME", help="as `rope-patch recipes list` shows it")
    copied.add_argument("--to", metavar="DIR", default=".", help="the folder (default: the current one)")
    copied.add_argument("--force", action="store_true", help="overwrite files that were changed")
    add_json(copied)
    copied.set_defaults(run=_copy)


def _list(arguments: argparse.Namespace) -> None:
    from rich.table import Table

    recipes = [cookbook.find(name) for name in cookbook.names()]
    if arguments.json:
        print_json([dataclasses.asdict(recipe) for recipe in recipes])
        return
    table = Table(show_lines=True)
    table.add_column("name", overflow="fold")
    table.add_column("what it does", overflow="fold", ratio=1)
    for recipe in recipes:
        table.add_row(recipe.name, recipe.about)
    console = Output(highlight=False, markup=False)
    console.print(table)
    console.print("copy one with all that it needs: rope-patch recipes copy NAME")


def _copy(arguments: argparse.Namespace) -> None:
    recipe = cookbook.find(arguments.name)
    folder = Path(arguments.to)
    written = [str(path) for path in cookbook.copy(recipe, folder, force=arguments.force)]
    commands = [*([f"cd {shlex.quote(str(folder))}"] if folder != Path() else []), *recipe.commands]
    if arguments.json:
        print_json({"written": written, "next": commands})
        return
    print("\n".join(f"wrote {path}" for path in written) or "everything is there already")
    print("\n".join(["next:", *(f"  {command}" for command in commands)]))
