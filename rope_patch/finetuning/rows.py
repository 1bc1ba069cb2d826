"""A batch of training rows, and how stretches of documents are laid out in one.

A document of n tokens is n - 1 pairs of a token and the one that follows it. A *piece* is a stretch of consecutive
pairs, held as its tokens and the one after the last: the next piece of the document begins with that token, so that
however a document is cut, every token of it but the first is a target exactly once.

Two layouts:

    packed   pieces follow one another until the row is full; position_ids start again at 0 with each
    padded   one piece per row, pads behind it

In a packed row tokens attend within their piece. That takes no mask: where `attention_mask` is None and nothing is
cached, Transformers (`masking_utils.find_packed_sequence_indices`) and the attention of this library read the
boundaries off the positions. `Batch.arguments` therefore switches the cache off: with the cache that a training model
makes by default, every token would silently see the documents before its own. FlashAttention 2 sees the boundaries
only where the batch is a single row (`modeling_flash_attention_utils._is_packed_sequence`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.description import check_at_least

NO_TARGET = -100
"""The label that the losses of Transformers and PyTorch leave out."""

LAYOUTS = ("packed", "padded")

Positions = Callable[[int, int], torch.Tensor]
"""position_ids `(pairs,)` of the piece in a row, from its number of pairs and the row's place in the run."""


