"""The progress of a measurement, with an estimate of the time left."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Sequence
from typing import Any

from torch import nn
from tqdm import tqdm

from rope_patch.evaluation.processes import joined, sharded
from rope_patch.evaluation.row import Row
from rope_patch.models.head import find_language_model


class Progress:
    """A tqdm whose unit is the cost of a context, so that its estimate of the remaining time fits every length.

        cost of l tokens = l + l^2 / (12 d)

    is proportional to the multiplications in a Llama of width d: for each token and layer 12 d^2 with the weights, and
    l d in causal attention.

    The main process shows a bar on a terminal, and elsewhere a line per finished cell. If stderr was replaced, as in a
    notebook, it shows nothing.

    Args:
        cells: the lengths of the contexts that each cell reads.
        ahead: the number of similar measurements that follow.
    """

    def __init__(self, model: nn.Module, cells: Sequence[Sequence[int]], ahead: int = 0) -> None:
        self._even = 12 * find_language_model(model).config.get_text_config().hidden_size
        self._costs = [sum(map(self._cost, sizes)) for sizes in cells]
        self._at_once = 1 if sharded(model) else joined().num_processes
        self._number, self._name = 0, ""
        main, terminal = joined().is_main_process, sys.stderr.isatty()
        self._lines = main and not terminal and sys.stderr is sys.__stderr__
        self._bar: Any = tqdm(
            total=(1 + ahead) * sum(self._costs),
            bar_format="{desc}{percentage:3.0f}%|{bar}| {elapsed}<{remaining}",
            file=sys.stderr if main and terminal else io.StringIO(),
            disable=False,  # also without a bar it measures the time
            dynamic_ncols=True,
            leave=False,
            smoothing=0,
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def begin(self, name: str) -> None:
        """Begin the next cell."""
        self._number, self._name = self._number + 1, name
        self._bar.set_description(name, refresh=False)

    def skip(self) -> None:
        """Skip the cell, because an earlier run has measured it."""
        self._bar.total -= self._costs[self._number - 1]

    def update(self, size: int) -> None:
        """Count a context of the cell that this process has read."""
        self._bar.update(min(self._at_once * self._cost(size), self._bar.total - self._bar.n))

    def found(self, rows: Sequence[Row]) -> None:
        """Print the results of the cell: its losses, or its shares of correct answers."""
        if self._lines:
            found = (f"loss {row.loss:.3f}" if math.isnan(row.share) else f"{row.share:.0%} right" for row in rows)
            elapsed, left = map(tqdm.format_interval, (self._bar.format_dict["elapsed"], self.left()))
            told = f"{self._number} of {len(self._costs)}: {self._name}: {', '.join(dict.fromkeys(found))}"
            print(f"{told}; {elapsed} elapsed, about {left} left", file=sys.stderr, flush=True)

    def left(self) -> float:
        """Estimate the remaining time in seconds."""
        done = self._bar.n
        return max(0.0, self._bar.total - done) * self._bar.format_dict["elapsed"] / done if done else 0.0

    def _cost(self, size: int) -> float:
        return size + size**2 / self._even
