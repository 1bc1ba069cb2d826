"""What differs while a compiler traces a call: no value is known, and nothing may be remembered."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

import torch

Arguments = ParamSpec("Arguments")


def traced() -> bool:
    """Whether a compiler traces the call, so that values are not known."""
    return torch.compiler.is_compiling()


def eager_only(check: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """A function that looks at values or at the model and returns nothing; a graph leaves it out."""

    @functools.wraps(check)
    def unless_traced(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        if not torch.compiler.is_compiling():
            check(*args, **kwargs)

    return unless_traced


def require(holds: torch.Tensor, error: Exception) -> None:
    """Raise the error unless the boolean scalar `holds`; a graph raises its text as a RuntimeError when it runs."""
    if torch.compiler.is_compiling():
        torch._assert_async(holds, f"rope_patch: {error}")
    elif not holds:
        raise error
