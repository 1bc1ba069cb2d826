"""A model while it is measured: what rows say of it, and how it is between two measurements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel

from rope_patch.errors import AlreadyPatched
from rope_patch.evaluation.nll import find_language_model
from rope_patch.evaluation.results import provenance, weights_fingerprint
from rope_patch.evaluation.sharing import is_main
from rope_patch.evaluation.trained import Trained
from rope_patch.models.base import Stack
from rope_patch.models.reading import read_stacks
from rope_patch.patching import PatchHandle, find_handles
from rope_patch.schemes import Scheme


@dataclass(frozen=True)
class Subject:
    """A model that is measured.

    Attributes:
        model: as it was given, perhaps inside PEFT or another wrapper.
        language_model: the one inside.
        stacks: as they are without a scheme.
        carried: what it carries, and is then measured as it is, never taken apart; None where it carries nothing.
        trained: what it learned under a scheme that it carried before; None where that is nothing.
    """

    model: nn.Module
    language_model: PreTrainedModel
    stacks: Sequence[Stack]
    carried: PatchHandle | None
    trained: Trained | None

    @classmethod
    def of(cls, model: nn.Module, trained: Trained | None = None) -> Subject:
        """Read a model.

        Raises:
            AlreadyPatched: parts of it carry different schemes.
            UnsupportedModel, EvaluationError: it is no language model that can be read.
        """
        handles = find_handles(model)
        if len(handles) > 1:
            names = " and ".join(str(handle.scheme) for handle in handles)
            raise AlreadyPatched(f"parts of {type(model).__name__} carry {names}; unpatch it before measuring")
        carried = handles[0] if handles else None
        stacks = [stack for stack, _ in carried.mounted] if carried else read_stacks(model)
        return cls(model, find_language_model(model), stacks, carried, trained)

    @property
    def training_length(self) -> int:
        """L in tokens."""
        return self.stacks[0].training_length

    def fields(self, name: str | None) -> dict[str, Any]:
        """What all rows of a measurement say of the model and of the software.

        Args:
            name: of the model; default `model.config.name_or_path`.
        """
        model = self.language_model
        return {
            "model": name or getattr(model.config, "name_or_path", "") or type(model).__name__,
            # of the language model alone, whose parameters have the same names within any wrapper
            "weights": self.trained.weights if self.trained else weights_fingerprint(model),
            "training_length": self.training_length,
            "dtype": str(model.dtype).removeprefix("torch."),
            "attention": model.config._attn_implementation,
            "device": str(model.device),
            **provenance(),
        }

    def recall(self, scheme: Scheme | None) -> None:
        """Give the model, now that it is under a scheme, what it learned under that very scheme."""
        if self.trained is not None and self.trained.belong_to(scheme, self.stacks[0].checkpoint):
            self.trained.restore(self.model)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """No dropout meanwhile; afterwards each module is in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def progress(tokens: int) -> tqdm:
    """A bar over so many tokens, shown by the main process where there is a terminal."""
    hidden = None if is_main() else True  # None: tqdm looks for a terminal
    return tqdm(total=tokens, unit="token", unit_scale=True, disable=hidden, dynamic_ncols=True, leave=False)
