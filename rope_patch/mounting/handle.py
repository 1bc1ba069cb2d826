"""The handle that a patched model carries, and how to find it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import nn

from rope_patch.errors import NotPatched
from rope_patch.models.base import Stack
from rope_patch.models.find_stacks import find_enclosing
from rope_patch.models.paged import forget_managers
from rope_patch.mounting.layer_state import LayerState
from rope_patch.mounting.plan import Plan
from rope_patch.mounting.undo import Changes
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.reach import spelled

Mounted = tuple[tuple[Stack, Plan], ...]

HANDLE = "_rope_patch_handle"

CHANGING = threading.RLock()
"""Held while a model is patched or restored: two threads may not change one model at once."""

_IN_PLACE = "`patch` returns a handle, and the model is patched in place: use the model itself, or handle.model{}"


class PatchHandle:
    """A model under a scheme. As a context manager it removes the scheme on leaving the outermost block; where
    `replace=True` replaced a scheme, that scheme returns.

    Attributes:
        model: the patched model.
        scheme: the scheme as you gave it to `patch`, with the fields that a target fills.
        mounted: the stacks of the model on which the scheme is mounted, as they were read before the patch, each with
            its plan.
        layer_states: the state of every changed layer, which its calls read.

    Args:
        changes: the changes that `remove` undoes.
        settings: the arguments `mount` and `attention` of `patch`.
    """

    def __init__(
        self, model: nn.Module, scheme: Scheme, mounted: Mounted, changes: Changes, settings: tuple[str, str]
    ) -> None:
        self.model = model
        self.scheme = scheme
        self.mounted = mounted
        self.layer_states: tuple[LayerState, ...] = ()
        self._changes = changes
        self._settings = settings
        self._entered = 0
        self._restore: Callable[[], None] | None = None

    @property
    def stack(self) -> Stack:
        """The patched stack of the model; the encoder if there are two."""
        return self.mounted[0][0]

    @property
    def plan(self) -> Plan:
        """The plan by which the scheme was mounted on `stack`."""
        return self.mounted[0][1]

    @property
    def changes(self) -> Changes:
        """The log of changes that `remove` undoes."""
        return self._changes

    @property
    def _is_mounted(self) -> bool:
        return vars(self.stack.module).get(HANDLE) is self

    def remove(self) -> None:
        """Restore the model bit for bit.

        Raises:
            NotPatched: this handle was removed already.
        """
        with CHANGING:
            if not self._is_mounted:
                raise NotPatched(f"{type(self.model).__name__} does not carry {spelled(self.scheme)} any more")
            forget_managers([*find_enclosing(self.model), *self.model.modules()])
            self._changes.undo()

    def __enter__(self) -> PatchHandle:
        self._entered += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._entered -= 1
        if self._entered or not self._is_mounted:
            return
        self.remove()
        if self._restore is not None:
            self._restore()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and hasattr(vars(self).get("model"), name):
            raise AttributeError(_IN_PLACE.format(f".{name}"))
        undo = "; handle.remove() removes the scheme" if name in ("unpatch", "undo", "restore", "close") else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{undo}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Raise an error that says to call the model instead.

        Raises:
            TypeError: always.
        """
        raise TypeError(_IN_PLACE.format("(...)"))

    def __repr__(self) -> str:
        typed = spelled(self.scheme)
        state = f"under {typed}, mounted {self.plan.mounts()}" if self._is_mounted else f"without {typed}"
        return f"<{type(self.model).__name__} {state}>"


def find_handle(model: nn.Module) -> PatchHandle | None:
    """The handle of a patched model, also from inside or outside a wrapper around it; None without one."""
    return next(iter(find_handles(model)), None)


def find_handles(model: nn.Module) -> tuple[PatchHandle, ...]:
    """All handles of a model: an encoder and a decoder may carry a scheme each."""
    handles = [vars(module)[HANDLE] for module in model.modules() if HANDLE in vars(module)]
    return tuple(dict.fromkeys(handles))
