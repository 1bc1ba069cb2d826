"""What fine-tuning at a longer context adds to `transformers.Trainer`, as callbacks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.perplexity import measure
from rope_patch.evaluation.rows import JsonRow, Rows
from rope_patch.models.head import find_language_model
from rope_patch.patching import find_handle, mount_scheme
from rope_patch.schemes import PositionInterpolation, Scheme


@dataclass(frozen=True)
class Point(JsonRow):
    """What was measured of `line`, such as `yarn:target=auto`, after `step` steps, from contexts of `length` tokens.

    `nll` is the mean in nats of `scored_tokens` tokens of so many `documents` of `text`, `nll_by_document` as in
    a row of `measure`, `perplexity` its exponential, and `training_length` is L. The fingerprint of the `weights` finds
    the full row among those of `measure`.
    """

    KEY = ("line", "step", "length")

    line: str
    step: int
    length: int
    nll: float
    perplexity: float
    training_length: int
    scored_tokens: int
    documents: int
    weights: str
    text: str = ""
    nll_by_document: list[float] = field(default_factory=list)


class PerplexityCallback(TrainerCallback):
    """Perplexity against length of the same held-out text, during and after the training, and before where asked.

    Args:
        points: where the points of `line` are appended; None on processes that write nothing.
        line: the name of the scheme in them.
        every: steps between two measurements; None for one after the last step alone.
        settings: of `measure`: tokenizer, corpus, lengths, and others. With `results`, the rows of an earlier run are
            found and not measured again.
    """

    def __init__(self, points: Rows[Point] | None, line: str, every: int | None = None, **settings: Any) -> None:
        self.points, self.line, self.every, self.settings = points, line, every, settings

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Measure where a measurement is due."""
        if state.global_step == state.max_steps or (self.every and state.global_step % self.every == 0):
            handle = find_handle(model)
            self.measure(model, "plain" if handle is None else handle.scheme, state.global_step)

    def measure(self, model: nn.Module, scheme: str | Scheme, step: int, line: str | None = None) -> None:
        """Measure a model now: without a scheme, or under this one.

        Raises:
            EvaluationError: a loss is not finite.
        """
        language_model = find_language_model(model)
        # weights that adapters leave in bfloat16 meet norms that are trained in float32
        mixed = len({parameter.dtype for parameter in language_model.parameters()}) > 1
        with torch.autocast(language_model.device.type, torch.bfloat16, enabled=mixed):
            rows = measure(model, schemes=[scheme], **self.settings)
        for row in rows:
            shared: dict[str, Any] = {field.name: getattr(row, field.name, step) for field in fields(Point)}
            point = Point(**{**shared, "line": line or self.line})
            if self.points is not None and self.points.find(point.key()) != point:
                self.points.append(point)
            if not math.isfinite(row.nll):
                raise EvaluationError(f"{point.line}: the loss after {step} steps is {row.nll} at {row.length} tokens")


class WarmStart(TrainerCallback):
    """The first steps are trained under position interpolation by a factor, from which a scheme, or None, goes on.

    Raises:
        EvaluationError: the scheme learns parameters, which have to be there from the first step on.
    """

    def __init__(self, scheme: Scheme | None, steps: int, factor: float) -> None:
        if scheme is not None and scheme.learns:
            raise EvaluationError(
                f"a warm start before {scheme}: what it learns has to be there from the first step on"
            )
        self.scheme, self.steps, self.start = scheme, steps, PositionInterpolation(factor=factor)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Change the scheme where the warm start ends, also in a run that is resumed."""
        wanted, handle = self.start if state.global_step < self.steps else self.scheme, find_handle(model)
        if (handle.scheme if handle else None) == wanted:
            return
        if handle is not None:
            handle.remove()
        if wanted is not None:
            mount_scheme(model, wanted)
