"""What may be asked of a picture, said in the words of the library's errors."""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized
from typing import Any

from rope_patch.errors import InvalidField


def require_count(name: str, value: Any, minimum: int = 1, multiple_of: int = 1) -> None:
    """Check a whole number.

    Args:
        name: of the number, for messages.
        value: what was given.
        minimum: the least that is allowed, 1 by default.
        multiple_of: what it has to be divisible by, 1 by default.

    Raises:
        InvalidField: naming the value and what is allowed.
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < minimum or value % multiple_of:
        kind = "a whole number" if multiple_of == 1 else f"a multiple of {multiple_of}"
        raise InvalidField(f"{name}={value!r} is not allowed; {name} must be {kind} of at least {minimum}")


def require_positive(name: str, value: Any) -> None:
    """Check a finite number above 0.

    Raises:
        InvalidField: naming the value and what is allowed.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise InvalidField(f"{name}={value!r} is not allowed; {name} must be a number above 0")


def require_some(name: str, values: Sized, most: int) -> None:
    """Check that there is something to draw, and no more than a reader can tell apart.

    Args:
        name: of the values, for messages.
        values: what was given.
        most: how many are allowed.

    Raises:
        InvalidField: naming the number and what is allowed.
    """
    if not 1 <= len(values) <= most:
        raise InvalidField(f"{name}: {len(values)} were given; one to {most} can be told apart in a picture")


def require_slot(scheme: Any, method: str, allowed: Sequence[str]) -> None:
    """Check that a scheme has what the picture shows.

    Args:
        scheme: the scheme.
        method: the slot's method that the picture calls.
        allowed: registered schemes that have it, as examples for the message.

    Raises:
        InvalidField: naming the scheme, what it fills, and schemes that would do.
    """
    if method not in scheme.methods:
        filled = ", ".join(sorted(scheme.slots))
        raise InvalidField(f"{scheme} fills {filled} and has no {method}; allowed: {', '.join(allowed)} and others")
