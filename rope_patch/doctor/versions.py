"""The order of two versions of a program."""

from __future__ import annotations

import re
from itertools import zip_longest

_COMMIT = re.compile(r"[0-9a-f]{7,40}")
_VERSION = re.compile(
    r"[vb]?(?P<numbers>\d+(?:\.\d+)*)(?P<before>[._-]?(?:a|b|rc|dev|alpha|beta|pre)[._-]?\d*)?(?:[.+-].*)?"
)


def is_ordered(version: str) -> bool:
    """Whether a version can be ordered: a number can, also `v1.2` or `b9608`; a commit cannot."""
    return _COMMIT.fullmatch(version) is None and _VERSION.fullmatch(version) is not None


def older(one: str, other: str) -> bool:
    """Whether a version comes before another, number by number; a pre-release comes before its release."""
    pairs = zip_longest(_numbers(one), _numbers(other), fillvalue=0)
    different = next(((a, b) for a, b in pairs if a != b), None)
    return _leads_up(one) and not _leads_up(other) if different is None else different[0] < different[1]


def _numbers(version: str) -> list[int]:
    found = _VERSION.fullmatch(version)
    return [int(number) for number in found["numbers"].split(".")] if found else []


def _leads_up(version: str) -> bool:
    found = _VERSION.fullmatch(version)
    return found is not None and found["before"] is not None
