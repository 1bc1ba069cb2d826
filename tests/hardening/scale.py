"""How much of everything: little in the usual run, and much where `ROPE_PATCH_HARD` is set."""

from __future__ import annotations

import os


def cases(*, usual: int, hard: int) -> int:
    """How many cases a test goes through.

    Args:
        usual: in the run of every day.
        hard: where the environment has `ROPE_PATCH_HARD=1`.
    """
    return hard if os.environ.get("ROPE_PATCH_HARD") == "1" else usual


def parts(*, usual: int, hard: int, size: int) -> list[int]:
    """How many cases each of several tests goes through, `size` at most, so that processes can divide them."""
    total = cases(usual=usual, hard=hard)
    return [min(size, total - start) for start in range(0, total, size)]
