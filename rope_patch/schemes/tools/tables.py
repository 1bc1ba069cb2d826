"""Learned tables: the refusal of those that no memory holds, and of positions that they have no row for."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from rope_patch.errors import InvalidField, RopePatchError, UnsupportedPositions

MOST_NUMBERS = 2**32
"""What the tables of a scheme may hold together: 16 GiB in float32."""


def require_room(scheme: str, make: Callable[[], Iterable[torch.Tensor]]) -> None:
    """Check how large the tables would be, of any shape, that `make` makes, before they are made.

    Raises:
        InvalidField: they would hold more than `MOST_NUMBERS`.
    """
    try:
        with torch.device("meta"):  # which has shapes and no memory
            numbers = float(sum(table.numel() for table in make()))
    except RopePatchError:
        raise
    except Exception as error:  # too large to be counted; or made by values, which are not there
        numbers = float("inf") if "overflow" in str(error).lower() else 0.0
    if numbers > MOST_NUMBERS:
        raise InvalidField(
            f"{scheme} is too large for this model: its tables would hold {numbers:.3g} numbers, and at most "
            f"{MOST_NUMBERS} are allowed"
        )


def rows_at(table: torch.Tensor, positions: torch.Tensor, scheme: str) -> torch.Tensor:
    """The rows of a table `(rows, hidden)` at integer positions of any shape: `(*positions.shape, hidden)`, in float32
    at least.

    Raises:
        UnsupportedPositions: see `require_positions`.
    """
    require_positions(positions, len(table), scheme)
    return torch.nn.functional.embedding(positions, table).to(torch.promote_types(table.dtype, torch.float32))


def require_positions(positions: torch.Tensor, rows: int, scheme: str) -> None:
    """Check that there are rows for all positions, integers of any shape, which count from 0; not while compiling,
    where positions have no values yet.

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
