"""List all schemes in a line each, or show everything about the schemes that you name.

    rope-patch list
    rope-patch list yarn
    rope-patch list --json

"training" is the training that a pretrained checkpoint needs before it works under the scheme.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from rope_patch.cli.options import Positional, Words, print_json


@dataclass(kw_only=True)
class Options:
    schemes: Positional[Words] = ()  # names such as yarn (default: all)
    json: bool = False  # print one JSON document, with the fields and their defaults
    markdown: bool = False  # print the tables of docs/reference/schemes.md


def main(options: Options) -> None:
    """Print the declarations of the schemes' classes."""
    sys.modules.setdefault("torch", _Later("torch"))
    from rope_patch.schemes.registry import list_schemes, scheme_class

    schemes = [_entry(scheme_class(name)) for name in options.schemes or list_schemes()]
    if options.json:
        print_json(schemes)
    elif options.markdown:
        print(_markdown(schemes))
    elif options.schemes:
        print("\n\n".join(map(_in_full, schemes)))
    else:
        for scheme in schemes:
            print(f"{scheme['name']:<15}{scheme['class']:<23}{scheme['summary']}")


class _Later(ModuleType):
    """A module that is imported on first use: the declarations of schemes need no tensors."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


def _in_full(scheme: dict[str, Any]) -> str:
    """All declarations of a scheme, as a table to print."""
    from rope_patch.schemes.base import TRAINING

    rows = {
        "scheme": f"{scheme['name']}, class {scheme['class']}",
        "in short": scheme["summary"],
        "also called": ", ".join(scheme["aliases"]),
        "slot": ", ".join(scheme["slots"]),
        "training": TRAINING[scheme["needs"]],
        "families": ", ".join(scheme["families"]),
        "fields": ", ".join(
            f"{name}={value}".replace("=required", " (required)") for name, value in scheme["fields"].items()
        ),
        "allowed": "; ".join(f"{name}: {words}" for name, words in scheme["allowed"].items()),
        "equation": scheme["equation"],
        "source": f"{scheme['source']} ({scheme['year']}) {scheme['link']}",
        "code": scheme["code"],
    }
    return "\n".join(f"{name:<13}{value}" for name, value in rows.items() if value)


_GROUPS = {
    "training-free": "Works on a pretrained model",
    "fine-tune": "After fine-tuning",
    "from-scratch": "For training from scratch",
}


def _markdown(schemes: list[dict[str, Any]]) -> str:
    """Tables by the training that a checkpoint needs, with three columns that are narrow enough for a phone."""
    lines: list[str] = []
    for needs, title in _GROUPS.items():
        lines += [f"## {title}", "", "| scheme | what it does | paper |", "|---|---|---|"]
        for entry in (entry for entry in schemes if entry["needs"] == needs):
            page = "bias" if "bias" in entry["slots"] else entry["slots"][0]  # as docs/hooks/schemes.py places it
            name = f"[`{entry['name']}`](schemes/{page}.md#{entry['name']})"
            lines.append(f"| {name} | {entry['summary']} | [{entry['year']}]({entry['link']}) |")
        lines.append("")
    for family, words in {"T5": "Encoders of T5 do not take", "BERT": "Models with a table of positions take"}.items():
        takes = [f"`{entry['name']}`" for entry in schemes if (family in entry["families"]) == (family == "BERT")]
        lines.append(f"- {words} {', '.join(takes)}.")
    return "\n".join(lines)


def _entry(cls: Any) -> dict[str, Any]:
    from rope_patch.schemes.base import SLOTS, Scheme
    from rope_patch.schemes.registry import other_names
    from rope_patch.schemes.rules import rules_of

    fields, rules = dataclasses.fields(cls), rules_of(cls)
    slots = [slot for name, slot in SLOTS.items() if getattr(cls, name) is not getattr(Scheme, name)]
    encodes = cls.causal_only is not True and not cls.decays  # T5's encoder looks in both directions
    fills_table = cls.rows is not Scheme.rows  # models with a table of positions take rows alone
    return {
        "name": cls.name,
        "class": cls.__name__,
        "summary": vars(cls).get("summary") or (cls.__doc__ or "").strip().partition("\n")[0],
        "aliases": [name for name in other_names(cls) if name != cls.name],
        "slots": list(dict.fromkeys(slots)),
        "needs": cls.regime,
        "families": ["Llama", "Baichuan", *["T5"] * encodes, *["BERT"] * fills_table],
        "fields": {
            field.name: "required" if field.default is dataclasses.MISSING else field.default for field in fields
        },
        "allowed": {field.name: rules[field.name].allowed() for field in fields if field.name in rules},
        "equation": cls.equation,
        "year": cls.source.year,
        "source": cls.source.title,
        "link": cls.source.link,
        "code": cls.source.code,
    }
