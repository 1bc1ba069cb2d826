"""Parsers whose help teaches: prose in the width of the terminal, commands as they are typed, errors in one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from rich.text import Text
from rich_argparse import RichHelpFormatter

from rope_patch.cli.common import say
from rope_patch.errors import did_you_mean

STATUSES = (
    "exit status: 0 done; 2 wrong input, said in one line on stderr; 130 interrupted by Ctrl-C, 143 by SIGTERM; 141 "
    "where whoever read the output went away."
)


USAGE = 8
"""How many options and arguments the first line of a help shows one by one."""


class Formatter(RichHelpFormatter):
    """Fills paragraphs to the width that there is; indented lines are commands and stay as they are."""

    group_name_formatter = str
    help_markup = False
    text_markup = False
    highlights = [*RichHelpFormatter.highlights, r"(?m)^(?P<groups>examples|written|exit status):"]  # noqa: RUF012

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        """What has to be given, where all that can be given would fill the screen.

        Args:
            usage, actions, groups, prefix: as of argparse.
        """
        if len(actions) > USAGE:
            options = argparse.Action([], "options", nargs="?", metavar="options")
            actions = [options, *(action for action in actions if action.required or not action.option_strings)]
            groups = []
        super().add_usage(usage, actions, groups, prefix)

    def _rich_fill_text(self, text: Text, width: int, indent: Text) -> Text:
        filled: list[Text] = []
        paragraph: list[Text] = []
        for line in [*text.split("\n", allow_blank=True), Text()]:
            if line.plain.strip() and not line.plain.startswith(" "):
                paragraph.append(line)
                continue
            if paragraph:
                filled += Text(" ").join(paragraph).wrap(self.console, width)
                paragraph = []
            filled.append(line)
        return Text("\n").join(indent + line for line in filled[:-1]) + "\n\n"


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and what may have been meant.

    Args:
        *arguments, **settings: as of `argparse.ArgumentParser`.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **{"formatter_class": Formatter, **settings})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, once every long option is known."""
        if self._subparsers is None:
            self._check_options(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Say it and leave with status 2."""
        say(f"{message}; see {self.prog} --help")
        raise SystemExit(2)

    def _check_options(self, words: Sequence[str]) -> None:
        # argparse would first ask for what is missing, and a required option that is misspelled is both
        known = [name for name in self._option_string_actions if name.startswith("--")]
        for word in words:
            if word == "--":
                return
            name = word.partition("=")[0]
            if name.startswith("--") and " " not in name and not any(option.startswith(name) for option in known):
                hint, _, allowed = did_you_mean(name, known).partition("allowed: ")
                self.error(f"there is no option {name!r}; {hint.strip() or f'allowed: {allowed}'}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            kind = "command" if isinstance(action, argparse._SubParsersAction) else action.metavar or action.dest
            self.error(f"there is no {kind} {value!r}; {did_you_mean(str(value), map(str, action.choices))}")


class Purposes(Parser):
    """A parser of commands, which its help shows by what they are for."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.commands = self.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
        self._shown: dict[str, list[argparse.Action]] = {}

    def add_purpose(self, title: str, modules: Sequence[Any]) -> None:
        """Add the commands of modules under a title; each module adds its own with `add`."""
        before = len(self.commands._choices_actions)
        for module in modules:
            module.add(self.commands)
        self._shown[title] = self.commands._choices_actions[before:]

    def format_help(self) -> str:
        """The commands under their titles, then the options."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        options = [action for action in self._actions if action.option_strings]
        for title, actions in {**self._shown, "options": options}.items():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()


def add_command(
    commands: Any,
    name: str,
    *,
    summary: str,
    description: str,
    examples: Sequence[str],
    written: str = "nothing but what is printed.",
    heavy: bool = True,
) -> Any:
    """Add a command whose help says what it does, how it is used, what it writes and how it ends.

    Args:
        commands: what `add_subparsers` gave.
        name: of the command.
        summary: its line in the list of commands.
        description: paragraphs, with empty lines between them.
        examples: command lines that run as they are, in this order.
        written: what is written where.
        heavy: whether it imports torch and Transformers.

    Returns:
        its parser. `run` is to be set as a default, and `kept` where an interrupted run can be resumed.
    """
    shown = "\n".join(["examples:", *(f"  {example}" for example in examples)])
    parser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=f"{shown}\n\nwritten: {written}\n\n{STATUSES}",
        formatter_class=Formatter,
    )
    parser.set_defaults(kept="", examples=tuple(examples), heavy=heavy)
    return parser
