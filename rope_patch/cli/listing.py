"""`rope-patch list`: the schemes."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from rope_patch.cli.options import add_json
from rope_patch.cli.parser import add_command
from rope_patch.cli.showing import Output, print_json


def add(commands: Any) -> None:
    """Register the command."""
    command = add_command(
        commands,
        "list",
        summary="the schemes, with equation and source",
        description="""\
List every scheme: the slots that it fills, what a pretrained checkpoint needs before it makes sense under it, its
equation and its source. --json adds the fields and their defaults.
""",
        examples=("rope-patch list", "rope-patch list --json"),
    )
    form = command.add_mutually_exclusive_group()
    add_json(form)
    form.add_argument("--markdown", action="store_true", help="as the table of the README")
    command.set_defaults(run=_list)


def _list(arguments: argparse.Namespace) -> None:
    from rope_patch.schemes import list_schemes
    from rope_patch.schemes.registry import scheme_class

    schemes = [_entry(scheme_class(name)) for name in list_schemes()]
    if arguments.json:
        print_json(schemes)
    elif arguments.markdown:
        print(_markdown(schemes))
    else:
        _show(schemes)


def _show(schemes: list[dict[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=True)  # three facts to a cell, so that sources fit 80 columns in one piece
    table.add_column("scheme", overflow="fold")
    table.add_column("slot and what it needs, equation, source", overflow="fold")
    for entry in schemes:
        table.add_row(
            Text.assemble((entry["name"], "bold"), f"\n{entry['class']}\n{entry['year']}"),
            Text(
                f"{', '.join(entry['slots'])}; {entry['needs']}\n{entry['equation']}\n"
                f"{entry['link'] or entry['source']}"
            ),
        )
    Output().print(table)


def _markdown(schemes: list[dict[str, Any]]) -> str:
    """The table of the README."""
    lines = ["| scheme | year | slot | needs training? | families | paper |", "|---|---|---|---|---|---|"]
    for entry in schemes:
        paper = f"[{entry['source']}]({entry['link']})" if entry["link"] else entry["source"]
        needs = "no" if entry["needs"] == "training-free" else entry["needs"]
        cells = (
            f"`{entry['name']}`",
            str(entry["year"]),
            ", ".join(entry["slots"]),
            needs,
            ", ".join(entry["families"]),
            paper,
        )
        lines.append(f"| {' | '.join(cells)} |")
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
        "families": _families(cls),
        "fields": fields,
        "equation": cls.equation,
        "year": cls.source.year,
        "source": cls.source.title,
        "link": cls.source.link,
        "code": cls.source.code,
    }


def _families(cls: Any) -> list[str]:
    """The styles of models that take the scheme."""
    from rope_patch.schemes.base import Scheme

    encodes = cls.causal_only is not True and not cls.decays  # T5's encoder looks in both directions
    fills_table = cls.rows is not Scheme.rows  # models with a table of positions take rows alone
    return ["Llama", "Baichuan", *["T5"] * encodes, *["BERT"] * fills_table]
