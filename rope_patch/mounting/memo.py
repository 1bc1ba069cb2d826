"""What the layers of one stack need alike, and compute once per forward."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class SharedTables(threading.local):
    """Key positions, rotation tables and spans of one stack.

    Each thread has its own, so that several may read one model. The memory lasts from one forward of the stack to the
    next, and only for the very tensor of positions it was computed from. While compiling it is not used: the compiler
    shares equal expressions itself.

    Attributes:
        position_ids: of the forward under way, `(batch or 1, length)`; None before the first.
        memory: what was computed from them.
        scratches: the memory that is overwritten, see `scratch`; of any shape.
    """

    position_ids: torch.Tensor | None = None
    memory: dict[Any, Any] = field(default_factory=dict)
    scratches: dict[Any, torch.Tensor] = field(default_factory=dict)

    def forget(self) -> None:
        """Start a forward."""
        self.position_ids, self.memory = None, {}

    def once(self, position_ids: torch.Tensor, key: Any, compute: Callable[[], Any]) -> Any:
        """`compute()`, or what it returned for this key and these positions before.

        Args:
            position_ids: of this forward, `(batch or 1, length)`.
            key: tells what is computed from what else is.
            compute: called where nothing is known.
        """
        if torch.compiler.is_compiling():
            return compute()
        if self.position_ids is not position_ids:
            self.position_ids, self.memory = position_ids, {}
        if key not in self.memory:
            self.memory[key] = compute()
        return self.memory[key]

    def derived(self, position_ids: torch.Tensor, what: Any, source: Any, compute: Callable[[], Any]) -> Any:
        """`compute()` of what follows from one object, or what it returned for this very object before.

        Args:
            position_ids: of this forward, `(batch or 1, length)`.
            what: tells what is computed.
            source: the object; kept beside what follows from it, so that its identity stays its own.
            compute: called where nothing is known.
        """
        if torch.compiler.is_compiling():
            return compute()  # and the graph is not tied to the object
        return self.once(position_ids, (what, id(source)), lambda: (source, compute()))[1]

    def same(self, position_ids: torch.Tensor, key: Any, value: torch.Tensor) -> torch.Tensor:
        """The tensor that an earlier layer had under this key if it is equal, so that what follows from it is shared.

        Args:
            position_ids: of this forward, `(batch or 1, length)`.
            key: tells what it is.
            value: of this layer, of any shape.
        """
        first = self.once(position_ids, key, lambda: value)
        return first if first is value or torch.equal(first, value) else value

    def scratch(self, like: torch.Tensor) -> torch.Tensor:
        """Memory of the shape of `like` to be overwritten by the next layer.

        A fresh temporary of some megabytes is mapped and faulted in at every step, which costs more than filling it.
        """
        key = (like.shape, like.dtype, like.device)
        if key not in self.scratches:
            self.scratches = {key: torch.empty_like(like, memory_format=torch.contiguous_format)}
        return self.scratches[key]

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedTables:
        copied = memo[id(self)] = SharedTables()
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {"position_ids": None, "memory": {}, "scratches": {}}
