"""Learned tables: checks that a table fits into memory and has a row for every position."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from rope_patch.errors import InvalidField, RopePatchError, UnsupportedPositions
from rope_patch.graphs import traced

MOST_NUMBERS = 2**32  # limit for all tables of a scheme together: 16 GiB in float32


def require_room(scheme: str, make: Callable[[], Iterable[torch.Tensor]]) -> None:
    """Check the size of the tables, of any shape, that `make` returns, before they are allocated.

    Raises:
        InvalidField: the tables would hold more than `MOST_NUMBERS` numbers.
    """
    try:
        with torch.device("meta"):  # shapes without memory
            numbers = float(sum(table.numel() for table in make()))
    except RopePatchError:
        raise
    except Exception as error:  # the count overflows, or `make` needs values, which meta tensors lack
        numbers = float("inf") if "overflow" in str(error).lower() else 0.0
    if numbers > MOST_NUMBERS:
        raise InvalidField(
            f"{scheme} is too large for this model: its tables would hold {numbers:.3g} numbers; at most "
            f"{MOST_NUMBERS} are allowed"
        )


def rows_at(table: torch.Tensor, positions: torch.Tensor, scheme: str) -> torch.Tensor:
    """Look up rows of a table `(rows, hidden)` at integer positions of any shape: `(*positions.shape, hidden)`, in
    float32 or wider.

    Raises:
        UnsupportedPositions: see `require_positions`.
    """
    require_positions(positions, len(table), scheme)
    return torch.nn.functional.embedding(positions, table).to(torch.promote_types(table.dtype, torch.float32))


def require_positions(positions: torch.Tensor, rows: int, scheme: str) -> None:
    """Check that all positions, integers from 0 of any shape, have a row; skipped while compiling, where they have no
    values.

    Raises:
        UnsupportedPositions: a position has no row; the message names the first such position and the number of rows.
    """
    if traced():
        return
    beyond = positions[(positions < 0) | (positions >= rows)]
    if len(beyond):
        raise UnsupportedPositions(
            f"{scheme}: position {int(beyond[0])} has no vector; there are {rows}, from position 0"
        )
