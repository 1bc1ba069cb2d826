"""Folders of runs: one run holds a folder, writes it atomically, and a Trainer saves its checkpoints this way."""

from __future__ import annotations

import json
import math
import os
import shutil
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from torch import nn
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint, rotate_checkpoints

from rope_patch.errors import EvaluationError, RopePatchError
from rope_patch.json_files import check_types, read_settings
from rope_patch.models.adapter_record import ADAPTERS
from rope_patch.saving.checkpoint_kind import read_json
from rope_patch.saving.own_files import check_weights
from rope_patch.saving.trust import check_adapter
from rope_patch.training.context_parallel import ContextParallelTrainer

_ASIDE = "unfinished"

_STATE = {"global_step": int, "max_steps": int, "epoch": float | None, "log_history": list[dict[str, Any]]}
"""Fields of a `trainer_state.json` from which a Trainer continues, and their types."""


def alone_in(folder: Path) -> Any:
    """Hold a folder within a `with` block: a second run on it ends at once, and a killed run releases it.

    Raises:
        EvaluationError: another run holds the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(folder / ".lock").acquire(timeout=0)
    except Timeout:
        raise EvaluationError(f"{folder} is in use by another run; wait for it, or choose another output") from None


def claim(folder: Path, settings: dict[str, Any]) -> None:
    """Record the settings of a folder in its `options.json`.

    Raises:
        EvaluationError: the folder was recorded with other settings, or that file is damaged.
    """
    path = folder / "options.json"
    recorded = dict.fromkeys(settings) | read_settings(path) if path.exists() else settings
    changed = [name for name in settings if recorded[name] != settings[name]]
    if changed:
        changes = "; ".join(f"{name} was {recorded[name]!r} and is {settings[name]!r}" for name in changed)
        raise EvaluationError(f"{folder} holds other runs ({changes}); choose another output")
    path.write_text(json.dumps(settings, indent=2) + "\n")


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder to write, and move it to `path` when it is complete; until then `path` stays unchanged.

    Raises:
        OSError: the folder cannot be written, for example on a full disk; the temporary folder is deleted.
    """
    aside = path.parent / _ASIDE
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside / path.name
        for file in filter(Path.is_file, aside.rglob("*")):
            with file.open("rb") as content:
                os.fsync(content.fileno())  # so that the rename cannot reach the disk first
    except (SafetensorError, OSError, RuntimeError) as error:  # errors of safetensors, Python and torch on a full disk
        shutil.rmtree(aside, ignore_errors=True)
        raise OSError(f"{path} cannot be written: {str(error).strip().splitlines()[0]}") from error
    shutil.rmtree(path, ignore_errors=True)
    os.replace(aside / path.name, path)
    aside.rmdir()


class SafeTrainer(ContextParallelTrainer):
    """`transformers.Trainer` whose newest checkpoint is complete, even if the process is killed.

    Checkpoints are written to a temporary folder and renamed; older checkpoints are deleted afterwards. A gradient that
    is not finite stops the training before its step.
    """

    _aside: str | None = None

    def resume(self) -> None:
        """Train, resuming from the newest checkpoint if there is one.

        Raises:
            EvaluationError: that checkpoint is beyond `max_steps`, or damaged.
        """
        folder = Path(self.args.output_dir)
        last = get_last_checkpoint(folder) if folder.is_dir() else None
        step = int(last.rpartition("-")[2]) if last else 0
        if step > self.args.max_steps:
            raise EvaluationError(f"steps={self.args.max_steps}, but {folder} is at step {step}; choose another output")
        if last:
            _check(Path(last), step)
        if last and step == self.args.max_steps and not self.is_fsdp_enabled:
            self._load_from_checkpoint(last)  # `train` would take one more step
        else:
            self.train(resume_from_checkpoint=last)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with _readable(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with _readable(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with _readable(checkpoint):
            super()._load_rng_state(checkpoint)

    def _get_output_dir(self, trial: Any) -> str:
        return self._aside or super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        output = self._get_output_dir(trial)
        path = Path(output) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        with whole_folder(path) if self.args.should_save else nullcontext():
            self.accelerator.wait_for_everyone()
            self._aside = str(path.parent / _ASIDE)
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._aside = None
            self.accelerator.wait_for_everyone()
        if self.args.should_save:
            rotate_checkpoints(output, self.args.save_total_limit)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        if norm is not None and not math.isfinite(norm):
            raise EvaluationError(
                f"step {self.state.global_step + 1}: the gradient is not finite; try a smaller learning rate; the last "
                f"checkpoint is in {self.args.output_dir}"
            )
        return norm


@contextmanager
def _readable(checkpoint: str | Path | None) -> Iterator[None]:
    """Turn the errors that a truncated file causes in pickle, zip, torch and safetensors into `EvaluationError`."""
    try:
        yield
    except (RopePatchError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = textwrap.shorten(str(error), 300) or type(error).__name__
        raise EvaluationError(
            f"{checkpoint} is damaged ({reason}); remove this checkpoint: the run resumes from an older one, or begins "
            "again"
        ) from error


def _check(checkpoint: Path, step: int) -> None:
    """Refuse a checkpoint that is damaged, or that links to another place.

    Raises:
        RopePatchError: the checkpoint is damaged or links elsewhere.
    """
    check_weights(checkpoint)
    if (checkpoint / ADAPTERS).is_file():
        check_adapter(read_json(checkpoint / ADAPTERS), checkpoint / ADAPTERS)
    with _readable(checkpoint / TRAINER_STATE_NAME):
        state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        check_types(vars(state), _STATE)
        if state.global_step != step:
            raise ValueError(f"global_step={state.global_step} is not {step}")
