"""What a checkpoint learned under the scheme that it was saved under, so that a line of a table may mean that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from rope_patch.evaluation.results import weights_fingerprint
from rope_patch.mounting.parameters import learned_parameters
from rope_patch.patching import PatchHandle, find_handle, unpatch
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.slots import Checkpoint


@dataclass(frozen=True)
class Trained:
    """The learned parameters of a scheme, kept while a model is without it.

    Attributes:
        scheme: as it was asked for.
        values: the parameters by name, of any shape.
        weights: tells this checkpoint, its learned parameters included, from another.
    """

    scheme: Scheme
    values: dict[str, torch.Tensor]
    weights: str

    @classmethod
    def under(cls, handle: PatchHandle) -> Trained | None:
        """Those of a patched model; None where its scheme learns nothing."""
        values = {name: value.detach().clone() for name, value in learned_parameters(handle.model).items()}
        return cls(handle.scheme, values, weights_fingerprint(handle.model)) if values else None

    def belong_to(self, scheme: Scheme | None, checkpoint: Checkpoint) -> bool:
        """Whether a scheme is the one that they were learned under, defaults filled in or not."""
        return scheme is not None and scheme in (self.scheme, self.scheme.resolve(checkpoint))

    @torch.no_grad()
    def restore(self, model: nn.Module) -> None:
        """Give them to a model that was patched with their scheme anew."""
        for name, value in learned_parameters(model).items():
            value.copy_(self.values[name])


def take_off(model: nn.Module, say: Callable[[str], None]) -> Trained | None:
    """Take the scheme off that a checkpoint was saved under, saying so, and keep what was learned under it."""
    handle = find_handle(model)
    if handle is None:
        return None
    say(f"the checkpoint was saved under {handle.scheme}; it is measured without, unless a line names the scheme")
    trained = Trained.under(handle)
    unpatch(model)
    return trained
