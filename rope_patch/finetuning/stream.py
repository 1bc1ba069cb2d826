"""Training rows of texts that are read as they are trained on: the batches of consecutive steps.

The state of a stream is a place: the epoch, the block of documents, the document in it, the pair in that. Nothing
that was read is saved. To keep it so, documents are shuffled in blocks of `shuffle_buffer`, each in an order drawn
anew; a buffer that is refilled one by one would mix further, but could only be restored with its texts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.documents import Document, Documents
from rope_patch.finetuning.rows import Batch, Facts, RowSettings, lay_out, seeded
from rope_patch.finetuning.tokens import Encoder

_TOGETHER = 16  # texts that a fast tokenizer reads on all cores at once


@dataclass(frozen=True)
class _Place:
    """Where a stream is.

    Attributes:
        step: the next one.
        epoch: passes over the text that are over.
        block: blocks of documents of this pass that are over.
        document: documents of this block that are over, in the order of the block.
        pair: pairs of this document that are over.
    """

    step: int = 0
    epoch: int = 0
    block: int = 0
    document: int = 0
    pair: int = 0


@dataclass
class _Tally:
    """What was read in the first pass; in later ones it is the same again."""

    documents: int = 0
    short_documents: int = 0
    tokens: int = 0
    longest: int = 0
    pieces: int = 0
    pairs: int = 0
    full_pairs: int = 0

    def add_document(self, tokens: int) -> None:
        if tokens < 2:
            self.short_documents += 1
        else:
            self.documents += 1
            self.tokens += tokens
            self.longest = max(self.longest, tokens)

    def add_piece(self, pairs: int, length: int) -> None:
        self.pieces += 1
        self.pairs += pairs
        self.full_pairs += pairs if pairs == length else 0


class StreamedRows:
    """Rows of one document after another, over endless passes.

    A document that a packed row cuts goes on in the next one; in the padded layout the pieces of a document are
    consecutive rows.

    Attributes:
        settings: of the rows.
        shuffle_buffer: documents that are shuffled among one another, and held in memory; 1 keeps their order.

    Args:
        documents: in the order of their source.
        tokenizer, vocab_size: see `Encoder`.
    """

    def __init__(
        self,
        documents: Documents,
        tokenizer: Any,
        settings: RowSettings,
        vocab_size: int | None = None,
        shuffle_buffer: int = 1000,
    ) -> None:
        """Nothing is read yet.

        Raises:
            EvaluationError: `shuffle_buffer` is below 1.
        """
        if shuffle_buffer < 1:
            raise EvaluationError(f"shuffle_buffer={shuffle_buffer} is not allowed; it must be at least 1")
        self.settings = settings
        self.shuffle_buffer = shuffle_buffer
        self._documents = documents
        self._encode = Encoder(tokenizer, vocab_size, settings.end_of_text)
        self._go_to(_Place(), _Tally(), first_pass_over=False)

    def _go_to(self, place: _Place, tally: _Tally, first_pass_over: bool) -> None:
        self._place, self._tally, self._first_pass_over = place, tally, first_pass_over
        self._coming = self._read(place)
        self._tokens: torch.Tensor | None = None  # of the document at the place, once it is begun

    @property
    def facts(self) -> Facts:
        """What was read so far, over at most one pass."""
        tally = self._tally
        return Facts(
            documents=tally.documents,
            short_documents=tally.short_documents,
            tokens=tally.tokens,
            longest=tally.longest,
            pieces=tally.pieces,
            full_share=tally.full_pairs / max(1, tally.pairs),
            complete=self._first_pass_over,
        )

    @property
    def steps_per_epoch(self) -> None:
        """Nobody knows how long a stream is."""
        return

    def batch(self, step: int) -> Batch:
        """The rows of the next step.

        Raises:
            CorpusError: the source holds something else than documents.
            EvaluationError: another step than the next is asked for; tokenizer and model do not belong together; or
                the first pass is over and no document filled a row.
        """
        if step != self._place.step:
            raise EvaluationError(
                f"step {step} of a stream that is at step {self._place.step}: its steps come one after another; "
                "load_state_dict goes on where a state was saved"
            )
        rows = [self._row() for _ in range(self.settings.batch_size)]
        self._place = dataclasses.replace(self._place, step=step + 1)
        return lay_out(rows, self.settings, step * self.settings.batch_size)

    def _row(self) -> list[torch.Tensor]:
        pieces = [self._piece(self.settings.length)]
        room = self.settings.length - (len(pieces[0]) - 1)
        while room and self.settings.layout == "packed":
            pieces.append(self._piece(room))
            room -= len(pieces[-1]) - 1
        return pieces

    def _piece(self, most: int) -> torch.Tensor:
        """At most so many pairs of the document at the place, which moves on by them."""
        if self._tokens is None:
            self._begin_document()
        assert self._tokens is not None  # for the type checker
        begin = self._place.pair
        piece = self._tokens[begin : begin + most + 1]
        end = begin + len(piece) - 1
        if not self._place.epoch:
            self._tally.add_piece(len(piece) - 1, self.settings.length)
        if end < len(self._tokens) - 1:
            self._place = dataclasses.replace(self._place, pair=end)
        else:
            self._place = dataclasses.replace(self._place, document=self._place.document + 1, pair=0)
            self._tokens = None
        return piece

    def _begin_document(self) -> None:
        """The next document that has a pair, or at the start after a restoration the one that was begun before."""
        begun = self._place.pair > 0
        for place, tokens in self._coming:
            if not place.epoch and not begun:
                self._tally.add_document(len(tokens))
            if len(tokens) > 1:
                self._place = dataclasses.replace(place, step=self._place.step, pair=self._place.pair)
                self._tokens = tokens
                return

    def _read(self, place: _Place) -> Iterator[tuple[_Place, torch.Tensor]]:
        """The documents from a place on, each with its own place, without an end."""
        epoch, block, document = place.epoch, place.block, place.document
        while True:
            documents = self._documents.starting_at(block * self.shuffle_buffer)
            while some := list(islice(documents, self.shuffle_buffer)):
                random = seeded(self.settings.seed, "block", epoch, block)
                order = torch.randperm(len(some), generator=random).tolist()
                for tokens in self._encoded([some[index] for index in order[document:]]):
                    yield _Place(epoch=epoch, block=block, document=document), tokens
                    document += 1
                block, document = block + 1, 0
            if not epoch:
                self._end_first_pass()
            epoch, block = epoch + 1, 0

    def _encoded(self, documents: list[Document]) -> Iterator[torch.Tensor]:
        for start in range(0, len(documents), _TOGETHER):
            some = documents[start : start + _TOGETHER]
            yield from self._encode([row["name"] for row in some], [row["text"] for row in some])

    def _end_first_pass(self) -> None:
        tally = self._tally
        if not tally.documents:
            raise EvaluationError(
                f"there is nothing to predict: none of {tally.short_documents} documents has two tokens"
            )
        self.settings.check_long_enough(tally.documents, tally.longest)
        self._first_pass_over = True

    def state_dict(self) -> dict[str, Any]:
        """The place and the facts: some numbers."""
        return {
            "rows": self._identity,
            "place": dataclasses.asdict(self._place),
            "tally": dataclasses.asdict(self._tally),
            "first_pass_over": self._first_pass_over,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken: documents that were over are passed over without being tokenised.

        Raises:
            EvaluationError: the state belongs to another source or to other settings.
        """
        if state.get("rows") != self._identity:
            raise EvaluationError(
                f"the saved state belongs to other rows: {state.get('rows')}, and these are {self._identity}"
            )
        self._go_to(_Place(**state["place"]), _Tally(**state["tally"]), state["first_pass_over"])

    @property
    def _identity(self) -> str:
        settings = self.settings
        return (
            f"{self._documents.source!r}, length={settings.length}, batch_size={settings.batch_size}, "
            f"layout={settings.layout}, seed={settings.seed}, end_of_text={settings.end_of_text}, "
            f"positions={settings.positions}, shuffle_buffer={self.shuffle_buffer}, "
            f"on_bad_line={self._documents.on_bad_line}"
        )
