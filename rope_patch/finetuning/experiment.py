"""All schemes of a description, each trained on its own from the same checkpoint, and one report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.figures import can_draw
from rope_patch.evaluation.loading import check_checkpoint
from rope_patch.evaluation.results import LineFile, ResultFile
from rope_patch.evaluation.sharing import is_main, join, on_main, only_main, world
from rope_patch.evaluation.specs import REFERENCES, scheme_at
from rope_patch.finetuning import adapters, chart, trackers
from rope_patch.finetuning.description import FineTuning
from rope_patch.finetuning.history import Point
from rope_patch.finetuning.run import Task, check_claim, run_task
from rope_patch.finetuning.saving import CHECKPOINT


@dataclass(frozen=True)
class Outcome:
    """What a finished fine-tuning left.

    Attributes:
        points: the losses before, during and after.
        checkpoints: folder of the trained checkpoint by scheme.
        results: every row that was measured.
        picture: before and after; None without matplotlib.
        curves: loss against step; None without matplotlib.
    """

    points: list[Point]
    checkpoints: dict[str, Path]
    results: Path
    picture: Path | None
    curves: Path | None


def run(description: FineTuning, say: Callable[[str], None] = lambda _: None) -> Outcome | None:
    """Train every scheme, and draw the report anew after each. Started again, it goes on where it stopped.

    Args:
        description: what to do.
        say: is told, in a sentence each, what happens.

    Returns:
        None on other processes than the main one.

    Raises:
        RopePatchError, OSError: something is wrong with the description, the checkpoint, the text or the output;
            whatever can be known before the model is loaded is raised before.
        Diverged: a loss is not finite; the state that was saved last is intact, and left as a checkpoint besides.
    """
    join(description.device)
    check_checkpoint(description.checkpoint)
    adapters.check(description.method)
    trackers.check(description.report_to)
    if description.batch_size % world():
        raise EvaluationError(
            f"batch_size={description.batch_size} is not allowed; it must be a multiple of the {world()} processes"
        )
    for spec in description.schemes:
        scheme_at(spec, 1, 2**62)  # spelling only: the model is not there yet
    output = Path(description.output)
    on_main(lambda: check_claim(description))
    rows = only_main(lambda: ResultFile(output / "perplexity.jsonl"))
    points = only_main(lambda: LineFile(output / "points.jsonl", Point))
    folders = {spec: output / folder_name(spec) for spec in description.schemes}
    outcome, drawing = None, can_draw(say)
    for spec, folder in folders.items():
        say(f"{spec}: {description.steps} steps of {description.batch_size} rows of {description.length} tokens")
        task = Task(description, spec, folder, rows, points, say if is_main() else lambda _: None)
        run_task(task)
        outcome = only_main(lambda: _report(description, points, folders, drawing))  # called at once
    return outcome


def folder_name(spec: str) -> str:
    """A scheme as the name of a folder."""
    return "".join(letter if letter.isalnum() or letter in "._" else "-" for letter in spec)


def _report(
    description: FineTuning, points: LineFile[Point] | None, folders: dict[str, Path], drawing: bool
) -> Outcome:
    wanted = {*REFERENCES, *folders}
    found = [point for point in points.rows if point.scheme in wanted] if points is not None else []
    output = Path(description.output)
    picture = chart.save(found, description.length, output / "finetune.png") if drawing else None
    begun = {spec: folder for spec, folder in folders.items() if folder.exists()}
    curves = chart.save_curves(begun, description.length, output / "loss.png") if drawing else None
    checkpoints = {spec: path for spec, folder in folders.items() if (path := folder / CHECKPOINT).exists()}
    return Outcome(found, checkpoints, output / "perplexity.jsonl", picture, curves)