@dataclass(frozen=True)
class Batch:
    """Rows to train on. All tensors are `(rows, length)`, int64.

    Attributes:
        input_ids: tokens; 0 in place of pads.
        labels: `labels[:, i]` is the token that position i predicts, and `NO_TARGET` where there is none. They are
            shifted already: the loss compares `logits[:, i]` with `labels[:, i]`.
        position_ids: of the tokens; 0 at pads.
        attention_mask: 1 on tokens and 0 on pads; None in packed rows, whose boundaries are in the positions.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def arguments(self) -> dict[str, Any]:
        """What the model is to be called with; without the labels, which it would shift once more."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": self.attention_mask,
            "use_cache": False,  # a cache would hide the boundaries of packed rows
        }

    @property
    def targets(self) -> int:
        """How many tokens are predicted: what sums of losses are divided by."""
        return int((self.labels != NO_TARGET).sum())

    def part(self, index: int, count: int) -> Batch:
        """The rows of one process among several, all of which made the same batch.

        They are consecutive: the parts in the order of their processes are the batch again, and gathering losses or
        logits over the processes keeps the order of the rows.

        Raises:
            EvaluationError: the rows cannot be shared out evenly.
        """
        if len(self) % count or not 0 <= index < count:
            raise EvaluationError(
                f"part {index} of {count} of a batch of {len(self)} rows: the batch size must be a multiple of the "
                "number of processes"
            )
        share = len(self) // count
        return self._rows(slice(index * share, (index + 1) * share))

    def split(self, rows: int) -> list[Batch]:
        """Micro-batches of so many rows; the last may have fewer."""
        return [self._rows(slice(start, start + rows)) for start in range(0, len(self), rows)]

    def to(self, device: torch.device | str) -> Batch:
        """The same batch elsewhere."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def _rows(self, rows: slice) -> Batch:
        return self._each(lambda tensor: tensor[rows])

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        mask = None if self.attention_mask is None else change(self.attention_mask)
        return Batch(change(self.input_ids), change(self.labels), change(self.position_ids), mask)


@dataclass(frozen=True)
class RowSettings:
    """What rows look like and in which order they come.

    Attributes:
        length: pairs per row.
        batch_size: rows per step, over all processes.
        layout: `"packed"` or `"padded"`.
        seed: of the order of the documents.
        end_of_text: whether the tokenizer's end-of-text token closes each document.
        allow_short: whether to train although no document fills a row.
        positions: position_ids of the piece in each row, such as `PoSE`; default 0, 1, 2, ... Padded rows only.
    """

    length: int
    batch_size: int
    layout: str = "packed"
    seed: int = 0
    end_of_text: bool = True
    allow_short: bool = False
    positions: Positions | None = None

    def __post_init__(self) -> None:
        check_at_least(self, 1, "length", "batch_size")
        if self.layout not in LAYOUTS:
            raise EvaluationError(f"layout={self.layout!r} is not allowed; it must be one of {', '.join(LAYOUTS)}")
        if self.positions is not None and self.layout != "padded":
            raise EvaluationError(
                f"layout={self.layout!r} with {self.positions}: positions that skip look like the start of a new "
                "document in packed rows; layout='padded' is needed"
            )

    def check_attention(self, implementation: str, rows: int) -> None:
        """Refuse an attention that would silently see other boundaries between documents than there are.

        FlashAttention 2 of Transformers is given no mask where there are no pads; it then guesses from the positions:
        in a single row every skip ends a document, in several rows none does. The attention of this library makes of
        every skip the end of a document there.

        Args:
            implementation: `attn_implementation` of the model.
            rows: of a micro-batch, which is what the model is called with.

        Raises:
            EvaluationError: packed rows or skipping positions would be misread.
        """
        if "flash" not in implementation:
            return
        if self.positions is not None or (self.layout == "packed" and rows > 1):
            what = f"{rows} packed rows at a time" if self.positions is None else str(self.positions)
            raise EvaluationError(
                f"attention {implementation!r} with {what} is not allowed: it would misread where documents begin; "
                "use attention 'sdpa'"
            )

    def check_long_enough(self, documents: int, longest: int) -> None:
        """Refuse texts that teach nothing of the length they are packed to.

        Args:
            documents: how many there are.
            longest: tokens of the longest.

        Raises:
            EvaluationError: none fills a row.
        """
        if longest <= self.length and not self.allow_short:
            raise EvaluationError(
                f"no document reaches {self.length + 1} tokens, which fill a row of {self.length} and its last target: "
                f"the longest of {documents} has {longest}; packing short documents teaches nothing of longer "
                "distances; give longer documents, a smaller length, or allow_short=true to train all the same"
            )


@dataclass(frozen=True)
class Facts:
    """What the rows are made of.

    Attributes:
        documents: that hold at least two tokens, and so a target.
        short_documents: that hold none.
        tokens: of all documents, start and end of text included.
        longest: tokens of the longest document.
        pieces: into which the documents are cut, in the first epoch.
        full_share: the share of the pairs that lie in pieces of the full length.
        complete: whether this is the whole text; of a stream it is what was read so far.
    """

    documents: int
    short_documents: int
    tokens: int
    longest: int
    pieces: int
    full_share: float
    complete: bool = True

    def __str__(self) -> str:
        """A line for the report of a run."""
        return (
            f"{self.documents} documents of {self.tokens} tokens{'' if self.complete else ' so far'}, the longest "
            f"{self.longest}, in {self.pieces} pieces; {self.full_share:.0%} of the tokens are in pieces of the full "
            "length"
        )


class Rows(Protocol):
    """Batches by the number of the step, whether the texts are in memory or come in a stream."""

    @property
    def facts(self) -> Facts:
        """What the rows are made of."""

    @property
    def steps_per_epoch(self) -> float | None:
        """Steps in which every document is seen once; None where that is not known."""

    def batch(self, step: int) -> Batch:
        """The rows of a step, counted from 0."""

    def state_dict(self) -> dict[str, Any]:
        """What another process needs in order to go on, of plain types and small."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""


def lay_out(rows: Sequence[Sequence[torch.Tensor]], settings: RowSettings, first_row: int) -> Batch:
    """A batch of pieces.

    Args:
        rows: the pieces of each row, `(pairs + 1,)` each.
        settings: the length and the layout.
        first_row: place of the first row in the run, which drawn positions depend on.
    """
    shape = (len(rows), settings.length)
    input_ids, position_ids, mask = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
    labels = torch.full(shape, NO_TARGET)
    for row, pieces in enumerate(rows):
        start = 0
        for piece in pieces:
            pairs = len(piece) - 1
            here = slice(start, start + pairs)
            input_ids[row, here] = piece[:-1]
            labels[row, here] = piece[1:]
            positions = settings.positions
            position_ids[row, here] = torch.arange(pairs) if positions is None else positions(pairs, first_row + row)
            mask[row, here] = 1
            start += pairs
    # without pads the mask is still given to padded rows: without it a skip of positions would end a document
    return Batch(input_ids, labels, position_ids, mask if settings.layout == "padded" else None)


def seeded(*parts: object) -> torch.Generator:
    """A generator for every tuple of plain values, unrelated to that of any other tuple."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
