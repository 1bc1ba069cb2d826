"""A collator that pads rows and chooses the positions of their tokens."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from rope_patch.errors import EvaluationError

Row = dict[str, Any]
"""A row with `input_ids`, and perhaps `labels`, `attention_mask` and columns of a layout."""


class PlacingCollator:
    """A data collator for rows of one text each. A subclass places the tokens of a row; see `_place`.

    Attributes:
        seed: seed of all draws.
    """

    seed: int

    def __call__(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        """Collate rows of `input_ids` and, if not every token is to be learned, `labels`. Pads in a row, on either side
        of its `attention_mask`, are removed; new pads are added on the right.

        Raises:
            EvaluationError: a row is longer than the target length, or holds several documents.
        """
        texts = [_text(row) for row in rows]
        columns = {
            "input_ids": ([ids for ids, _ in texts], 0),
            "labels": ([labels for _, labels in texts], -100),
            "attention_mask": ([torch.ones_like(ids) for ids, _ in texts], 0),
            "position_ids": ([self._place(ids, row) for (ids, _), row in zip(texts, rows, strict=True)], 0),
        }
        return {name: pad_sequence(tensors, True, pad) for name, (tensors, pad) in columns.items()}

    def _place(self, ids: torch.Tensor, row: Row) -> torch.Tensor:
        """The positions at which to place the tokens of a `row`, without its pads, `(length,)`."""
        raise NotImplementedError

    def _room(self, ids: torch.Tensor, **limit: int) -> int:
        """The number of positions below the limit of this name that a row leaves free."""
        ((name, positions),) = limit.items()
        if (room := positions - len(ids)) < 0:
            raise EvaluationError(f"{name}={positions} is not allowed; a row has {len(ids)} tokens")
        return room

    def _generator(self, ids: torch.Tensor, *others: int) -> torch.Generator:
        """A random generator that depends on the seed, `others` and the tokens alone."""
        digest = hashlib.sha256(" ".join(map(str, (self.seed, *others, ids.tolist()))).encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _text(row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of a row and their labels, without pads."""
    ids = torch.as_tensor(row["input_ids"])
    labels = torch.as_tensor(row.get("labels", ids))
    there = torch.as_tensor(row.get("attention_mask", torch.ones_like(ids))).bool()
    positions = torch.as_tensor(row.get("position_ids", torch.arange(len(ids))))[there]
    if len(row.get("seq_lengths", ())) > 1 or (positions.diff() <= 0).any():
        raise EvaluationError(
            "a row holds several documents, which would become one text; give each a row of its own (packing=False)"
        )
    return ids[there], labels[there]
