"""The measuring loop: `run` measures every scheme at every length on one task, and every measurement is one `Row`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.measured_model import Learned, MeasuredModel
from rope_patch.evaluation.processes import joined, on_main, over_processes, sharing_rows
from rope_patch.evaluation.progress import Progress
from rope_patch.evaluation.row import Row, Rows
from rope_patch.evaluation.scheme_specs import CONTROLS, SchemeAtLength, check_lengths, display_name, schemes_at_lengths
from rope_patch.evaluation.tasks.task import Cell, Task
from rope_patch.evaluation.unfinished import Unfinished
from rope_patch.schemes import Scheme


def run(
    model: nn.Module,
    task: Task,
    schemes: Sequence[str | Scheme],
    lengths: Sequence[int],
    rows: Rows | None = None,
    *,
    name: str | None = None,
    trained: Learned | None = None,
    ahead: int = 0,
    sharing: int = 1,
) -> list[Row]:
    """Measure every scheme at every length: the shortest length first, under every scheme, cell by cell of the task.

    So an interrupted run has compared all schemes on the lengths that it reached, and the slowest measurements come
    last.

    The model has no scheme before, between and after the measurements. A patched model is measured as it is, and only
    under its own scheme.

    With several processes (`torchrun`, `accelerate launch`), all of them must make the same call. The items of a cell
    are divided over the processes, and all return the same rows as a single process.

    Args:
        model: a language model of Transformers, also inside PEFT or another wrapper.
        task: the task, see `rope_patch.evaluation.tasks`.
        schemes: scheme objects or strings; a string may be `plain`, and may contain `target=auto` (see `scheme_at`).
        lengths: context lengths in tokens, ascending.
        rows: file for new rows; rows of an earlier run in it are not measured again.
        name: name of the model in the rows; default `model.config.name_or_path`.
        trained: learned parameters from `pop_scheme`, used for lines of their scheme.
        ahead: the number of similar calls that follow, for the estimate of the remaining time.
        sharing: number of processes that share each row, for texts that do not fit into one process; for perplexity of
            decoders.

    Raises:
        EvaluationError: lengths, settings or texts do not fit together.
        AlreadyPatched: the model already has a different scheme.
        UnknownScheme, InvalidField, SlotConflict, UnsupportedModel, NothingToPatch: a scheme does not fit the model.
            All errors are raised before anything is computed.
    """
    check_lengths(lengths)
    measured = MeasuredModel(model, trained)
    task = task.resolve(measured, lengths)
    passes = schemes_at_lengths(schemes, task.passes(lengths), measured)
    if task.one_pass:
        _check_prefixes(passes, measured)
    at_length = {length: task.cells(length) for length in task.passes(lengths)}
    cells = [task.control(one.line) if one.line in CONTROLS else at_length[one.length] for one in passes]
    facts = {**measured.facts(name), "task": task.name}
    measured_rows: list[Row] = []
    of_passes: dict[int, list[Row]] = {}
    shortest_first = sorted(range(len(passes)), key=lambda number: passes[number].length)
    sizes = [new for number in shortest_first for new in _new_sizes(task, cells[number])]
    with Progress(model, sizes, ahead) as bar:
        for number in shortest_first:
            one, of_pass = passes[number], cells[number]
            scores: dict[int, Any] = {}
            with measured.patched_with(one.scheme), sharing_rows(sharing, model):
                for cell in of_pass:
                    bar.begin(f"{display_name(one.line)} at {one.length}{cell.title}")
                    wanted = [{**facts, **one.facts, **fields} for fields in cell.rows]
                    of_cell = on_main(partial(_recall, wanted, rows, cell.same_as, measured_rows))
                    if of_cell is None:
                        of_cell = _measure(model, task, cell, wanted, scores, rows, bar)
                        bar.found(of_cell)
                    else:
                        bar.skip()
                    measured_rows += of_cell
                    of_passes.setdefault(number, []).extend(of_cell)
    return [row for _, of_pass in sorted(of_passes.items()) for row in of_pass]


def _measure(
    model: nn.Module,
    task: Task,
    cell: Cell,
    wanted: Sequence[dict[str, Any]],
    scores: dict[int, Any],
    rows: Rows | None,
    bar: Progress,
) -> list[Row]:
    """Measure the rows of a cell, and write them to `rows`; `scores` holds scores shared with earlier cells of this
    pass.
    """
    key, number = Row.key_of(wanted[0]), {id(item): place for place, item in enumerate(cell.items)}
    unfinished = None if rows is None or joined().num_processes > 1 else Unfinished(rows.path)

    def score(item: Any) -> Any:
        compute = partial(task.score, model, item)
        scored = compute() if unfinished is None else unfinished.scored(key, number[id(item)], compute)
        bar.update(task.size(item))
        return scored

    began = time.perf_counter()
    new = [item for item in cell.items if id(item) not in scores]
    scores.update(zip(map(id, new), over_processes(score, new, model), strict=True))
    seconds = time.perf_counter() - began
    speed: dict[str, Any] = {}
    if unfinished is None or not unfinished.recalled:  # else a part of the time was spent in another run
        speed["seconds"] = round(seconds, 3)
        speed["tokens_per_second"] = round(sum(task.size(item) for item in new) / seconds, 1)

    def write() -> list[Row]:
        measured = [
            Row(**fields, **speed, **task.row(fields, cell.items, [scores[id(item)] for item in cell.items]))
            for fields in wanted
        ]
        written = _written(measured, rows)
        if unfinished is not None:
            unfinished.forget(key)
        return written

    return on_main(write)


def _recall(
    wanted: Sequence[dict[str, Any]], rows: Rows | None, same_as: dict[str, Any] | None, measured: Sequence[Row]
) -> list[Row] | None:
    """The rows of a cell without a measurement, if an earlier run has all of them, or this run has a row with the same
    scores.
    """
    recalled = [row for fields in wanted if rows is not None and (row := rows.recall(fields))]
    if len(recalled) == len(wanted):
        return recalled
    key = Row.key_of({**wanted[0], **same_as}) if same_as else None
    same = next((row for row in measured if row.key() == key), None)
    named = ("line", "length", "scheme")
    return _written([dataclasses.replace(same, **{n: one[n] for n in named}) for one in wanted], rows) if same else None


def _written(measured: list[Row], rows: Rows | None) -> list[Row]:
    if rows is not None:
        for row in measured:
            rows.append(row)
    return measured


def _new_sizes(task: Task, cells: Sequence[Cell]) -> list[list[int]]:
    """The sizes of the items in each cell that no earlier cell has, in tokens."""
    seen: set[int] = set()
    sizes = []
    for cell in cells:
        sizes.append([task.size(item) for item in cell.items if id(item) not in seen])
        seen |= {id(item) for item in cell.items}
    return sizes


def _check_prefixes(passes: Sequence[SchemeAtLength], model: MeasuredModel) -> None:
    """Refuse length-dependent schemes: one pass gives the losses of every prefix only if nothing depends on length."""
    for one in passes:
        has_own = one.scheme is not None and "frequencies" in one.scheme.slots
        owners = one.scheme, None if has_own else model.stacks[0].native
        if any(owner is not None and owner.length_dependent for owner in owners):
            raise EvaluationError(
                f"{one.line} depends on the length of the text, so one pass at {one.length} tokens does not measure "
                "shorter ones; use protocol 'last'"
            )
