"""Every scheme, length and depth on the same prompts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn
from tqdm import tqdm

from rope_patch.errors import AlreadyPatched, EvaluationError
from rope_patch.evaluation.nll import find_language_model
from rope_patch.evaluation.results import LineFile, provenance, weights_fingerprint
from rope_patch.evaluation.retrieval.rows import RetrievalRow, identity
from rope_patch.evaluation.retrieval.task import Prompt, Task, fingerprint
from rope_patch.evaluation.specs import PLAIN, scheme_at
from rope_patch.evaluation.trained import Trained
from rope_patch.models.base import Stack
from rope_patch.models.reading import read_stacks
from rope_patch.mounts import plan_mounts
from rope_patch.patch import find_handle, patch
from rope_patch.schemes import Scheme


@dataclass(frozen=True)
class Column:
    """One scheme at one length: what is measured under one patch.

    Attributes:
        line: the scheme as the report names it.
        scheme: with all defaults filled in; None for the plain checkpoint.
        mount: where it will be mounted.
        length: in tokens.
    """

    line: str
    scheme: Scheme | None
    mount: str
    length: int

    @property
    def fields(self) -> dict[str, Any]:
        """Of its rows."""
        return {
            "line": self.line,
            "scheme": self.scheme.to_dict() if self.scheme else {"name": PLAIN},
            "regime": self.scheme.regime if self.scheme else "training-free",
            "mount": self.mount,
            "length": self.length,
        }


def measure(
    model: nn.Module,
    task: Task,
    schemes: Sequence[str | Scheme],
    lengths: Sequence[int],
    depths: Sequence[float],
    *,
    seed: int = 0,
    name: str | None = None,
    results: LineFile[RetrievalRow] | None = None,
    trained: Trained | None = None,
) -> list[RetrievalRow]:
    """Ask every scheme the same questions. The model is unpatched before, between and after.

    Args:
        model: a causal language model of Transformers that carries no scheme.
        task: such as `Passkey` or `Spans`.
        schemes: scheme objects or strings; a string may be `plain`, and may say `factor=auto` (see `scheme_at`).
        lengths: context lengths in tokens, ascending.
        depths: ascending, from 0 (first in the context) to 1 (right before the question).
        seed: of the task, for the rows.
        name: of the model in the rows; default `model.config.name_or_path`.
        results: where rows are appended as they come, and where rows of an earlier run are taken from.
        trained: what the model learned under a scheme that it carried; a line of that scheme is measured with it.

    Returns:
        one row per scheme, length and depth, in this order.

    Raises:
        EvaluationError: lengths, depths and task do not fit each other or the model; the message says how.
        AlreadyPatched: the model carries a scheme.
        UnknownScheme, InvalidField, SlotConflict, UnsupportedModel, NothingToPatch: a scheme is not right for it.
            All of them are raised before anything is computed.
    """
    check_lengths(lengths)
    check_depths(depths)
    if (handle := find_handle(model)) is not None:
        raise AlreadyPatched(f"{type(model).__name__} carries {handle.scheme}; unpatch it before measuring")
    language_model = find_language_model(model)
    if language_model.config.is_encoder_decoder:
        raise EvaluationError(
            f"{type(language_model).__name__} is an encoder with a decoder; retrieval is measured where one stack "
            "reads the context and goes on with it"
        )
    stacks = read_stacks(model)
    columns = plan(schemes, lengths, stacks)
    prompts = {(length, depth): task.prompts(length, depth) for length in lengths for depth in (None, *depths)}
    shared = {
        "task": task.name,
        "model": name or getattr(language_model.config, "name_or_path", "") or type(language_model).__name__,
        "weights": weights_fingerprint(model) if trained is None else trained.weights,
        "training_length": stacks[0].training_length,
        "span": task.span,
        "trials": task.trials,
        "seed": seed,
        "dtype": str(language_model.dtype).removeprefix("torch."),
        "attention": language_model.config._attn_implementation,
        "device": str(language_model.device),
        **provenance(),
    }
    rows: list[RetrievalRow] = []
    total = sum(column.length for column in columns) * len(depths)
    with _evaluating(model), tqdm(total=total, unit="token", unit_scale=True, disable=None, leave=False) as bar:
        for column in columns:
            asked = {depth: prompts[column.length, depth] for depth in (None, *depths)}
            learned = trained if trained and trained.belong_to(column.scheme, stacks[0].checkpoint) else None
            rows += _rows(model, task, column, learned, asked, shared, results, bar)
    return rows


def check_lengths(lengths: Sequence[int]) -> None:
    """What can be known to be wrong before a model is there.

    Raises:
        EvaluationError: lengths are missing, not whole numbers of at least 1, or do not ascend.
    """
    shown = ", ".join(map(str, lengths))
    if not lengths:
        raise EvaluationError("no lengths were given; give at least one, in tokens")
    if not all(isinstance(length, int) and length >= 1 for length in lengths):
        raise EvaluationError(f"lengths {shown}: every length must be a whole number of at least 1 token")
    if sorted(set(lengths)) != list(lengths):
        raise EvaluationError(f"lengths {shown}: they must ascend")


def check_depths(depths: Sequence[float]) -> None:
    """What can be known to be wrong before a model is there.

    Raises:
        EvaluationError: depths are missing, not from 0 to 1, or do not ascend.
    """
    shown = ", ".join(f"{depth:g}" for depth in depths)
    if not depths:
        raise EvaluationError("no depths were given; give how many, or a list of shares from 0 to 1")
    if not all(0 <= depth <= 1 for depth in depths):
        raise EvaluationError(f"depths {shown}: every depth is a share of the context, from 0 to 1")
    if sorted(set(depths)) != list(depths):
        raise EvaluationError(f"depths {shown}: they must ascend")


def plan(schemes: Sequence[str | Scheme], lengths: Sequence[int], stacks: Sequence[Stack]) -> list[Column]:
    """The columns in the order of the report, each scheme checked against the model.

    Raises:
        RopePatchError: see `measure`.
    """
    if not schemes:
        raise EvaluationError("no schemes were given; give at least one, such as 'plain'")
    lines = [str(spec) for spec in schemes]
    if twice := {line for line in lines if lines.count(line) > 1}:
        raise EvaluationError(f"scheme {sorted(twice)[0]!r} is there twice")
    columns, stack = [], stacks[0]
    for line, spec in zip(lines, schemes, strict=True):
        for length in lengths:
            scheme = spec if isinstance(spec, Scheme) else scheme_at(spec, length, stack.training_length)
            if scheme is not None and len(stacks) == 1:
                scheme = scheme.resolve(stack.checkpoint)
            table = stack.absolute
            if scheme is None and table is not None and length > table.capacity:
                raise EvaluationError(
                    f"{line} at {length} tokens: {type(stack.module).__name__} has {table.capacity} positions; "
                    "measure longer texts under a scheme alone, without references (--no-references)"
                )
            mounts = [plan_mounts(scheme, part).mounts() for part in stacks] if scheme else ["none"]
            columns.append(Column(line, scheme, mounts[0], length))
    return columns


def _rows(
    model: nn.Module,
    task: Task,
    column: Column,
    learned: Trained | None,
    asked: dict[float | None, list[Prompt]],
    shared: dict[str, Any],
    results: LineFile[RetrievalRow] | None,
    bar: tqdm,
) -> list[RetrievalRow]:
    """Those of an earlier run, and the missing ones."""
    control = asked[None]
    cells = {
        depth: {**column.fields, "depth": depth, "prompts": fingerprint([*prompts, *control])}
        for depth, prompts in asked.items()
        if depth is not None
    }
    rows: dict[float, RetrievalRow] = {}
    for depth, cell in cells.items():
        if results is not None and (found := results.find(identity(**shared, **cell))):
            rows[depth] = RetrievalRow(**{**vars(found), "line": column.line})
            bar.update(column.length)
    if len(rows) == len(cells):
        return list(rows.values())
    with patch(model, column.scheme) if column.scheme else nullcontext():
        if learned is not None:
            learned.restore(model)
        bar.set_description(f"{column.line} at {column.length}")
        blank = task.score(model, control) if task.has_control else None
        for depth, cell in cells.items():
            if depth in rows:
                continue
            prompts = asked[depth]
            began = time.perf_counter()
            score = task.score(model, prompts)
            rows[depth] = RetrievalRow(
                **shared,
                **cell,
                prompt_tokens=sum(len(prompt.tokens) for prompt in prompts) / len(prompts),
                distance=min(prompt.distance for prompt in prompts if prompt.distance is not None),
                accuracy=score.accuracy,
                exact=score.exact,
                nll=score.nll,
                control_accuracy=blank.accuracy if blank else None,
                control_exact=blank.exact if blank else None,
                control_nll=blank.nll if blank else None,
                seconds=round(time.perf_counter() - began, 3),
            )
            if results is not None:
                results.append(rows[depth])
            bar.update(column.length)
    return [rows[depth] for depth in cells]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """No dropout meanwhile; afterwards each module is in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
