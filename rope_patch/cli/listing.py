"""`rope-patch list`: the schemes."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any


def add(commands: Any) -> None:
    """Register the command."""
    command = commands.add_parser("list", help="the schemes, with equation and source")
    form = command.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON, with the fields and their defaults")
    form.add_argument("--markdown", action="store_true", help="as the table of the README")
    command.set_defaults(run=_list, interrupted="interrupted")


def _list(arguments: argparse.Namespace) -> None:
    from rope_patch.schemes import list_schemes
    from rope_patch.schemes.registry import scheme_class

    schemes = [_entry(scheme_class(name)) for name in list_schemes()]
    if arguments.json:
        print(json.dumps(schemes, indent=2, ensure_ascii=False))
        return
    if arguments.markdown:
        print(_markdown(schemes))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=True)  # two facts to a cell, so that it fits 80 columns
    for column in ("name, class", "slot, needs", "year"):
        table.add_column(column, no_wrap=True)
    table.add_column("equation, source", overflow="fold")
    for entry in schemes:
        table.add_row(
            f"[bold]{entry['name']}[/bold]\n{entry['class']}",
            f"{', '.join(entry['slots'])}\n{entry['needs']}",
            str(entry["year"]),
            Text(f"{entry['equation']}\n{entry['link'] or entry['source']}"),
        )
    Console().print(table)


def _markdown(schemes: list[dict[str, Any]]) -> str:
    """The table of the README."""
    lines = ["| scheme | class | year | slot | needs | equation |", "|---|---|---|---|---|---|"]
    for entry in schemes:
        year = f"[{entry['year']}]({entry['link']})" if entry["link"] else entry["year"]
        equation = entry["equation"].replace("|", "\\|")
        lines.append(
            f"| `{entry['name']}` | {entry['class']} | {year} | {', '.join(entry['slots'])} | {entry['needs']} "
            f"| {equation} |"
        )
    return "\n".join(lines)


def _entry(cls: Any) -> dict[str, Any]:
    from rope_patch.schemes.base import SLOTS, Scheme

    fields = {
        field.name: "required" if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(cls)
    }
    return {
        "name": cls.name,
        "class": cls.__name__,
        "slots": list(
            dict.fromkeys(slot for name, slot in SLOTS.items() if getattr(cls, name) is not getattr(Scheme, name))
        ),
        "needs": cls.regime,
        "fields": fields,
        "equation": cls.equation,
        "year": cls.source.year,
        "source": cls.source.title,
        "link": cls.source.link,
        "code": cls.source.code,
    }
