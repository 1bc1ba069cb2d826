"""The table mount: other rows in a model's own table of absolute positions.

Nothing is computed at run time. The table, the buffers and the config are those of a longer checkpoint, so a saved
model is one, and loads without this library.
"""

from __future__ import annotations

import torch
from torch import nn

from rope_patch.models.absolute import AbsoluteTable, lengthened
from rope_patch.mounting.undo import Changes
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.tools.tables import require_room


def install_table(scheme: Scheme, table: AbsoluteTable, changes: Changes) -> None:
    """Give a stack the positions of a scheme that fills `embedding`. Reserved rows stay where they are.

    Args:
        scheme: what the rows are.
        table: where they go.
        changes: the log that takes everything back. The configs must be this model's own already.

    Raises:
        InvalidField: when a field does not fit the table; nothing has changed then.
    """
    require_room(str(scheme), lambda: [scheme.rows(table.rows.to("meta"))])
    _replace_rows(table, scheme.rows(table.rows).to(table.rows), changes)


def shorten(table: AbsoluteTable, capacity: int) -> torch.Tensor:
    """Make a table that was saved longer that of its checkpoint again, for good.

    Args:
        table: as it was loaded.
        capacity: n of the checkpoint, whose rows come first.

    Returns:
        the rows as they were saved, `(N, hidden)`.
    """
    saved = table.rows
    _replace_rows(table, saved[:capacity], Changes())
    return saved


def _replace_rows(table: AbsoluteTable, positions: torch.Tensor, changes: Changes) -> None:
    weight, limits = table.embedding.weight, list(table.limits())  # limits are found as long as they fit the table
    growth = len(positions) - table.capacity
    rows = nn.Parameter(torch.cat([weight.detach()[: table.reserved], positions]), weight.requires_grad)
    changes.set(table.embedding, "weight", rows)
    changes.set(table.embedding, "num_embeddings", len(rows))
    for owner, name in table.buffers:
        changes.set(owner, name, lengthened(owner.get_buffer(name), growth))
    for holder, name, value in limits:
        changes.set(holder, name, value + growth)
