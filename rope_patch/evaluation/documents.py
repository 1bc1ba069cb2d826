"""Documents one after another, from files and from `datasets`, as often as they are wanted.

Nothing is held in memory but the document at hand, so that a corpus may be larger than the machine. A record that is
no document (a broken line, a missing column) either stops the reading or is left out and counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from datasets import load_dataset

from rope_patch.errors import CorpusError

TEXT_SUFFIXES = {".txt", ".md", ".py", ".rst"}
"""Files of a folder that are one document each."""

LINES_SUFFIXES = {".jsonl", ".json"}
"""Files that hold one JSON object per line."""

DATA_SUFFIXES = {*LINES_SUFFIXES, ".parquet"}
"""Files that hold many documents, each in a column of a record."""

Document = dict[str, str]
"""A `name`, which says where the document comes from, and its `text`."""

_SHOWN = 5


class _BadRecord(ValueError):
    """Why a record is no document."""


@dataclass(frozen=True)
class _Record:
    """A document that is not read yet: to pass over it costs next to nothing.

    Attributes:
        place: where it is, for people.
        read: the document.
    """

    place: str
    read: Callable[[], Document]


@dataclass(frozen=True)
class BadRecords:
    """What was left out so far.

    Attributes:
        count: how many records.
        first: the places of the first few, with the reasons.
    """

    count: int
    first: tuple[str, ...]

    def __str__(self) -> str:
        """A line for the report of a run."""
        if not self.count:
            return "every record could be read"
        more = ", ..." if self.count > len(self.first) else ""
        return f"{self.count} records were left out: {'; '.join(self.first)}{more}"


class Documents(Iterable[Document]):
    """Documents in the order of their source; every iteration starts from the beginning.

    Attributes:
        source: where they come from, for people.
        on_bad_line: `"stop"` raises on the first record that is no document, `"skip"` leaves it out and counts it.

    Args:
        records: given how many to pass over, begins an iteration after them; anew at every call.
    """

    def __init__(self, source: str, records: Callable[[int], Iterator[_Record]], on_bad_line: str = "stop") -> None:
        if on_bad_line not in ("stop", "skip"):
            raise CorpusError(f"on_bad_line={on_bad_line!r} is not allowed; it must be 'stop' or 'skip'")
        self.source = source
        self.on_bad_line = on_bad_line
        self._records = records
        self._bad: dict[str, str] = {}

    def __iter__(self) -> Iterator[Document]:
        """The documents.

        Raises:
            CorpusError: a record is no document, or there was not a single text.
        """
        return self.starting_at(0)

    def starting_at(self, first: int) -> Iterator[Document]:
        """The documents without the first so many, which are passed over unread where every record is a document.

        Raises:
            CorpusError: as for the iteration from the start.
        """
        # where bad records are left out, only reading tells how many documents a stretch of records holds
        unread = first if self.on_bad_line == "stop" else 0
        return islice(self._read(unread), first - unread, None)

    def _read(self, skip: int) -> Iterator[Document]:
        count, any_text = 0, False
        for record in self._records(skip):
            try:
                document = record.read()
            except _BadRecord as error:
                if self.on_bad_line == "stop":
                    raise CorpusError(
                        f"{record.place}: {error}; on_bad_line='skip' leaves such records out and counts them"
                    ) from error
                self._bad.setdefault(record.place, str(error))
                continue
            count, any_text = count + 1, any_text or bool(document["text"])
            yield document
        if not any_text and not skip:
            left_out = f"; {self.bad_records}" if self._bad else ""
            raise CorpusError(f"there is no text in {self.source!r}: {count} documents, all empty{left_out}")

    @property
    def bad_records(self) -> BadRecords:
        """What was left out since the object was made; a record that is met again in a later pass counts once."""
        shown = tuple(f"{place}: {reason}" for place, reason in islice(self._bad.items(), _SHOWN))
        return BadRecords(len(self._bad), shown)


def from_rows(source: str, rows: Sequence[Document]) -> Documents:
    """Documents that are in memory."""
    return Documents(source, lambda skip: (_Record(row["name"], _giver(row)) for row in islice(rows, skip, None)))


def from_files(source: str, files: list[Path], root: Path, column: str, on_bad_line: str) -> Documents:
    """Documents of files: each line of a JSON file, each row of a Parquet file, any other file as a whole.

    Args:
        source: for messages.
        files: in the order in which they are read.
        root: folder that names are relative to.
        column: that holds the text of a record.
        on_bad_line: see `Documents`.
    """

    def records(skip: int) -> Iterator[_Record]:
        each = (_records_of_file(file, str(file.relative_to(root)), column) for file in files)
        return islice(chain.from_iterable(each), skip, None)

    return Documents(source, records, on_bad_line)


def from_dataset(
    source: str, config: str | None, split: str, column: str, streaming: bool, on_bad_line: str
) -> Documents:
    """Documents of a dataset that `datasets.load_dataset` knows.

    Args:
        source: its name, or its folder.
        config: its configuration; None for the only one.
        split: the split to read.
        column: that holds the text.
        streaming: whether to read it as it comes instead of loading it first.
        on_bad_line: see `Documents`.

    Raises:
        CorpusError: there is no such dataset, split or column.
    """
    try:
        dataset = load_dataset(source, config, split=split, streaming=streaming)
        columns = dataset.column_names or list(next(iter(dataset), {}))  # a stream may learn them from its first row
    except Exception as error:  # `datasets` raises many unrelated types; all mean that there is no text to be had
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CorpusError(
            f"no text at {source!r}: it is not 'stdlib', a text file, a folder with "
            f"{', '.join(sorted(TEXT_SUFFIXES | DATA_SUFFIXES))} files, nor a dataset with a split {split!r} ({reason})"
        ) from error
    if columns and column not in columns:
        raise CorpusError(f"dataset {source!r} has no column {column!r}; it has {', '.join(columns)}")
    dataset = dataset.select_columns([name for name in (column, "name") if name in columns])  # pictures stay encoded

    def records(skip: int) -> Iterator[_Record]:
        for index, row in enumerate(dataset.skip(skip), start=skip):
            place = f"{split}[{index}]"
            yield _Record(f"{source} {place}", _reader(row, column, place))

    return Documents(source, records, on_bad_line)


def _records_of_file(file: Path, name: str, column: str) -> Iterator[_Record]:
    if file.suffix in LINES_SUFFIXES:
        return _records_of_lines(file, name, column)
    if file.suffix == ".parquet":
        return _records_of_parquet(file, name, column)
    return iter([_Record(str(file), lambda: {"name": name, "text": _decoded(_bytes_of(file))})])


def _records_of_lines(file: Path, name: str, column: str) -> Iterator[_Record]:
    try:
        with file.open("rb") as lines:  # as bytes: a text file would also break lines at U+2028 and the like
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _Record(f"{file}, line {number}", _line_reader(line, column, f"{name}:{number}"))
    except OSError as error:
        raise CorpusError(f"cannot read {file}: {error}") from error


def _records_of_parquet(file: Path, name: str, column: str) -> Iterator[_Record]:
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            columns = table.schema_arrow.names
            if column not in columns:
                raise CorpusError(f"{file} has no column {column!r}; it has {', '.join(columns)}")
            wanted = [column, "name"] if "name" in columns else [column]
            rows = chain.from_iterable(batch.to_pylist() for batch in table.iter_batches(256, columns=wanted))
            for number, row in enumerate(rows, start=1):
                yield _Record(f"{file}, row {number}", _reader(row, column, f"{name}:{number}"))
    except (OSError, pyarrow.ArrowException) as error:
        raise CorpusError(f"cannot read {file}: {error}") from error


def _giver(document: Document) -> Callable[[], Document]:
    return lambda: document


def _reader(row: Any, column: str, name: str) -> Callable[[], Document]:
    return lambda: _document(row, column, name)


def _line_reader(line: bytes, column: str, name: str) -> Callable[[], Document]:
    return lambda: _document(_parsed(line), column, name)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(_decoded(line))
    except (json.JSONDecodeError, RecursionError) as error:
        raise _BadRecord(f"not JSON ({error})") from error


def _document(row: Any, column: str, name: str) -> Document:
    if not isinstance(row, dict):
        raise _BadRecord(f"{type(row).__name__}, where an object with a column {column!r} is expected")
    if column not in row:
        raise _BadRecord(f"there is no column {column!r}; there is {', '.join(map(repr, row)) or 'none'}")
    text = row[column]
    if not isinstance(text, str):
        raise _BadRecord(f"column {column!r} holds {type(text).__name__}, not text")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, and no tokenizer can read it
            raise _BadRecord(f"column {column!r} is not Unicode ({error.reason})") from error
    return {"name": str(row.get("name") or name), "text": text}


def _bytes_of(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise CorpusError(f"cannot read {file}: {error}") from error


def _decoded(data: bytes) -> str:
    try:
        # as `open` would do, every kind of line end becomes one
        return data.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        lines_before = data.count(b"\n", 0, error.start)
        line = f" in line {lines_before + 1}" if lines_before else ""
        raise _BadRecord(f"not UTF-8 ({error.reason} at byte {error.start}{line})") from error
