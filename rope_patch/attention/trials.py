"""The trial of a kernel before its first use: it has to run on the device, and to equal the definition on small calls.

Kernels behind PyTorch's attention are called through private functions, which may change; compilers and drivers fail in
many ways. A kernel that fails its trial is not used, and a warning says why, once. An error is tried once more: many
processes compile into one cache, and a compiler may be killed for want of memory. So a verdict is a wrong result, or an
error that comes again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rope_patch.errors import RopePatchWarning

Comparisons = Iterator[tuple[str, torch.Tensor, torch.Tensor]]
"""The results of a kernel, each with its name, its values, and the values that it must equal."""


class Trial:
    """A trial of a kernel on small calls, run once for the same arguments.

    Args:
        name: of the kernel, for the warning.
        compare: runs the calls of some arguments, such as a device, a dtype and a width.
        tolerance: the largest norm of an error, relative to the norm of what is right.
    """

    def __init__(self, name: str, compare: Callable[..., Comparisons], tolerance: float) -> None:
        self.name, self.compare, self.tolerance = name, compare, tolerance
        self._reasons: dict[tuple[Any, ...], str] = {}
        self._told: set[tuple[Any, ...]] = set()

    def __call__(self, *arguments: Any) -> str:
        """The reason why the kernel is not used with these arguments, or an empty string if it was right. Lack of
        memory, and a CUDA graph that is being captured, are no verdict: the next call tries again.
        """
        known = self._reasons.get(arguments)
        if known is not None:
            return known
        reason, lasts = self._tried(*arguments)
        if reason and arguments not in self._told:
            self._told.add(arguments)
            what, again = ", ".join(map(str, arguments)), "" if lasts else "; the next call tries it again"
            warnings.warn(f"{self.name} is not used ({what}): {reason}{again}", RopePatchWarning, stacklevel=2)
        if lasts:
            self._reasons[arguments] = reason
        return reason

    def forget(self) -> None:
        """Forget all reasons."""
        self._reasons.clear()
        self._told.clear()

    def _tried(self, *arguments: Any) -> tuple[str, bool]:
        """The reason, empty without one, and whether a second trial would end the same."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return "it cannot be tried while a CUDA graph is captured: call the model once before", False
        reason = ""
        for _ in range(2):
            try:
                return self._difference(*arguments), True
            except torch.OutOfMemoryError as error:
                return f"there was no memory to try it: {_first_line(error)}", False
            except Exception as error:
                reason = f"it does not run here: {type(error).__name__}: {_first_line(error)}"
        return reason, True

    def _difference(self, *arguments: Any) -> str:
        """The quantity that differed from the definition, and by how much; empty if none did."""
        for what, found, expected in self.compare(*arguments):
            one, other = found.detach().float(), expected.detach().float()
            error = float((one - other).norm() / other.norm())
            if not error < self.tolerance:
                return f"its {what} differed from the definition by {error:.2g} when it was tried"
        return ""


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
