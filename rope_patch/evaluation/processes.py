"""Several processes measure together, as `torchrun` or `accelerate launch` started them: the rows are those of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn
from torch.distributed import fsdp
from tqdm import tqdm

Item = TypeVar("Item")
Result = TypeVar("Result")


def joined(cpu: bool = False) -> PartialState:
    """This process among the others; the first call decides whether they compute on the CPU."""
    return PartialState(cpu=cpu or not torch.accelerator.is_available())


def on_main(action: Callable[[], Result]) -> Result:
    """What `action()` gives on the main process, on every process."""
    return broadcast_object_list([action() if joined().is_main_process else None])[0]


def progress(tokens: int) -> tqdm:
    """A bar over so many tokens, shown by the main process where there is a terminal."""
    hidden = None if joined().is_main_process else True  # None: tqdm looks for a terminal
    return tqdm(total=tokens, unit="token", unit_scale=True, disable=hidden, dynamic_ncols=True, leave=False)


def over_processes(function: Callable[[Item], Result], items: Sequence[Item], model: nn.Module) -> list[Result]:
    """`[function(item) for item in items]`, the items divided over the processes.

    Where FSDP2 spreads the weights of the model, the processes have to call it alike: each then works on all items.
    """
    spread = next((module for module in model.modules() if isinstance(module, fsdp.FSDPModule)), None)
    if spread is None:
        with joined().split_between_processes(list(items)) as share:
            return gather_object([function(item) for item in share])
    # a layer gathers its weights in its forward; embedding and head are those of the outermost module, whose own
    # forward does not run where the stack is called apart from the head
    spread._get_fsdp_state()._lazy_init()  # the first call decides which module is the outermost: not a layer
    results = []
    for item in items:
        spread.unshard()
        results.append(function(item))
    spread.reshard()
    return results
