"""Texts to measure on: the running Python's own source, local files and folders, named datasets.

Every corpus is a `datasets.Dataset` with one row per document and the columns `name` and `text`.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from datasets import Dataset, load_dataset

from rope_patch.errors import CorpusError

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

_NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
_TEXT_SUFFIXES = {".txt", ".md", ".py", ".rst"}


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


def load_corpus(source: str = "stdlib", *, split: str | None = None, column: str = "text") -> Dataset:
    """Documents from a name, a file or a folder.

    Args:
        source: `"stdlib"` (the held-out modules of the standard library), the path of a text file (one document) or of
            a folder (every `.txt`, `.md`, `.rst` and `.py` file below it, one document each), or else a name or path
            that `datasets.load_dataset` understands.
        split: the split to read; defaults to `"held_out"` for the standard library and to `"test"` for a dataset.
        column: the column of a dataset that holds the text.

    Returns:
        A dataset with the columns `name` and `text`.

    Raises:
        CorpusError: when nothing can be read there, or the dataset has no such column.
    """
    if source == "stdlib":
        return standard_library(split or "held_out")
    path = Path(source)
    if path.is_file():
        return _from_files([path], root=path.parent)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in _TEXT_SUFFIXES and file.is_file())
        if files:
            return _from_files(files, root=path)
    return _from_hub(source, split or "test", column)


def _from_files(files: list[Path], root: Path) -> Dataset:
    try:
        texts = [file.read_text(encoding="utf-8") for file in files]
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"cannot read the text below {root}: {error}") from error
    return Dataset.from_dict({"name": [str(file.relative_to(root)) for file in files], "text": texts})


def _from_hub(source: str, split: str, column: str) -> Dataset:
    try:
        dataset = load_dataset(source, split=split)
    except Exception as error:  # `datasets` raises many unrelated types; all mean that there is no text to measure on
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CorpusError(
            f"no text at {source!r}: it is not 'stdlib', a text file, a folder with {', '.join(sorted(_TEXT_SUFFIXES))}"
            f" files, nor a dataset with a split {split!r} ({reason})"
        ) from error
    if column not in dataset.column_names:
        raise CorpusError(f"dataset {source!r} has no column {column!r}; it has {', '.join(dataset.column_names)}")
    names = dataset["name"] if "name" in dataset.column_names else [f"{split}[{i}]" for i in range(len(dataset))]
    return Dataset.from_dict({"name": list(map(str, names)), "text": list(dataset[column])})
