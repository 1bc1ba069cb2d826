"""What the commands share: errors in one line, sentences on stderr, lists of numbers."""

from __future__ import annotations

import sys
from typing import Any

from rope_patch.errors import EvaluationError, RopePatchError

INTERRUPTED = "interrupted; finished rows are kept, and the same command goes on from there"
"""What a command says on Ctrl-C whose rows are kept."""


def run_politely(action: Any, interrupted: str = "interrupted") -> int:
    """Run `action()` with errors in one line instead of a traceback.

    Args:
        action: called without arguments.
        interrupted: what to say on Ctrl-C.

    Returns:
        exit status: 0, 2 for wrong input, 130 when interrupted.
    """
    try:
        action()
    except (RopePatchError, OSError) as error:
        say(_one_line(error))
        return 2
    except KeyboardInterrupt:
        print(f"\nrope-patch: {interrupted}", file=sys.stderr)
        return 130
    return 0


def whole_numbers(name: str, words: str, example: str) -> tuple[int, ...]:
    """Numbers with commas between them.

    Raises:
        EvaluationError: they are something else.
    """
    try:
        return tuple(int(word) for word in words.split(","))
    except ValueError:
        raise EvaluationError(f"{name} {words!r}: whole numbers with commas between them, such as {example}") from None


def say(sentence: str) -> None:
    """A sentence for the reader, on stderr, so that stdout holds the results alone."""
    print(f"rope-patch: {sentence}", file=sys.stderr)


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())
