"""What an encoding costs: a training step beside that of `rope`, in time and in memory.

Both models take their steps in turn in one process, so that whatever else the machine does slows both. The ratio of
the two times is taken within each repetition; the table shows its median and its quartiles.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rope_patch.errors import RopePatchError
from rope_patch.evaluation.results import provenance
from rope_patch.schemes import get_scheme
from rope_patch.training.comparison import Comparison
from rope_patch.training.loop import make_optimizer, next_token_loss, take_step
from rope_patch.training.records import CostRow, fingerprint, open_costs
from rope_patch.training.runs import Prepared, batch_at, build_patched

COSTS = "costs.jsonl"
YARDSTICK = "rope"
_WARM_UP = 2


def measure_costs(prepared: Prepared, say: Callable[[str], None] = lambda _: None) -> list[CostRow]:
    """Time a training step of every encoding, and sum its memory. Encodings that have a row already are skipped.

    Args:
        prepared: a comparison with its texts and its output.
        say: is told, in a sentence each, what was measured.

    Returns:
        a row per encoding.

    Raises:
        EvaluationError, OSError: see `open_costs`.
    """
    costs = open_costs(prepared.output / COSTS, prepared.settings)
    for spec in prepared.comparison.encodings:
        if costs.find(spec) is None:
            row = _measure(prepared, spec)
            costs.append(row)
            say(f"{spec}: {row.failure or _in_words(row)}")
    return [found for spec in prepared.comparison.encodings if (found := costs.find(spec)) is not None]


def _in_words(row: CostRow) -> str:
    return f"{row.relative_speed:.2f}x the speed of {YARDSTICK}, {row.relative_memory:.2f}x its memory"


def read_costs(folder: Path, settings: dict[str, Any]) -> list[CostRow]:
    """The rows of an earlier measurement; none where there was none."""
    path = folder / COSTS
    return open_costs(path, settings).rows if path.exists() else []


def _measure(prepared: Prepared, spec: str) -> CostRow:
    comparison = prepared.comparison
    shared: dict[str, Any] = {
        "encoding": spec,
        "memory_kind": memory_kind(comparison.device),
        "settings": fingerprint(prepared.settings),
        "device": comparison.device,
        "threads": torch.get_num_threads(),
        **provenance(),
    }
    try:
        yardstick, measured = (_Step(prepared, name) for name in (YARDSTICK, spec))
        for step in range(_WARM_UP):
            yardstick.seconds(step)
            measured.seconds(step)
        steps = range(_WARM_UP, _WARM_UP + comparison.cost_repetitions)
        times = [(yardstick.seconds(step), measured.seconds(step)) for step in steps]
        memory, of_yardstick = measured.memory(), yardstick.memory()
    except (RopePatchError, RuntimeError) as error:
        return CostRow(**shared, **_nothing(f"{type(error).__name__}: {' '.join(str(error).split())}"))
    ratios = [reference / own for reference, own in times]
    lower, median, upper = quartiles(ratios)
    return CostRow(
        **shared,
        failure=None,
        tokens_per_second=comparison.batch_size * comparison.context / statistics.median(own for _, own in times),
        relative_speed=median,
        slowest=lower,
        fastest=upper,
        repetitions=len(times),
        memory_bytes=memory,
        relative_memory=memory / of_yardstick,
    )


class _Step:
    """A model under an encoding that takes training steps."""

    def __init__(self, prepared: Prepared, spec: str) -> None:
        self.comparison: Comparison = prepared.comparison
        self.stream = prepared.data.stream
        self.model, positional = build_patched(self.comparison, get_scheme(spec), seed=0)
        self.optimizer = make_optimizer(self.model, self.comparison.schedule(Path(), 0), positional)

    def seconds(self, step: int) -> float:
        """Take a step; how long it took."""
        batch = batch_at(self.comparison, self.stream, 0, step)
        self._wait()
        began = time.perf_counter()
        take_step(self.model, self.optimizer, lambda _: [next_token_loss(self.model, batch)], step)
        self._wait()
        return time.perf_counter() - began

    def memory(self) -> int:
        """Bytes that a step takes beyond the weights and the state of the optimiser, see `memory_kind`."""
        batch = batch_at(self.comparison, self.stream, 0, 0)
        if not self.comparison.device.startswith("cuda"):
            return saved_bytes(self.model, lambda: next_token_loss(self.model, batch))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        next_token_loss(self.model, batch).backward()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        self.optimizer.zero_grad()
        return peak

    def _wait(self) -> None:
        if self.comparison.device.startswith("cuda"):
            torch.cuda.synchronize()


def memory_kind(device: str) -> str:
    """What the column of memory shows: the CPU's allocator keeps no peak, so there it is what autograd keeps."""
    return "peak allocated" if device.startswith("cuda") else "saved for backward"


def saved_bytes(model: nn.Module, loss: Callable[[], torch.Tensor]) -> int:
    """Bytes that autograd keeps between a forward pass and its backward pass, every storage once, without weights.

    Args:
        model: whose weights do not count.
        loss: runs a forward pass and gives its loss, a scalar.
    """
    kept: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        held = loss()  # while it lives, so does everything that was saved, and no address is used twice
    del held
    return sum(kept.values())


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile; all the same of one value."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, median, upper


def _nothing(failure: str) -> dict[str, Any]:
    numbers = ("tokens_per_second", "relative_speed", "slowest", "fastest", "relative_memory")
    return {"failure": failure, "repetitions": 0, "memory_bytes": 0, **dict.fromkeys(numbers, math.nan)}
