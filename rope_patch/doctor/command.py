"""Check which positions programs read from a checkpoint's config, and where two configs part.

    rope-patch doctor FOLDER
    rope-patch doctor FOLDER --for vllm --for llama.cpp==0c1e570 --strict
    rope-patch doctor TRAINED SERVED
    rope-patch doctor model.gguf --json

A checkpoint is a folder, a config.json or a GGUF file. Exit status: 0 if all agree, 1 if something is computed
otherwise, 2 if nothing could be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from .comparing import as_numbers_of_pair, compare, words_of_pair
from .diagnosis import Report, as_numbers, diagnose
from .errors import Unreadable
from .readers import READERS
from .sources import read_source
from .words import words_of


def parser(program: str = "rope-doctor") -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(program, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("checkpoint", help="folder, config.json or GGUF file")
    made.add_argument("served", nargs="?", help="a second one: do both say the same positions?")
    made.add_argument(
        "--for",
        dest="readers",
        action="append",
        default=[],
        metavar="READER[==VERSION]",
        help=f"only these readers, also joined by commas: {', '.join(reader.key for reader in READERS)}",
    )
    made.add_argument("--json", action="store_true", help="print one JSON document, see schema.json")
    made.add_argument(
        "--strict",
        action="store_true",
        help="also fail where a reader computes only some texts, or a config is ambiguous",
    )
    return made


def main(words: Sequence[str] | None = None, program: str = "rope-doctor") -> int:
    """Run the command; returns the exit status."""
    options = parser(program).parse_args(words)
    asked = [name for each in options.readers for name in each.split(",") if name]
    try:
        first = read_source(options.checkpoint)
        if options.served is not None:
            pair = compare(first, read_source(options.served), asked)
            print(json.dumps(as_numbers_of_pair(pair), indent=2) if options.json else words_of_pair(pair))
            return int(not pair.agrees)
        report = diagnose(first, asked)
    except Unreadable as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    print(json.dumps(as_numbers(report), indent=2) if options.json else words_of(report))
    return int(not (is_clear(report) if options.strict else report.agrees))


def is_clear(report: Report) -> bool:
    """Whether every reader computes all texts as the config says, and the config says it once."""
    return not report.notes and all(reading.verdict == "agrees" for reading in report.readings)
