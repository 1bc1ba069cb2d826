"""Load texts as a `datasets.Dataset` with one row per document and the columns `name` and `text`."""

from __future__ import annotations

import glob
import os
import sysconfig
from pathlib import Path
from typing import Any

from datasets import Dataset, concatenate_datasets, get_dataset_split_names, load_dataset

from rope_patch.errors import CorpusError, counted

HELD_OUT_MODULES = {
    *("argparse", "configparser", "difflib", "doctest", "ipaddress", "mailbox"),
    *("pdb", "pickle", "statistics", "subprocess", "tarfile", "typing"),
}
"""Modules of the standard library that the recipes never train on."""

TEXT_SUFFIXES = (".txt", ".md", ".py", ".rst")  # each file is one document
BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}  # each record is one document

_NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


def load_corpus(split: str = "held_out") -> Dataset:
    """Load the source of the running Python's standard library, one row per module: the source is available everywhere
    without a download.

    Tests, third-party packages and generated tables are excluded.

    Args:
        split: `"held_out"` for the modules in `HELD_OUT_MODULES`, `"train"` for all others.

    Raises:
        CorpusError: the split is unknown.
    """
    if split not in ("train", "held_out"):
        raise CorpusError(f"split {split!r} of the standard library: allowed are 'train' and 'held_out'")
    root, modules = Path(sysconfig.get_path("stdlib")), {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        name = ".".join(parts).removesuffix(".py").removesuffix(".__init__")
        generated = any(part.startswith(("config-", "_sysconfigdata")) for part in parts)
        if not generated and _NOT_SOURCE.isdisjoint(parts) and (name in HELD_OUT_MODULES) == (split == "held_out"):
            modules[name] = path
    texts = [modules[name].read_text(encoding="utf-8", errors="replace") for name in sorted(modules)]
    return Dataset.from_dict({"name": sorted(modules), "text": texts})


def load_text(
    text: str | None = None,
    dataset: str | None = None,
    *,
    split: str | None = None,
    column: str = "text",
    streaming: bool = False,
) -> Any:
    """Load the documents of a text or of a dataset; without either, `load_corpus()`.

    Args:
        text: a file, a folder of files, or a pattern. In a folder, every `.txt`, `.md`, `.rst` and `.py` file below it
            is read; if there is none except a README.md, every `.jsonl`, `.json` and `.parquet` file.
        dataset: alternatively, a name or a folder for `datasets.load_dataset`.
        split: split of a dataset; default `test`, or all of a folder without that split.
        column: the column with the text, for data with columns.
        streaming: read a dataset while it is downloaded, as an `IterableDataset`.

    Raises:
        CorpusError: there is no text; the message names the place and the reason.
    """
    if text is not None and dataset is not None:
        raise CorpusError(f"text {text!r} and dataset {dataset!r}: use only one of them")
    if dataset is not None and split is None and Path(dataset).is_dir():
        text = None if "test" in get_dataset_split_names(dataset) else dataset
    if text is not None:
        documents = concatenate_datasets([_from_file(file, name, column) for file, name in _files(text)])
    elif dataset is not None:
        split = split or "test"
        return _from_dataset(dataset, f"split {split!r} of dataset {dataset!r}", split, column, split, streaming)
    else:
        return load_corpus(split or "held_out")
    if not any(documents["text"]):
        raise CorpusError(f"there is no text in {text!r}: {counted(len(documents), 'document')}, all empty")
    return documents


def name_of_text(text: str | None = None, dataset: str | None = None, split: str | None = None) -> str:
    """The name in tables of the documents that `load_text` returns for the same arguments."""
    name = Path(text).name if text else dataset or "Python's standard library"
    return f"{name}, split {split}" if split else name


def _files(text: str) -> list[tuple[Path, str]]:
    """The files of a text, with the names of their documents."""
    path = Path(text)
    if path.is_dir():
        below = sorted(file for file in path.rglob("*") if file.is_file())
        texts = [file for file in below if file.suffix in TEXT_SUFFIXES]
        data = [file for file in below if file.suffix in BUILDERS]
        card = data and all(file.name == "README.md" for file in texts)  # with data files, it describes them
        named = [(file, str(file.relative_to(path))) for file in (data if card else texts)]
    else:
        matches = sorted(glob.glob(text, recursive=True)) if glob.has_magic(text) else [text]
        named = [(Path(match), Path(match).name) for match in matches if Path(match).is_file()]
    if not named:
        raise CorpusError(f"there is no text file at {text!r}")
    return [(file, os.fsencode(name).decode(errors="replace")) for file, name in named]  # any bytes may name a file


def _from_file(file: Path, name: str, column: str) -> Dataset:
    if file.suffix in BUILDERS:
        return _from_dataset(BUILDERS[file.suffix], str(file), "train", column, name, data_files=str(file))
    try:
        return Dataset.from_dict({"name": [name], "text": [file.read_text(encoding="utf-8-sig")]})
    except UnicodeDecodeError as error:
        raise CorpusError(f"{file} is not UTF-8: {error.reason} at byte {error.start}") from error


def _from_dataset(
    dataset: str, place: str, split: str, column: str, name: str, streaming: bool = False, **settings: Any
) -> Any:
    try:
        rows = load_dataset(dataset, split=split, streaming=streaming, **settings)
    except Exception as error:  # many unrelated types, which all mean that the text is unavailable
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise CorpusError(f"cannot read {place}: {reason or type(error).__name__}") from error
    columns = rows.column_names or list(next(iter(rows), {}))  # a stream may need its first row for them
    if column not in columns:
        raise CorpusError(f"{place} has no column {column!r}; it has {', '.join(columns)}")

    def document(row: dict[str, Any], index: int) -> dict[str, str]:
        if not isinstance(row[column], str):
            raise CorpusError(f"{place}, row {index + 1}: {column!r} holds {type(row[column]).__name__}, not text")
        return {"name": str(row.get("name") or f"{name}:{index + 1}"), "text": row[column]}

    return rows.map(document, with_indices=True, remove_columns=columns)
