"""The losses of several schemes with static frequencies from one forward: each row of a batch runs under one scheme."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rope_patch.evaluation.measured_model import MeasuredModel
from rope_patch.evaluation.nll import chunked_nll
from rope_patch.evaluation.processes import on_main, over_processes
from rope_patch.evaluation.protocols.protocol import Context, Protocol
from rope_patch.evaluation.row import Row, Rows
from rope_patch.evaluation.scheme_specs import schemes_at_lengths
from rope_patch.schemes import Scheme
from rope_patch.typing import NO_WEIGHTS, Frequencies, Lengths, RotarySpec, Weights


@dataclass(frozen=True)
class SideBySide(Scheme):
    """A scheme that gives every row of a batch the static frequencies of a different scheme."""

    name = "side_by_side"
    length_dependent = True  # so that frequencies may differ by row

    schemes: tuple[Scheme, ...]

    def frequencies(self, rotary: RotarySpec, length: Lengths = None, weights: Weights = NO_WEIGHTS) -> Frequencies:
        """The frequencies of each scheme, `(len(schemes), d/2)`; the arguments are those of `Scheme.frequencies`."""
        each = [scheme.frequencies(rotary) for scheme in self.schemes]
        device = None if length is None else length.device
        temperatures = torch.tensor([[float(one.attention_scaling)] for one in each], device=device)
        return Frequencies(torch.stack([one.inv_freq for one in each]).to(device), temperatures)


def measure_together(
    model: MeasuredModel, task: Protocol, length: int, schemes: Sequence[Scheme], rows: Rows, name: str
) -> list[Row]:
    """Measure schemes with static frequencies together, with one forward for each context; the rows equal those of
    `run`.

    Args:
        schemes: the schemes; memory has to hold one context for each.
        rows: file for new rows; rows of an earlier run in it are not measured again.
        name: name of the model in the rows.
    """
    (cell,) = task.cells(length)
    jobs = schemes_at_lengths(schemes, [length], model)
    facts = {**model.facts(name), "task": task.name}
    wanted: list[dict[str, Any]] = [{**facts, **job.facts, **cell.rows[0]} for job in jobs]
    known: list[Any] = on_main(lambda: [rows.recall(fields) for fields in wanted])
    new = [index for index, row in enumerate(known) if row is None]
    if not new:
        return known
    together = schemes[new[0]] if len(new) == 1 else SideBySide(tuple(schemes[index] for index in new))

    def score(item: Context) -> torch.Tensor:
        tokens = item.tokens.to(model.language_model.device).expand(len(new), -1)
        losses = chunked_nll(model.model, tokens[:, :-1], tokens[:, item.start + 1 :])
        return losses[:, : item.stop - item.start].double().cpu()

    began = time.perf_counter()
    with model.patched_with(together):
        scores = over_processes(score, cell.items, model.model)
    seconds = (time.perf_counter() - began) / len(new)

    def write() -> list[Row]:
        for place, index in enumerate(new):
            fields = {**wanted[index], "seconds": round(seconds, 3)}
            fields["tokens_per_second"] = round(sum(map(task.size, cell.items)) / seconds, 1)
            known[index] = Row(**fields, **task.row(fields, cell.items, [losses[place] for losses in scores]))
            rows.append(known[index])
        return known

    return on_main(write)
