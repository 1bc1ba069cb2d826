"""Two processes on gloo, for tests of what several do together.

They are forked from a server that has imported everything heavy, once for all tests.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from typing import Any

import torch

import rope_patch.finetuning.experiment  # noqa: F401  what takes seconds to import

CONTEXT = multiprocessing.get_context("forkserver")


def run_two(function: Callable[..., None], *arguments: Any, seconds: float = 180.0) -> list[int | None]:
    """Run `function(rank, *arguments)` in two processes that can join each other.

    Returns:
        the exit code of each; None for one that hung.
    """
    CONTEXT.set_forkserver_preload([__name__])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    both = [CONTEXT.Process(target=_one, args=(function, rank, port, arguments)) for rank in range(2)]
    for process in both:
        process.start()
    try:
        for process in both:
            process.join(seconds)
        return [process.exitcode for process in both]
    finally:
        for process in both:
            process.kill()


def _one(function: Callable[..., None], rank: int, port: int, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    function(rank, *arguments)
