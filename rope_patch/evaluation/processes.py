"""Measure with several processes, started by `torchrun` or `accelerate launch`; the rows equal those of one process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn
from torch.distributed import fsdp
from tqdm import tqdm

from rope_patch.models.head import find_language_model

Item = TypeVar("Item")
Result = TypeVar("Result")

_later = ContextVar("later", default=0)  # number of similar measurements that follow, see `in_turn`


def joined(cpu: bool = False) -> PartialState:
    """The state of this process; the first call decides whether processes compute on the CPU."""
    return PartialState(cpu=cpu or not torch.accelerator.is_available())


def on_main(action: Callable[[], Result]) -> Result:
    """Run `action()` on the main process, and return its result on every process."""
    return broadcast_object_list([action() if joined().is_main_process else None])[0]


class Progress:
    """The elapsed time of a measurement, and an estimate of the remaining time.

        seconds of a context of l tokens = a l + b l^2,    a, b >= 0

    by least squares over the contexts so far. While all have the same length, a / b is the ratio of multiplications in
    a Llama of width d: for each token and layer 12 d^2 for its weights, l d in its causal attention.

    The main process shows a bar on a terminal, and elsewhere a line per finished row. If stderr was replaced, as in a
    notebook, it shows nothing.

    Args:
        rows: the lengths of the contexts that each row reads.
    """

    def __init__(self, model: nn.Module, rows: Sequence[Sequence[int]]) -> None:
        width = find_language_model(model).config.get_text_config().hidden_size
        self._even = 12 * width  # tokens at which both parts cost the same
        self._at_once = 1 if _spread(model) else joined().num_processes
        self._rows = np.array([self._cost(row) for row in rows])
        self._products, self._sums, self._longest = np.zeros((2, 2)), np.zeros(2), 0
        self._number, self._name, self._measured = 0, "", False
        self._left = self._after(0)
        self._began = self._clock = time.perf_counter()
        main = joined().is_main_process
        self._bar = tqdm(
            bar_format="{desc}{percentage:3.0f}%|{bar}| {elapsed}<{remaining}",
            disable=None if main else True,  # None: tqdm shows the bar only on a terminal
            dynamic_ncols=True,
            leave=False,
            miniters=0,
            smoothing=0,
        )
        self._lines = main and self._bar.disable and sys.stderr is sys.__stderr__

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._finish()
        self._bar.close()

    def begin(self, name: str) -> None:
        """Finish the previous row and begin the next."""
        self._finish()
        self._left, self._name, self._measured = self._after(self._number), name, False
        self._number += 1
        self._clock = time.perf_counter()
        self._bar.set_description(name, refresh=False)

    def update(self, lengths: Sequence[int]) -> None:
        """Record that this process has read a batch of contexts of the row."""
        now, read = time.perf_counter(), self._at_once * self._cost(lengths)
        self._products += np.outer(read, read)
        self._sums += read * (now - self._clock)
        self._left = self._left - read
        self._longest, self._measured, self._clock = max(self._longest, *lengths), True, now
        # the bar counts seconds, so that its own estimate is ours
        self._bar.total = now - self._began + self.guess()
        self._bar.update(now - self._began - self._bar.n)

    def guess(self) -> float:
        """Estimate of the remaining seconds."""
        ratio = (self._longest / 100) ** 2 * np.array([[1, -1], [-1, 1]])  # a prior for a / b while lengths are equal
        seconds = np.linalg.solve(self._products + ratio, self._sums)
        if seconds.min() < 0:
            seconds = np.where(seconds > 0, self._sums / self._products.diagonal(), 0)
        return float(np.maximum(self._left, 0) @ seconds)

    def _cost(self, lengths: Sequence[int]) -> np.ndarray:
        """The linear and the quadratic part, `(2,)`."""
        tokens = np.array(lengths, dtype=float)
        return np.array([tokens.sum(), (tokens**2).sum() / self._even])

    def _after(self, number: int) -> np.ndarray:
        """The remaining cost after `number` rows, `(2,)`."""
        return self._rows[number:].sum(0) + _later.get() * self._rows.sum(0)

    def _finish(self) -> None:
        self._left = self._after(self._number)
        if self._lines and self._measured:
            elapsed, left = map(tqdm.format_interval, (time.perf_counter() - self._began, self.guess()))
            place = f"{self._number} of {len(self._rows)}"
            print(f"{place}: {self._name}; {elapsed} elapsed, about {left} left", file=sys.stderr, flush=True)


def in_turn(items: Collection[Item]) -> Iterator[Item]:
    """Yield each item for a measurement; `Progress` adds the same time for each remaining item."""
    before = _later.get()
    try:
        for left, item in zip(reversed(range(len(items))), items, strict=True):
            _later.set(left)
            yield item
    finally:
        _later.set(before)


def over_processes(function: Callable[[Item], Result], items: Sequence[Item], model: nn.Module) -> list[Result]:
    """`[function(item) for item in items]`, with the items divided over the processes.

    If FSDP2 shards the weights of the model, all processes must make the same calls, so each works on all items.
    """
    spread = _spread(model)
    if spread is None:
        with joined().split_between_processes(list(items)) as share:
            return gather_object([function(item) for item in share])
    # a layer gathers its weights in its forward; embedding and head belong to the outermost module, whose own forward
    # does not run if the stack is called without the head
    spread._get_fsdp_state()._lazy_init()  # the first call makes this module the root, not a layer
    results = []
    for item in items:
        spread.unshard()
        results.append(function(item))
    spread.reshard()
    return results


def _spread(model: nn.Module) -> Any:
    """The outermost module whose weights FSDP2 shards over processes."""
    return next((module for module in model.modules() if isinstance(module, fsdp.FSDPModule)), None)
