"""One measurement of retrieval from a description of it: what the command line and the recipe share."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from rope_patch.errors import EvaluationError, did_you_mean
from rope_patch.evaluation import sharing
from rope_patch.evaluation.description import check_at_least, check_lengths
from rope_patch.evaluation.figures import can_draw
from rope_patch.evaluation.loading import load_tokenizer
from rope_patch.evaluation.measurement import Outcome, Say, SchemesAtLengths, silent
from rope_patch.evaluation.results import LineFile
from rope_patch.evaluation.retrieval import chart
from rope_patch.evaluation.retrieval.measure import check_depths, measure
from rope_patch.evaluation.retrieval.passkey import Passkey
from rope_patch.evaluation.retrieval.rows import RetrievalRow
from rope_patch.evaluation.retrieval.spans import Spans
from rope_patch.evaluation.retrieval.task import Task

TASKS = ("passkey", "spans")

MOST_DEPTHS = 1000
"""Rows of a heat map."""


@dataclass(frozen=True)
class Retrieval(SchemesAtLengths):
    """What to hide where, on what, and where the results go. The fields are the keys of the YAML.

    Attributes:
        lengths: context lengths in tokens, ascending; the model never reads more.
        schemes, references, dtype, device, attention: see `SchemesAtLengths` and `Measurement`.
        model: checkpoint folder; default the one that comes with the repository, which is for `spans`.
        text, dataset, split, column: of `spans`: see `Measurement`.
        task: `passkey`, in English, or `spans`, synthetic, for small checkpoints.
        depths: how many, evenly spaced from 0 to 1, or a list of shares; 0 is the beginning of the context.
        trials: prompts for each length and depth.
        span: tokens of a span; `spans` alone.
        batch_size: prompts of equal length that are answered together.
        output: folder of the rows, `TASK.jsonl`, and of the heat maps, `TASK.png`.
        seed: of the prompts.
    """

    _: KW_ONLY
    task: str = "passkey"
    depths: int | tuple[float, ...] = 5
    trials: int = 10
    span: int = 32
    batch_size: int = 1
    output: str = "runs/retrieval"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_depths(self.shares)
        check_at_least(self, 1, "trials", "span", "batch_size")
        if self.task not in TASKS:
            raise EvaluationError(f"task {self.task!r}: {did_you_mean(self.task, TASKS)}")
        if self.task == "passkey" and (given := self.text or self.dataset):
            raise EvaluationError(f"text {given!r}: the filler of task 'passkey' is part of it; texts are for 'spans'")

    @property
    def shares(self) -> tuple[float, ...]:
        """The depths, each a share of the context."""
        return evenly_spaced(self.depths) if isinstance(self.depths, int) else self.depths


def evenly_spaced(count: int) -> tuple[float, ...]:
    """So many depths from 0 to 1; one alone is in the middle.

    Raises:
        EvaluationError: there are less than one.
    """
    if not 1 <= count <= MOST_DEPTHS:
        raise EvaluationError(f"depths={count} is not allowed; one depth is needed, and {MOST_DEPTHS} are the most")
    return tuple(i / (count - 1) for i in range(count)) if count > 1 else (0.5,)


def run(retrieval: Retrieval, say: Say = silent) -> Outcome[RetrievalRow]:
    """Measure, writing every row to disk as it comes, and draw the heat maps. Started again, it goes on.

    Started by `torchrun` or `accelerate launch`, the processes divide the prompts; the main one writes and speaks.

    Args:
        retrieval: what to measure.
        say: see `Say`.

    Raises:
        RopePatchError, OSError: something is wrong with the description, the checkpoint, the text or the output
            folder; whatever can be known before the model is loaded is raised before.
    """
    check_lengths(retrieval.lengths)
    say = retrieval.begin(say)
    path = Path(retrieval.output) / f"{retrieval.task}.jsonl"
    results = sharing.only_main(lambda: LineFile(path, RetrievalRow))
    lengths, depths = ", ".join(map(str, retrieval.lengths)), retrieval.shares
    say(f"task {retrieval.task}: {len(retrieval.lines)} schemes at {lengths} tokens and {len(depths)} depths")
    task = _task(retrieval, load_tokenizer(retrieval.checkpoint))
    task.prompts(retrieval.lengths[0], depths[0])  # where the shortest length has no room, say so now
    model, trained = retrieval.load(say)
    rows = measure(
        model,
        task,
        retrieval.lines,
        retrieval.lengths,
        depths,
        seed=retrieval.seed,
        name=retrieval.name,
        results=results,
        trained=trained,
    )
    picture = sharing.on_main(lambda: chart.save(rows, path.with_suffix(".png")) if can_draw(say) else None)
    return Outcome(rows, path, picture)


def _task(retrieval: Retrieval, tokenizer: Any) -> Task:
    settings = {"trials": retrieval.trials, "seed": retrieval.seed, "batch_size": retrieval.batch_size}
    if retrieval.task == "passkey":
        return Passkey(tokenizer, **settings)
    longest = retrieval.lengths[-1]
    return Spans(tokenizer, retrieval.corpus(), longest=longest, span=retrieval.span, **settings)
