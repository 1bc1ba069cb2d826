"""A model during measurement: under a scheme, with its learned parameters, and in evaluation mode."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rope_patch.errors import AlreadyPatched
from rope_patch.evaluation.row import provenance
from rope_patch.models.find_stacks import read_stacks
from rope_patch.models.head import find_language_model
from rope_patch.mounting.parameters import learned_parameters
from rope_patch.patching import find_handle, find_handles, mount_scheme, unpatch
from rope_patch.schemes import Scheme
from rope_patch.schemes.target import resolved


@dataclass(frozen=True)
class Learned:
    """The learned parameters of a scheme that was removed from a checkpoint: by name, of any shape."""

    scheme: Scheme
    values: dict[str, torch.Tensor]
    weights: str  # fingerprint of the checkpoint, its learned parameters included


def pop_scheme(
    model: nn.Module, say: Callable[[str], None], then: str = "measured without, unless a line names the scheme"
) -> Learned | None:
    """Remove the scheme under which a checkpoint was saved, and return its learned parameters.

    `say` receives a message that names this scheme and the next action, `then`.
    """
    handle = find_handle(model)
    if handle is None:
        return None
    say(f"the checkpoint was saved under {handle.scheme}; it is {then}")
    values = {name: value.detach().clone() for name, value in learned_parameters(handle.model).items()}
    learned = Learned(handle.scheme, values, weights_fingerprint(handle.model)) if values else None
    unpatch(model)
    return learned


class MeasuredModel:
    """A language model of Transformers, also inside PEFT or another wrapper, for measurements.

    A patched model is measured as it is and never unpatched: `carried` is the handle of its scheme. `learned` has the
    learned parameters of a scheme that was removed. The `stacks` are those of the unpatched model.

    Raises:
        AlreadyPatched: parts of the model have different schemes.
        UnsupportedModel, EvaluationError: the model is not a supported language model.
    """

    def __init__(self, model: nn.Module, learned: Learned | None = None) -> None:
        handles = find_handles(model)
        if len(handles) > 1:
            names = " and ".join(str(handle.scheme) for handle in handles)
            raise AlreadyPatched(f"parts of {type(model).__name__} carry {names}; unpatch it before measuring")
        self.model, self.learned = model, learned
        self.language_model = find_language_model(model)
        self.carried = handles[0] if handles else None
        self.stacks = [stack for stack, _ in self.carried.mounted] if self.carried else read_stacks(model)

    @property
    def training_length(self) -> int:
        """The length L in tokens that the checkpoint reads today."""
        return self.stacks[0].max_length

    def carries(self, scheme: Scheme | None) -> bool:
        """Whether a scheme is the one that the model carries, with or without its defaults filled in."""
        if self.carried is None or scheme is None:
            return False
        carried, checkpoints = self.carried.scheme, [stack.checkpoint for stack, _ in self.carried.mounted]
        return all(resolved(scheme, of) == resolved(carried, of) for of in checkpoints)

    def facts(self, name: str | None = None) -> dict[str, Any]:
        """The fields of all rows about model and software; `name` defaults to `config.name_or_path`."""
        model = self.language_model
        return {
            "model": name or getattr(model.config, "name_or_path", "") or type(model).__name__,
            # only the language model's, because its parameters have the same names within any wrapper
            "weights": self.learned.weights if self.learned else weights_fingerprint(model),
            "training_length": self.training_length,
            "dtype": str(model.dtype).removeprefix("torch."),
            "attention": model.config._attn_implementation,
            "device": str(model.device),
            **provenance(),
        }

    @contextmanager
    def patched_with(self, scheme: Scheme | None) -> Iterator[None]:
        """Run the model under a scheme, with its learned parameters and without dropout; restore it afterwards."""
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            with mount_scheme(self.model, scheme) if scheme is not None and self.carried is None else nullcontext():
                learned = self.learned
                if learned and scheme in (learned.scheme, resolved(learned.scheme, self.stacks[0].checkpoint)):
                    for name, value in learned_parameters(self.model).items():
                        value.data.copy_(learned.values[name])
                yield
        finally:
            for module, training in modes.items():
                module.training = training


def weights_fingerprint(model: nn.Module) -> str:
    """A cheap hash of a sample of every parameter, which distinguishes a retrained checkpoint from the previous one."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        if hasattr(values, "full_tensor"):  # sharded over processes, all of which run this
            values = values.full_tensor()
        sample = values.flatten()[:: max(1, values.numel() // 64)].float().cpu()
        digest.update(f"{name}{tuple(parameter.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]
