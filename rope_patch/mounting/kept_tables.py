"""The frequencies in a model's rotary modules, which a cast of the model would round.

Half precision has too few digits for an angle: bfloat16 moves position 1,000 by up to 1 rad. Frequencies that a scheme
writes are float32 or wider, and are kept that way. The checkpoint's own frequencies stay as the model has them, so a
scheme that keeps them computes the same as the plain model. If a cast has rounded them, a warning says so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rope_patch.errors import warn
from rope_patch.graphs import traced
from rope_patch.models.base import RotaryTables
from rope_patch.models.rounding import Rounding, is_half, rounding_sentence
from rope_patch.mounting.undo import Changes
from rope_patch.schemes.base import Scheme

_NAMES = ("inv_freq", "original_inv_freq")


class KeptTables:
    """The frequencies of one rotary module under a scheme, restored after each cast of the module.

    After a cast that rounded frequencies, those that the scheme wrote are restored, and for the checkpoint's own there
    is one warning. `Module.to` and similar methods call `_apply` of the module, which notices the cast at once. A
    pre-hook notices other casts (`buffer_dtype` of FSDP) at the next forward.

    Args:
        length: the position at which the warning gives the error, in tokens.
    """

    def __init__(self, module: nn.Module, scheme: Scheme, length: int) -> None:
        self.module = module
        self.scheme = scheme
        self.length = length
        self._written: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # by attribute: the checkpoint's, the scheme's
        self._read: dict[str, torch.Tensor] = {}  # the checkpoint's, before a cast
        self._cast_to: torch.dtype | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The attributes that `restore` sets."""
        return tuple(self._written)

    def write(self, tables: RotaryTables, frequencies: torch.Tensor, native: bool = False) -> None:
        """Write these frequencies, `(d/2,)`, into a set of tables of the module. If they are `native`, the checkpoint's
        own, rounded frequencies stay.
        """
        for name in map(tables.attribute, _NAMES):
            own = getattr(self.module, name, None)
            if own is None:
                continue
            if native and torch.equal(frequencies.to(own), own):
                self._keep(name)
                continue
            exact = frequencies.to(own.device, torch.promote_types(own.dtype, torch.float32), copy=True)
            self._written[name] = own, exact
            setattr(self.module, name, exact.clone())  # some casts change a buffer in place

    def read(self, tables: RotaryTables) -> None:
        """Watch a set of tables that the scheme takes from the checkpoint."""
        self._keep(tables.attribute("inv_freq"))

    def install(self, changes: Changes) -> None:
        """Follow casts of the module, and log the hooks in `changes`."""
        if self._written or self._read:
            changes.hook(self.module, self)
            changes.set(self.module, "_apply", self.apply)

    def _keep(self, name: str) -> None:
        own = getattr(self.module, name)
        if not is_half(own.dtype):
            self._read[name] = own.clone()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the tables of the module, or of its replica on another device; the arguments stay unchanged."""
        self._look(module)

    def apply(self, change: Any, recurse: bool = True) -> nn.Module:
        """Replace `Module._apply`: call `change` on every tensor, then check the tables."""
        type(self.module)._apply(self.module, change, recurse)
        self._look(self.module)
        return self.module

    def _look(self, module: nn.Module) -> None:
        for name, (_, exact) in self._written.items():
            now = getattr(module, name)
            if is_half(now.dtype):
                self._cast_to = now.dtype
                setattr(module, name, exact.to(now.device))
        self._warn(module)

    def _warn(self, module: nn.Module) -> None:
        if traced():
            return
        for name, exact in self._read.items():
            now = getattr(module, name)
            if is_half(now.dtype) and not now.is_meta:
                error = float((now.float() - exact.to(now.device)).abs().max())
                self._read = {}
                warn(rounding_sentence(Rounding(now.dtype, error), self.length, str(self.scheme)), stacklevel=2)
                return

    def restore(self) -> None:
        """Restore the checkpoint's frequencies, in the dtype to which the model was cast in the meantime."""
        for name, (own, exact) in self._written.items():
            now = getattr(self.module, name)
            as_before = own.dtype if now.dtype == exact.dtype else now.dtype
            setattr(self.module, name, own.to(now.device, self._cast_to or as_before))
