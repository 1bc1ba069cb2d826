"""Processes for tests of what several do together, and of what one leaves that is killed.

They are forked from a server that has imported everything heavy, once for all tests.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

import peft  # noqa: F401  what takes seconds to import
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import distributed

import rope_patch.training.callbacks
import rope_patch.training.checkpoints  # noqa: F401

CONTEXT = multiprocessing.get_context("forkserver")


def run_one(function: Callable[..., None], *arguments: Any, seconds: float = 180.0) -> int | None:
    """The exit code of `function(*arguments)` in a process of its own; None where it hung."""
    return _run([(function, arguments, {})], seconds)[0]


def run_two(function: Callable[..., None], *arguments: Any, seconds: float = 180.0) -> list[int | None]:
    """The exit codes of `function(rank, *arguments)` in two processes that can join each other on gloo."""
    return run_many(2, function, *arguments, seconds=seconds)


def run_many(number: int, function: Callable[..., None], *arguments: Any, seconds: float = 180.0) -> list[int | None]:
    """`run_two` for any number of processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(number)}
    ranks = [place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(number)]
    return _run([(function, (rank, *arguments), environment) for rank, environment in enumerate(ranks)], seconds)


FSDP2 = {  # what `accelerate launch` makes of recipes/configs/accelerate/fsdp2.yaml
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


def shard_on_cpu() -> None:
    """Let accelerate use FSDP2 in this process, which joins the others on gloo. It shards weights on accelerators
    alone, so the CPU presents itself as one.
    """
    os.environ |= FSDP2
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
    distributed.init_process_group("gloo")


def _run(calls: list[tuple[Callable[..., None], tuple[Any, ...], dict[str, str]]], seconds: float) -> list[int | None]:
    CONTEXT.set_forkserver_preload([__name__])
    processes = [CONTEXT.Process(target=_one, args=call) for call in calls]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(seconds)
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()


def _one(function: Callable[..., None], arguments: tuple[Any, ...], environment: Mapping[str, str]) -> None:
    gc.freeze()  # whoever collects garbage need not walk through all that was imported
    torch.set_num_threads(1)  # threads divide a sum in their own way
    os.environ |= environment
    function(*arguments)
