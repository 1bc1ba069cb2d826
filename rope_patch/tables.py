"""Learned tables with a row per position, and the refusal of positions that they have no row for."""

from __future__ import annotations

import torch
from torch.nn import functional

from rope_patch.errors import UnsupportedPositions


def rows_at(table: torch.Tensor, positions: torch.Tensor, scheme: str) -> torch.Tensor:
    """The rows of a table at some positions, in float32 at least.

    Args:
        table: `(rows, hidden)`.
        positions: integer, of any shape.
        scheme: the name that a refusal begins with.

    Returns:
        `(*positions.shape, hidden)`.

    Raises:
        UnsupportedPositions: see `require_positions`.
    """
    require_positions(positions, len(table), scheme)
    return functional.embedding(positions, table).to(torch.promote_types(table.dtype, torch.float32))


def require_positions(positions: torch.Tensor, rows: int, scheme: str) -> None:
    """Check that there are rows for all positions; not while compiling, where positions have no values yet.

    Args:
        positions: integer, any shape.
        rows: how many there are, from position 0 on.
        scheme: its name, for the message.

    Raises:
        UnsupportedPositions: names the first position without a row, and the number of rows.
    """
    if torch.compiler.is_compiling():
        return
    beyond = positions[(positions < 0) | (positions >= rows)]
    if len(beyond):
        raise UnsupportedPositions(
            f"{scheme}: there is no vector for position {int(beyond[0])}; there are {rows}, from position 0 on"
        )
