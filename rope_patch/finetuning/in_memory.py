"""Training rows of texts that fit into memory: the batch of a step is a function of the step and the seed alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from tqdm import tqdm

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.sharing import is_main
from rope_patch.finetuning.rows import Batch, Facts, RowSettings, lay_out, seeded
from rope_patch.finetuning.tokens import Encoder

_TOGETHER = 64  # texts that a fast tokenizer reads on all cores at once


class MemoryRows:
    """Rows over endless epochs, each of which shuffles anew.

    *packed*: the pairs of all documents, in the order of the epoch, and those of the epochs to come are one line of
    pairs; row r holds the pairs r L to (r + 1) L of it. Whatever that cuts goes on in the next row.
    *padded*: documents are cut into pieces of L pairs, and the pieces are shuffled, not the documents: a long one
    would otherwise fill whole batches.

    Attributes:
        settings: of the rows.
        tokens: of all documents, one after another, `(tokens,)` int32.
        facts: what the rows are made of.

    Args:
        documents: tokens of each, `(tokens,)`.
    """

    def __init__(self, documents: Iterable[torch.Tensor], settings: RowSettings) -> None:
        """Rows of documents that are tokens already, `(tokens,)` each.

        Raises:
            EvaluationError: no document has two tokens, or none fills a row.
        """
        found = list(documents)
        kept = [tokens.int() for tokens in found if len(tokens) > 1]
        if not kept:
            raise EvaluationError(f"there is nothing to predict: none of {len(found)} documents has two tokens")
        self.settings = settings
        self.tokens = torch.cat(kept)
        sizes = torch.tensor([len(tokens) for tokens in kept])
        settings.check_long_enough(len(kept), int(sizes.max()))
        starts = sizes.cumsum(0) - sizes
        if settings.layout == "packed":
            self._starts, self._pairs = starts, sizes - 1
        else:
            self._starts, self._pairs = _cut(starts, sizes - 1, settings.length)
        self._orders: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.facts = self._measure(found, sizes)

    @classmethod
    def of_texts(
        cls,
        documents: Iterable[Mapping[str, str]],
        tokenizer: Any,
        settings: RowSettings,
        vocab_size: int | None = None,
    ) -> MemoryRows:
        """Rows of texts, tokenised once.

        Args:
            documents: rows with `name` and `text`, such as `read_documents` gives.
            tokenizer: of the checkpoint.
            settings: of the rows.
            vocab_size: of the model.

        Raises:
            CorpusError: there is no text.
            EvaluationError: tokenizer and model do not belong together, or no document fills a row.
        """
        encode = Encoder(tokenizer, vocab_size, settings.end_of_text)
        return cls(_encoded(documents, encode), settings)

    @property
    def steps_per_epoch(self) -> float:
        """Steps in which every target is seen once."""
        return self._rows_per_epoch / self.settings.batch_size

    @property
    def _rows_per_epoch(self) -> float:
        if self.settings.layout == "padded":
            return len(self._pairs)
        return int(self._pairs.sum()) / self.settings.length

    def batch(self, step: int) -> Batch:
        """The rows of a step, counted from 0."""
        first = step * self.settings.batch_size
        row = self._packed_row if self.settings.layout == "packed" else self._padded_row
        return lay_out([row(first + i) for i in range(self.settings.batch_size)], self.settings, first)

    def _packed_row(self, row: int) -> list[torch.Tensor]:
        place, pieces, room = row * self.settings.length, [], self.settings.length
        per_epoch = int(self._pairs.sum())
        while room:
            epoch, inside = divmod(place, per_epoch)
            order, ends = self._order(epoch)
            index = int(torch.searchsorted(ends, inside, right=True))
            left = int(ends[index]) - inside  # pairs of this document that are still to come
            pairs = min(left, room)
            begin = int(self._starts[order[index]] + self._pairs[order[index]]) - left
            pieces.append(self.tokens[begin : begin + pairs + 1])
            place, room = place + pairs, room - pairs
        return pieces

    def _padded_row(self, row: int) -> list[torch.Tensor]:
        epoch, inside = divmod(row, len(self._pairs))
        index = self._order(epoch)[0][inside]
        begin = int(self._starts[index])
        return [self.tokens[begin : begin + int(self._pairs[index]) + 1]]

    def _order(self, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Documents (or pieces) in the order of an epoch, and where each ends in its line of pairs."""
        if epoch not in self._orders:
            order = torch.randperm(len(self._pairs), generator=seeded(self.settings.seed, "order", epoch))
            recent = dict(list(self._orders.items())[-1:])  # a row may reach from one epoch into the next
            self._orders = {**recent, epoch: (order, self._pairs[order].cumsum(0))}
        return self._orders[epoch]

    def _measure(self, found: list[torch.Tensor], sizes: torch.Tensor) -> Facts:
        length = self.settings.length
        if self.settings.layout == "padded":
            pieces, full = len(self._pairs), int((self._pairs == length).sum())
        else:
            order, ends = self._order(0)
            starts = ends - self._pairs[order]
            pieces = int(((ends - 1) // length - starts // length + 1).sum())
            full = int((ends // length - (starts + length - 1) // length).clamp(min=0).sum())
        return Facts(
            documents=len(sizes),
            short_documents=len(found) - len(sizes),
            tokens=int(sizes.sum()),
            longest=int(sizes.max()),
            pieces=pieces,
            full_share=full * length / int(self._pairs.sum()),
        )

    def state_dict(self) -> dict[str, Any]:
        """Only what tells whether the rows are still the same: any step can be asked for at any time."""
        return {"fingerprint": self.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make sure that the rows are those that were trained on before.

        Raises:
            EvaluationError: the texts, the tokenizer or the settings are others.
        """
        if state.get("fingerprint") != self.fingerprint:
            raise EvaluationError(
                "the saved state belongs to other rows: the texts, the tokenizer, the length, the layout, the batch "
                "size or the seed have changed; start in a new folder"
            )

    @property
    def fingerprint(self) -> str:
        """Of all that batches depend on."""
        settings = self.settings
        plain = (settings.length, settings.batch_size, settings.layout, settings.seed, settings.positions)
        digest = hashlib.sha256(repr(plain).encode())
        for tensor in (self.tokens, self._starts, self._pairs):
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()[:16]


def _cut(starts: torch.Tensor, pairs: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Starts and numbers of pairs of the pieces of at most `length` pairs."""
    counts = (pairs + length - 1) // length
    documents = torch.repeat_interleave(torch.arange(len(pairs)), counts)
    offsets = (torch.arange(len(documents)) - (counts.cumsum(0) - counts)[documents]) * length
    return starts[documents] + offsets, (pairs[documents] - offsets).clamp(max=length)


def _encoded(documents: Iterable[Mapping[str, str]], encode: Encoder) -> Iterator[torch.Tensor]:
    rows = iter(documents)
    silent = None if is_main() else True  # None: shown where there is a terminal
    with tqdm(desc="tokenising", unit="document", leave=False, disable=silent) as bar:
        while some := list(islice(rows, _TOGETHER)):
            yield from encode([row["name"] for row in some], [row["text"] for row in some])
            bar.update(len(some))
