"""Check which positions programs read from a checkpoint's config, and where two configs part.

    rope-patch doctor FOLDER
    rope-patch doctor FOLDER --for vllm --for llama.cpp==0c1e570 --strict
    rope-patch doctor TRAINED SERVED
    rope-patch doctor model.gguf --json
    rope-patch doctor --all

A checkpoint is a folder, a config.json or a GGUF file. Exit status: 0 if all agree, 1 if something is computed
otherwise, 2 if something could not be read.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from .comparing import as_numbers_of_pair, compare, words_of_pair
from .diagnosis import as_numbers, diagnose
from .errors import Unreadable
from .readers import READERS
from .sources import read_source
from .survey import CONFIGS, as_numbers_of_survey, is_clear, survey, words_of_survey
from .words import words_of

OPTIONS: dict[str, dict[str, Any]] = {
    "checkpoints": {
        "nargs": "*",
        "metavar": "CHECKPOINT",
        "help": "folder, config.json or GGUF file; with two, compare their positions",
    },
    "--model": {
        "action": "append",
        "default": [],
        "metavar": "CHECKPOINT",
        "help": "same as CHECKPOINT, as in other commands",
    },
    "--for": {
        "dest": "readers",
        "action": "append",
        "default": [],
        "metavar": "READER[==VERSION]",
        "help": f"check only these readers, with spaces or commas: {', '.join(reader.key for reader in READERS)}",
    },
    "--all": {
        "action": "store_true",
        "help": f"check all configs of a repository, in the given folders, files or patterns (default: {CONFIGS})",
    },
    "--strict": {
        "action": "store_true",
        "help": "also fail if a reader computes some texts differently, or if a config is ambiguous",
    },
    "--json": {"action": "store_true", "help": "print one JSON document, which schema.json describes"},
}
"""Words of the command line, with the settings of each in argparse."""

_WITH_A_SCHEME = "`rope-patch describe --model CHECKPOINT --scheme ...` shows what a scheme would change"

AGREED, OTHERWISE, UNREADABLE, NO_STDOUT = 0, 1, 2, 141


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Refuse with one line, where argparse would print several."""
        typed = re.match(r"unrecognized arguments: --([\w-]+)", message)
        names = {word.removeprefix("--"): word for word in OPTIONS if word.startswith("--")}
        names |= dict.fromkeys(("reader", "readers", "program", "engine"), "--for")
        near = difflib.get_close_matches(typed[1], names, 1) if typed else []
        hint = f"; did you mean {names[near[0]]!r}?" if near else ""
        if typed and typed[1] in ("scheme", "schemes"):
            hint = "; doctor reads a checkpoint's own config, without a scheme: " + _WITH_A_SCHEME
        raise Unreadable(f"{message}{hint}; {self.prog} --help explains all options")


def parser(program: str = "rope-doctor") -> argparse.ArgumentParser:
    """Build the parser, with the name under which the command was called."""
    made = _Parser(
        program,
        description=(__doc__ or "").replace("rope-patch doctor", program),
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=32),
        allow_abbrev=False,
    )
    for word, settings in OPTIONS.items():
        made.add_argument(word, **settings)
    return made


def main(words: Sequence[str] | None = None, program: str = "rope-doctor") -> int:
    """Run the command.

    Args:
        words: arguments of the command line; by default those of this process.
        program: the name under which the command was called.

    Returns:
        exit status, see the top of this file; 141 if the reader of stdout went away.
    """
    words = sys.argv[1:] if words is None else words
    try:
        document, text, status = _answered(parser(program).parse_intermixed_args(_checked(words)))
        print(text if document is None else json.dumps(document, indent=2, allow_nan=False))
        sys.stdout.flush()  # now, while a closed pipe can still be handled
    except SystemExit as end:  # after --help
        return int(end.code or 0)
    except BrokenPipeError:
        # else the interpreter would complain when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_STDOUT
    except (Unreadable, OSError) as error:
        print(f"{program.replace(' ', ': ')}: {' '.join(str(error).split())}", file=sys.stderr)
        return UNREADABLE
    return status


def _answered(options: argparse.Namespace) -> tuple[dict[str, Any] | None, str, int]:
    """Return the command's answer, as JSON if you asked for it and else in words, and the exit status."""
    options.checkpoints += options.model
    asked = [name for each in options.readers for name in each.split(",") if name]
    if options.all:
        found = survey(options.checkpoints or [CONFIGS], asked)
        status = max(each.status(options.strict) for each in found)
        return (as_numbers_of_survey(found), "", status) if options.json else (None, words_of_survey(found), status)
    if len(options.checkpoints) not in (1, 2):
        raise Unreadable(f"{len(options.checkpoints)} checkpoints are given; give one, or two to compare, or --all")
    first, *second = map(read_source, options.checkpoints)
    if second:
        pair = compare(first, second[0], asked)
        status = AGREED if pair.agrees else OTHERWISE
        return (as_numbers_of_pair(pair), "", status) if options.json else (None, words_of_pair(pair), status)
    report = diagnose(first, asked)
    status = AGREED if (is_clear(report) if options.strict else report.agrees) else OTHERWISE
    return (as_numbers(report), "", status) if options.json else (None, words_of(report), status)


def _checked(words: Sequence[str]) -> Sequence[str]:
    """Check that the words can be paths, and return them."""
    for word in words:
        if "\0" in word or any("\ud800" <= sign <= "\udfff" for sign in word):
            raise Unreadable(f"{word!r:.200} contains a NUL character or a byte that is not UTF-8; leave it out")
    return words
