"""Several processes measure together: each runs a share of the forward passes, and all get all results.

Where `torch.distributed` is initialised, every process has to come here alike, with the same items in the same order;
where it is not, everything here does what it would do alone. Nothing of a result depends on the number of processes.
"""

from __future__ import annotations

import atexit
import os
import pickle
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import distributed, nn

from rope_patch.errors import EvaluationError

Item = TypeVar("Item")
Result = TypeVar("Result")


def join(device: str = "auto") -> None:
    """Join the processes that `torchrun` or `accelerate launch` started, where they did, until this one ends.

    Args:
        device: `cpu`, or `auto` for the accelerator of the local rank where there is one.

    Raises:
        EvaluationError: another device, which all processes would use at once.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or distributed.is_initialized():
        return
    if device not in ("auto", "cpu"):
        raise EvaluationError(f"device {device!r}: of several processes each takes its own, so give auto or cpu")
    from accelerate import PartialState

    # an FSDP config of accelerate sets this; Transformers then leaves the weights of all processes but one empty
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    atexit.register(PartialState(cpu=device == "cpu").destroy_process_group)


def world() -> int:
    """How many processes measure together."""
    return distributed.get_world_size() if _together() else 1


def is_main() -> bool:
    """Whether this process is the one that writes, draws and speaks."""
    return _rank() == 0


def on_main(action: Callable[[], Result]) -> Result:
    """What `action()` gives on the main process, on every process; what it raises there is raised everywhere."""
    if not _together():
        return action()
    outcome: list[Any] = [None, None]
    if is_main():
        try:
            outcome[0] = action()
        except Exception as error:  # the others wait, so they must hear of it whatever it is
            outcome[1] = _portable(error)
    distributed.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def only_main(action: Callable[[], Result]) -> Result | None:
    """What `action()` gives on the main process, None on the others; what it raises there is raised everywhere.

    For what cannot or should not travel, such as an open file.
    """
    kept: list[Result] = []
    on_main(lambda: kept.append(action()))
    return kept[0] if kept else None


def share(items: Sequence[Item], alike: Callable[[Item], Hashable] = lambda _: None) -> list[int]:
    """Which items this process works on, in turn.

    All processes get equally many, and their k-th items are alike: a model whose weights are spread over the processes
    gathers them in lock step. Where items run out, the last is repeated, and `each` drops what it gives again.

    Args:
        items: the same on every process.
        alike: items that need the same number of calls of the model have the same value.
    """
    return [turn[_rank()] for turn in _turns(items, alike)]


def each(
    function: Callable[[Item], Result], items: Sequence[Item], alike: Callable[[Item], Hashable] = lambda _: None
) -> list[Result]:
    """`[function(item) for item in items]`, the items divided over the processes.

    What is raised on one process is raised on all of them, so that none waits for results that will not come.

    Args:
        function: what to do; its results are carried to the other processes.
        items, alike: see `share`.
    """
    if not _together():
        return [function(item) for item in items]
    results: list[Result] = []
    raised: Exception | None = None
    try:
        results = [function(items[index]) for index in share(items, alike)]
    except Exception as error:  # the others wait, so they must hear of it whatever it is
        raised = error
    everyone = _exchange((results, None if raised is None else _portable(raised)))
    if raised is not None:
        raise raised
    for _, elsewhere in everyone:
        if elsewhere is not None:
            raise elsewhere
    return _in_order([results for results, _ in everyone], _turns(items, alike))


def _in_order(shares: Sequence[Sequence[Result]], turns: Sequence[Sequence[int]]) -> list[Result]:
    """The results of all processes, `shares[rank][turn]`, in the order of the items."""
    found = {index: shares[rank][number] for number, turn in enumerate(turns) for rank, index in enumerate(turn)}
    return [found[index] for index in sorted(found)]


@contextmanager
def gathering(model: nn.Module) -> Iterator[Callable[[], object]]:
    """For models whose weights FSDP2 spreads over the processes: a function that gathers those of the outermost module.

    A layer gathers its own weights in its forward; embedding and head belong to the outermost module, whose forward
    does not run where the stack is called apart from the head. Every process has to call the function alike, before
    each use of the stack. Where nothing is spread, it does nothing.
    """
    spread = _outermost_spread(model)
    if spread is None:
        yield lambda: None
        return
    # the first call decides which module is the outermost: here it must not be that of a layer
    spread._get_fsdp_state()._lazy_init()
    try:
        yield lambda: spread.unshard()
    finally:
        spread.reshard()


def _outermost_spread(model: nn.Module) -> Any:
    """The first module of a model that FSDP2 took over, None where there is none."""
    if not _together():
        return None
    from torch.distributed.fsdp import FSDPModule

    return next((module for module in model.modules() if isinstance(module, FSDPModule)), None)


def _turns(items: Sequence[Item], alike: Callable[[Item], Hashable]) -> list[list[int]]:
    """Indices of items, one per process in each turn, all of a turn alike."""
    groups: dict[Hashable, list[int]] = {}
    for index, item in enumerate(items):
        groups.setdefault(alike(item), []).append(index)
    turns = []
    for group in groups.values():
        for start in range(0, len(group), world()):
            turn = group[start : start + world()]
            turns.append(turn + turn[-1:] * (world() - len(turn)))
    return turns


def _exchange(mine: Any) -> list[Any]:
    """What every process brings, by rank."""
    everyone: list[Any] = [None] * world()
    distributed.all_gather_object(everyone, mine)
    return everyone


def own_device() -> torch.device | None:
    """Where this process of several computes; None where it is alone."""
    if not _together():
        return None
    from accelerate import PartialState

    return PartialState().device


def _together() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _rank() -> int:
    return distributed.get_rank() if _together() else 0


def _portable(error: Exception) -> Exception:
    """An exception that another process can raise."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
