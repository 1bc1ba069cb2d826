"""Callbacks for fine-tuning at a longer context, for `transformers.Trainer` and any trainer made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import TrainerCallback

from rope_patch.data.corpora import load_text
from rope_patch.errors import EvaluationError
from rope_patch.evaluation.row import Row, Rows
from rope_patch.evaluation.run import run
from rope_patch.evaluation.scheme_specs import check_lengths
from rope_patch.evaluation.tasks.perplexity import Perplexity
from rope_patch.models.head import find_language_model
from rope_patch.patching import find_handle, mount_scheme
from rope_patch.schemes import PositionInterpolation, Scheme


class PerplexityCallback(TrainerCallback):
    """Perplexity against context length on one held-out text, before, during and after a training, in any trainer.

    The model is measured as it is, with or without a scheme, without dropout and in the dtype of its weights. Modes and
    random numbers stay unchanged: the final weights equal, bit for bit, those of a run without this callback. With
    several processes each reads a share of the text, and the main process writes.

    Args:
        corpus: documents that are not trained on: a file, a folder or a pattern as in `load_text`, or rows, each of
            them a text or a mapping with `text` or `input_ids`.
        lengths: context lengths in tokens, ascending; at least one document must have the longest length.
        every: steps between two measurements, in addition to one after the last step; `"eval"` or `"save"` to measure
            whenever the trainer evaluates or saves, so that `eval_perplexity_512` can be `metric_for_best_model`; None
            to measure only after the last step.
        start: measure before the first step too.
        points: the file to which rows with their `step` are appended, or the `Rows` of it; default `perplexity.jsonl`
            in the `output_dir` of the trainer.
        log: a function that also receives the numbers, such as `trainer.log`, which sends them to the trainer's
            trackers.
        tokenizer: default the trainer's `processing_class`.
        line: the name of the scheme in the rows; default its spelling.
        name: name of the model in the rows.
        results: rows of earlier runs, which are not measured again; new rows are appended.
        settings: other settings of `Perplexity`, such as `targets`, `documents` and `windows_per_document`.

    Raises:
        EvaluationError: an argument is not allowed, or the texts are too short. It is raised before anything is
            computed.

    Example:
        >>> trainer = Trainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
        >>> trainer.add_callback(PerplexityCallback("held_out/", lengths=[4096, 16384], every=100, log=trainer.log))
    """

    def __init__(
        self,
        corpus: str | Path | Iterable[str | Mapping[str, Any]],
        lengths: Sequence[int],
        *,
        every: int | Literal["eval", "save"] | None = None,
        start: bool = True,
        points: str | Path | Rows | None = None,
        log: Callable[[dict[str, float]], None] | None = None,
        tokenizer: Any = None,
        line: str | None = None,
        name: str | None = None,
        results: Rows | None = None,
        **settings: Any,
    ) -> None:
        allowed = every is None or every in ("eval", "save") or (isinstance(every, int) and every >= 1)
        if not allowed:
            raise EvaluationError(f"every={every!r} is not allowed; it is a number of steps, 'eval', 'save' or None")
        check_lengths(lengths)
        rows = load_text(str(corpus)) if isinstance(corpus, (str, Path)) else corpus
        self.corpus = [_document(number, row) for number, row in enumerate(rows)]
        self.lengths, self.every, self.start, self.points, self.log = lengths, every, start, points, log
        self.tokenizer, self.line, self.name, self.results, self.settings = tokenizer, line, name, results, settings

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure before the first step, if `start` asks for it."""
        if self.start and state.global_step == 0:
            self._measure(args, state, control, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure after every `every` steps, and after the last one."""
        steps = state.max_steps if self.every is None else self.every
        if isinstance(steps, int) and (state.global_step % steps == 0 or state.global_step == state.max_steps):
            self._measure(args, state, control, **kwargs)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Add the perplexities to the metrics by which the trainer chooses its best checkpoint, if `every` is
        `eval`.
        """
        if self.every == "eval":
            perplexities = self._measure(args, state, control, **kwargs)
            (metrics if metrics is not None else {}).update(perplexities)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure at each saved checkpoint, if `every` is `save`."""
        if self.every == "save":
            self._measure(args, state, control, **kwargs)

    def _measure(
        self, args: Any, state: Any, control: Any, model: Any, processing_class: Any = None, **_: Any
    ) -> dict[str, float]:
        if self.tokenizer is None:
            self.tokenizer = getattr(processing_class, "tokenizer", processing_class)
        if state.is_world_process_zero and not isinstance(self.points, Rows):
            self.points = Rows(self.points or Path(args.output_dir) / "perplexity.jsonl")
        handle = find_handle(model)
        points_of_step = self.measure(model, "plain" if handle is None else handle.scheme, state.global_step)
        numbers: dict[str, Any] = {f"eval_perplexity_{point.length}": point.perplexity for point in points_of_step}
        if self.log is not None:
            due = control.should_log  # `Trainer.log` resets it
            self.log({**numbers})
            control.should_log = due
        return numbers

    def measure(self, model: nn.Module, scheme: str | Scheme, step: int, line: str | None = None) -> list[Row]:
        """Measure a model now, without a scheme or under the given scheme."""
        if self.tokenizer is None and any("text" in row for row in self.corpus):
            raise EvaluationError("tokenizer=None: texts need one, here or as the processing_class of the trainer")
        language_model = find_language_model(model)
        task = Perplexity(self.tokenizer, self.corpus, **self.settings)
        # weights that adapters leave in bfloat16 meet norms that are trained in float32
        mixed = len({parameter.dtype for parameter in language_model.parameters()}) > 1
        with torch.autocast(language_model.device.type, torch.bfloat16, enabled=mixed):
            measured = run(model, task, [scheme], self.lengths, self.results, name=self.name)
        points = [replace(row, line=line or self.line or str(scheme), step=step) for row in measured]
        if isinstance(self.points, Rows):
            for point in points:
                if self.points.find(point.key()) != point:
                    self.points.append(point)
        return points


def completed(rows: Sequence[Row]) -> list[Row]:
    """Complete the rows of one training: rows of an older version, which have fewer fields, get the missing ones from
    the newest row.
    """
    names = ("model", "dtype", "protocol", "targets", "texts")
    return [replace(row, **{name: getattr(row, name) or getattr(rows[-1], name) for name in names}) for row in rows]


def _document(number: int, row: str | Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row of a corpus to the form that `measure` reads."""
    row = {"text": row} if isinstance(row, str) else row
    if not {"text", "input_ids"} & set(row):
        raise EvaluationError(f"row {number} of the corpus has {', '.join(map(str, row))}; text or input_ids is needed")
    return {"name": f"row {number}", **row}


class WarmStart(TrainerCallback):
    """Train the first steps under position interpolation by a factor, before a scheme, or None, takes over.

    Raises:
        EvaluationError: the scheme learns parameters, which must exist from the first step on.
    """

    def __init__(self, scheme: Scheme | None, steps: int, factor: float) -> None:
        if scheme is not None and scheme.learns:
            raise EvaluationError(
                f"a warm start before {scheme}: its learned parameters must exist from the first step on"
            )
        self.scheme, self.steps, self.start = scheme, steps, PositionInterpolation(factor=factor)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Change the scheme at the step where the warm start ends, also in a resumed run."""
        scheme, handle = self.start if state.global_step < self.steps else self.scheme, find_handle(model)
        if (handle.scheme if handle else None) == scheme:
            return
        if handle is not None:
            handle.remove()
        if scheme is not None:
            mount_scheme(model, scheme)
