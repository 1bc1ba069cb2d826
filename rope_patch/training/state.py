"""The state of a run on disk: weights, optimiser, step, place in the data.

It is written aside and renamed, so that a run killed at any moment finds the old state or the new one. Whether one
process trained or several, which shared or divided the weights, the file is the same, and another number of
processes may go on from it.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.sharing import only_main
from rope_patch.files import written_aside

STATE = "state.pt"
"""Name of the file in the folder of a run."""

# whole tensors by name, on the CPU of the main process; what is not trained is in the checkpoint already
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
_TRAINED_ALONE = StateDictOptions(full_state_dict=True, strict=False)
_WRAPPED = "module."  # what DistributedDataParallel puts before every name


class HasState(Protocol):
    """What has a place that must be found again, such as the reading of a text."""

    def state_dict(self) -> dict[str, Any]:
        """The place, in plain types."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go there."""


def save_state(
    output: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    seconds: float = 0.0,
    place: dict[str, Any] | None = None,
) -> None:
    """Write what `restore` needs. Every process of several has to come here.

    Args:
        output: folder of the run.
        model, optimizer: in training.
        step: how many are over.
        seconds: that they took.
        place: where the run reads, `state_dict` of a `HasState`.

    Raises:
        OSError: it could not be written; the state before is still there.
    """
    weights, moments = get_state_dict(model, optimizer, options=_WHOLE)
    state = {"model": weights, "optimizer": moments, "step": step, "seconds": seconds}
    if place is not None:
        state["data"] = place
    only_main(lambda: _write(output / STATE, state))


def restore(
    output: Path, model: nn.Module, optimizer: torch.optim.Optimizer, data: HasState | None = None
) -> tuple[int, float]:
    """Load the state that was saved last, if there is one.

    Args:
        output: folder of the run.
        model, optimizer: loaded in place.
        data: where the run reads, if that has a place that must be found again.

    Returns:
        the steps that are over, and the seconds that they took.

    Raises:
        EvaluationError: the state is that of another model, or cannot be read.
    """
    path = output / STATE
    if not path.exists():
        return 0, 0.0
    try:
        state = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise EvaluationError(f"{path} is damaged; without it the run begins anew") from error
    try:
        found = set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=_TRAINED_ALONE,
        )
    except (RuntimeError, KeyError) as error:  # other shapes, or an optimiser of other parameters
        raise _foreign(path) from error
    trained = {name.removeprefix(_WRAPPED) for name, value in model.named_parameters() if value.requires_grad}
    if found.unexpected_keys or trained.intersection(found.missing_keys):
        raise _foreign(path)
    if data is not None:
        data.load_state_dict(state["data"])
    return state["step"], state["seconds"]


def _foreign(path: Path) -> EvaluationError:
    return EvaluationError(f"{path} is the state of another model or of another way to train it; choose another output")


def _write(path: Path, state: dict[str, Any]) -> None:
    with written_aside(path, sole_writer=True, durable=True) as aside, aside.open("wb") as file:
        torch.save(state, file)
