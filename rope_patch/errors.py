"""All errors and warnings of this library.

Errors derive from `RopePatchError` and from the builtin that fits, so both styles of `except` work.
"""

from __future__ import annotations

import difflib
import importlib
import sys
import warnings
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

_LONGEST = 2000  # characters of a message; what a user typed may be longer


class RopePatchError(Exception):
    """Base of all errors of this library.

    Args:
        message: the fault and the allowed values; the middle of a very long message is cut.
    """

    def __init__(self, message: str = "") -> None:
        cut = f"{message[: _LONGEST // 2]} ... {message[-_LONGEST // 2 :]}"
        super().__init__(cut if len(message) > len(cut) else message)


class RopePatchWarning(UserWarning):
    """All warnings of this library. A patch changes nothing, shortens a checkpoint, or requires training of a
    pretrained model (`describe` shows these too). A cast has rounded frequencies. Plain libraries will read a saved
    model without its scheme. A setting of a checkpoint is not followed. A kernel failed its trial and is not used.

    Silence it with `warnings.simplefilter("ignore", rope_patch.RopePatchWarning)`.
    """


class UnknownScheme(RopePatchError, KeyError):
    """A scheme name that is not registered."""

    # KeyError prints the repr of its argument; the sentence is meant to be read
    __str__ = Exception.__str__


class InvalidField(RopePatchError, ValueError):
    """A scheme's field is unknown, missing, of the wrong type or out of range."""


class MissingField(InvalidField):
    """A scheme lacks a field that it requires.

    Attributes:
        scheme: the class of the scheme.
        given: the fields that were given.
    """

    scheme: Any = None
    given: Mapping[str, Any] = MappingProxyType({})


class UnsupportedModel(RopePatchError, TypeError):
    """The model lacks the seam that a scheme is mounted on; the message names it."""


class AlreadyPatched(RopePatchError, ValueError):
    """The model carries a scheme already; nothing is replaced silently."""


class NotPatched(RopePatchError, ValueError):
    """The model carries no scheme."""


class SlotConflict(RopePatchError, ValueError):
    """Two schemes of one composition fill the same slot."""


class UnsupportedPositions(RopePatchError, ValueError):
    """Positions, masks or caches have a form that the scheme's attention does not support."""


class NotExpressible(RopePatchError, ValueError):
    """The `rope_parameters` of Transformers cannot express the scheme."""


class NothingToPatch(RopePatchError, ValueError):
    """The scheme would leave every layer of this model unchanged."""


class CorpusError(RopePatchError, ValueError):
    """There is no text at the path of the corpus."""


class EvaluationError(RopePatchError, ValueError):
    """A measurement is not possible with these arguments."""


class NoCheckpoint(EvaluationError, OSError):
    """There is no checkpoint at the given place, or it cannot be read."""


class MissingPackage(RopePatchError, ImportError):
    """An optional package is missing; the message names what to install."""


def warn(sentence: str, stacklevel: int) -> None:
    """Warn with a `RopePatchWarning` that says how to silence it; `stacklevel` is 1 for the caller of this function."""
    silence = "warnings.simplefilter('ignore', rope_patch.RopePatchWarning) silences this"
    warnings.warn(f"{sentence} ({silence})", RopePatchWarning, stacklevel=stacklevel + 1)


def outside() -> int:
    """The `stacklevel` of the nearest line outside this library, for a call of `warn` in the calling function."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "rope_patch":
        level, frame = level + 1, frame.f_back
    return level


def require(package: str, what: str, extra: str | None = None) -> None:
    """Check that an optional package is installed.

    Args:
        package: name of the package in an import.
        what: the feature that needs the package, as the beginning of a sentence.
        extra: the extra of this library that installs the package; None if you install it under its own name.

    Raises:
        MissingPackage: the package cannot be imported.
    """
    try:
        importlib.import_module(package)
    except ImportError as error:
        wanted = f'".[{extra}]" in a checkout of rope_patch' if extra else package
        raise MissingPackage(f"{what} needs {package}: pip install {wanted}") from error


def counted(number: int, noun: str) -> str:
    """Count a noun: `1 window`, `2 windows`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def nearest(name: str, allowed: Iterable[str], number: int = 1, cutoff: float = 0.6) -> list[str]:
    """The `number` closest of the allowed names, best first; names less similar than `cutoff`, from 0 to 1, are left
    out.
    """
    return difflib.get_close_matches(name[:80], allowed, number, cutoff)  # comparing takes the square of the length


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """The end of a message: the closest allowed name, if any is close, and all allowed names."""
    allowed = sorted(allowed)
    close = nearest(name, allowed)
    suggestion = f"did you mean {close[0]!r}? " if close else ""
    return f"{suggestion}allowed: {', '.join(allowed) or 'none'}"
