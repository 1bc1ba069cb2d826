"""Helpers for calls that a compiler traces: values are unknown there, and the code must keep no state."""

from __future__ import annotations

import torch


def traced() -> bool:
    """Whether a compiler traces the call, so that values are not known.

    It stays true behind a break of the graph: Dynamo then runs the caller as it is, but still compiles this frame.
    """
    return torch.compiler.is_compiling()


def require(holds: torch.Tensor, error: type[Exception], message: str) -> None:
    """Raise the error unless the boolean scalar `holds` is true; a graph raises a RuntimeError with the same message
    when it runs.
    """
    if torch.compiler.is_compiling():
        torch._assert_async(holds, f"rope_patch: {message}")
    elif not holds:
        raise error(message)
