"""Scores of an incomplete row: a stopped run keeps the scores of contexts that take minutes each."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rope_patch.json_files import read_object, read_rows

WORTH = 20.0
"""The time in seconds from which the scores of a context are kept; a faster context is measured again."""


class Unfinished:
    """A file beside the rows with the losses of single contexts, until their row is written.

    Attributes:
        recalled: the number of scores that came from the file.

    Args:
        rows: path of the rows; the file has the same name with the suffix `.unfinished.jsonl`.

    Raises:
        EvaluationError: the file does not hold losses.
    """

    def __init__(self, rows: Path) -> None:
        self.path = rows.with_suffix(".unfinished.jsonl")
        content = self.path.read_bytes() if self.path.is_file() else b""
        lines, size = read_rows(self.path, content, read_object)
        if size < len(content):
            with self.path.open("ab") as file:
                file.truncate(size)
        self.recalled = 0
        self._lines = {(line["key"], line["item"]): line for line in lines}

    def scored(self, key: str, item: int, compute: Callable[[], Any]) -> Any:
        """The score of the context with this number in the row with this key: the kept losses, float64, `(targets,)`,
        or the result of `compute`, which is kept if it is such a tensor and took long.
        """
        if (line := self._lines.get((key, item))) is not None:
            self.recalled += 1
            return torch.tensor(line["losses"], dtype=torch.float64)
        began = time.perf_counter()
        score = compute()
        if isinstance(score, torch.Tensor) and score.ndim == 1 and time.perf_counter() - began >= WORTH:
            line = {"key": key, "item": item, "losses": score.double().tolist()}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            self._lines[key, item] = line
        return score

    def forget(self, key: str) -> None:
        """Delete the contexts of a row that is written; after the last one, delete the file."""
        left = {place: line for place, line in self._lines.items() if place[0] != key}
        if len(left) == len(self._lines):
            return
        self._lines = left
        if not left:
            self.path.unlink()
            return
        aside = self.path.with_suffix(".tmp")
        aside.write_text("".join(json.dumps(line) + "\n" for line in left.values()), encoding="utf-8")
        aside.replace(self.path)
