"""Texts to measure and to train on: the running Python's own source, local files and folders, named datasets.

`read_documents` reads them one after another; a corpus to measure on is a `datasets.Dataset` with one row per document
and the columns `name` and `text`.
"""

from __future__ import annotations

import glob
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from datasets import Dataset

from rope_patch.errors import CorpusError
from rope_patch.evaluation.documents import (
    DATA_SUFFIXES,
    TEXT_SUFFIXES,
    Documents,
    from_dataset,
    from_files,
    from_rows,
)

HELD_OUT_MODULES = (
    "argparse",
    "configparser",
    "difflib",
    "doctest",
    "ipaddress",
    "mailbox",
    "pdb",
    "pickle",
    "statistics",
    "subprocess",
    "tarfile",
    "typing",
)
"""Modules of the standard library that `recipes/pretrain_tiny.py` never trains on."""

_TEST = re.compile(r"(?<![A-Za-z0-9])test(?![A-Za-z0-9])")
"""By such a word in the name of a data file `datasets` knows the test split of a folder."""

_NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


def standard_library(split: str = "held_out") -> Dataset:
    """The source of the running Python's standard library, one row per module.

    Tests, third-party packages and generated tables are left out. The text needs no download and is
    there on every machine that can run this project, although its content follows the version of Python.

    Args:
        split: `"held_out"` for the modules named in `HELD_OUT_MODULES`, `"train"` for all others.

    Returns:
        A dataset with the columns `name` (dotted module name) and `text`.

    Raises:
        CorpusError: on any other split.
    """
    if split not in ("train", "held_out"):
        raise CorpusError(f"split {split!r} of the standard library: allowed are 'train' and 'held_out'")
    modules = sorted(
        (name, path) for name, path in _standard_library_files() if (name in HELD_OUT_MODULES) == (split == "held_out")
    )
    return Dataset.from_dict(
        {
            "name": [name for name, _ in modules],
            "text": [path.read_text(encoding="utf-8", errors="replace") for _, path in modules],
        }
    )


def _standard_library_files() -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        generated = any(part.startswith(("config-", "_sysconfigdata")) for part in parts)
        if not generated and _NOT_SOURCE.isdisjoint(parts):
            yield ".".join(parts).removesuffix(".py").removesuffix(".__init__"), path


def read_documents(
    source: str = "stdlib",
    *,
    split: str | None = None,
    column: str = "text",
    config: str | None = None,
    streaming: bool = False,
    on_bad_line: str = "stop",
) -> Documents:
    """Documents one after another, each a dictionary of `name` and `text`.

    Args:
        source: `"stdlib"` (the modules of the standard library); the path of a file or of a folder, or a pattern with
            `*`; or else a name or path that `datasets.load_dataset` understands. A `.jsonl` or `.json` file holds one
            JSON object per line, a `.parquet` file one row per document, any other file is one document. Of a folder
            every `.txt`, `.md`, `.rst` and `.py` file below it is read, or, where there is none beside a README.md,
            every `.jsonl` and `.parquet`, or else `.json` file.
        split: of the standard library, of a dataset, or of a folder that `datasets` divides by the names of its data
            files. Default `"train"`; a folder is read whole.
        column: that holds the text, wherever there are columns.
        config: of a dataset.
        streaming: read a named dataset while it is downloaded; files are always read as they are needed.
        on_bad_line: `"stop"` raises on a record that is no document, `"skip"` leaves it out and counts it: see
            `Documents.bad_records`.

    Raises:
        CorpusError: nothing can be read there. What is wrong with a single record shows when it is reached.
    """
    if source == "stdlib":
        modules = standard_library(split or "train")
        return from_rows("stdlib", modules.to_list())
    path = Path(source)
    if path.is_file():
        return from_files(source, [path], path.parent, column, on_bad_line)
    if path.is_dir():
        files = _files_below(path)
        if files and (split is None or files[0].suffix not in DATA_SUFFIXES):
            return from_files(source, files, path, column, on_bad_line)
    elif glob.has_magic(source):
        files = [Path(match) for match in sorted(glob.glob(source, recursive=True)) if Path(match).is_file()]
        if not files:
            raise CorpusError(f"no file matches {source!r}")
        return from_files(source, files, Path(files[0].anchor), column, on_bad_line)
    elif path.suffix in TEXT_SUFFIXES | DATA_SUFFIXES:
        raise CorpusError(f"there is no file {source!r}")
    return from_dataset(source, config, split or "train", column, streaming, on_bad_line)


def load_corpus(source: str = "stdlib", *, split: str | None = None, column: str = "text") -> Dataset:
    """All documents of a source at once.

    Args:
        source: see `read_documents`.
        split: the split to read; defaults to `"held_out"` for the standard library and to `"test"` for a dataset.
        column: the column that holds the text, wherever there are columns.

    Returns:
        A dataset with the columns `name` and `text`.

    Raises:
        CorpusError: when nothing can be read there, a record is no document, or there is no such column.
    """
    if source == "stdlib":
        return standard_library(split or "held_out")
    if split is None and not _is_read_whole(source):
        split = "test"
    rows = list(read_documents(source, split=split, column=column))
    return Dataset.from_dict({"name": [row["name"] for row in rows], "text": [row["text"] for row in rows]})


def text_or_dataset(
    text: str | None, dataset: str | None, *, split: str | None = None, column: str = "text"
) -> Dataset:
    """All documents of the one that is given, or of the held-out modules of the standard library.

    Args:
        text: a file, a folder of files, or a pattern.
        dataset: a name or a folder that `datasets` knows.
        split, column: see `load_corpus`.

    Raises:
        CorpusError: there is no such text; and see `load_corpus`.
    """
    if text is not None and not (glob.has_magic(text) or Path(text).exists()):
        raise CorpusError(f"there is no text file or folder {text!r}")
    return load_corpus(text or dataset or "stdlib", split=split, column=column)


def _files_below(folder: Path) -> list[Path]:
    """The files of a folder that hold its text, of the first kind of which there are any."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    data = [file for file in files if file.suffix in DATA_SUFFIXES - {".json"}]
    texts = [file for file in files if file.suffix in TEXT_SUFFIXES]
    # a README.md beside data files is the card of a dataset
    if data and all(file.name == "README.md" for file in texts):
        texts = []
    return texts or data or [file for file in files if file.suffix == ".json"]


def _is_read_whole(source: str) -> bool:
    """Whether a source has no splits: a file, a pattern, or a folder none of whose data files is named for a test."""
    path = Path(source)
    if not path.is_dir():
        return path.is_file() or glob.has_magic(source)
    files = _files_below(path)
    data = [str(file.relative_to(path)) for file in files if file.suffix in DATA_SUFFIXES]
    return bool(files) and not any(_TEST.search(name) for name in data)
