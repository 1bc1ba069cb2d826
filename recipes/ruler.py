"""Ask four tasks of RULER at several lengths, and draw what each scheme answers.

    rope-patch ruler --model DIR --scheme yarn:target=auto --lengths 4096,8192,16384 --samples 20
    python recipes/ruler.py recipes/configs/ruler_smollm2.yaml
    torchrun --nproc-per-node 4 recipes/ruler.py recipes/configs/ruler.yaml

The tasks are a needle in noise (niah_single_1), chains of variables (vt), common words (cwe) and frequent words
(fwe), with the prompts of NVIDIA/RULER for the same seed. Rows are written as they are measured: run the same command
again to resume.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rope_patch.cli.options import Lengths, Measured, Specs, is_main, load_recipe, print_json, run, say


@dataclass(kw_only=True)
class Options(Measured):
    lengths: Lengths  # of a prompt with its longest answer, in tokens, ascending
    schemes: Specs = ()  # one for each heat map; target=auto is each length in turn
    references: bool = True  # add the heat maps of plain and window
    tasks: tuple[Literal["niah_single_1", "vt", "cwe", "fwe"], ...] = ("niah_single_1", "vt", "cwe", "fwe")
    samples: int = 20  # of each task at each length; RULER takes 500
    chat: bool = False  # put the questions into the chat template of the tokenizer
    seed: int = 42  # of the prompts; RULER's own
    output: str = "runs/ruler"  # folder of ruler.jsonl and ruler.png


def main(options: Options) -> None:
    """Ask every scheme the same questions at every length."""
    from rope_patch.errors import EvaluationError, MissingPackage, counted
    from rope_patch.evaluation.lines import check_lengths, display_name, with_references
    from rope_patch.evaluation.measured_model import take_off
    from rope_patch.evaluation.rows import Rows
    from rope_patch.evaluation.ruler import Ruler, RulerRow, failed_within, measure_ruler
    from rope_patch.saving import loading

    # what can be wrong is found before anything slow
    lines = with_references(options.schemes, options.references)
    check_lengths(options.lengths)
    if options.samples < 1:
        raise EvaluationError(f"samples={options.samples}: at least 1 is needed, and 2 for a standard error")
    if text := options.text or options.dataset:
        raise EvaluationError(f"text {text!r}: the texts of RULER's tasks are part of them")
    path = Path(options.output) / "ruler.jsonl"
    results = Rows(path, RulerRow)

    checkpoint = options.model or loading.default_checkpoint()
    settings = {"dtype": options.dtype, "device": options.device, "attention": options.attention}
    with loading.quiet_transformers():
        ruler = Ruler(loading.load_tokenizer(checkpoint), options.samples, options.seed, options.chat)
        for task in options.tasks:
            ruler.draw(task, options.lengths[0])  # is there room in the shortest length?
        model = loading.load_model(checkpoint, **settings)
        learned = take_off(model, say)
        cells = f"{counted(len(lines), 'scheme')} at {counted(len(options.lengths), 'length')}"
        say(f"{counted(len(options.tasks), 'task')}: {cells}")
        asked: dict[str, Any] = {"name": options.model or "tiny-llama", "results": results, "trained": learned}
        rows = measure_ruler(model, ruler, options.tasks, lines, options.lengths, **asked)
    if not is_main():
        return
    trained, failed = rows[0].training_length, failed_within(rows)
    found = {(display_name(row.line), row.task, row.length): row for row in rows}
    headline = f"{Path(rows[0].model).name}, L = {trained}: RULER, percent of the answers given"
    if options.json:
        print_json([json.loads(row.to_json()) for row in rows])
    else:
        print_table(found, options.lengths, failed, f"{headline}, ± standard error of {options.samples} samples")
    try:
        draw(found, options.lengths, failed, trained, headline, path.with_suffix(".png"))
    except MissingPackage as error:
        say(str(error))
    if options.lengths[0] > trained:
        say(f"no length within L = {trained} was measured: nobody knows whether this checkpoint can do the tasks")
    for task, score in failed.items():
        say(
            f"task {task} means nothing here: within its training length this checkpoint gives {score:.0%} of the "
            "answers under the best scheme; it cannot do the task"
        )
    say(f"wrote {options.output}")


def print_table(found: Mapping[Any, Any], lengths: Sequence[int], failed: Mapping[str, float], headline: str) -> None:
    """Scores with their standard errors, task by task."""
    from rich.console import Console
    from rich.table import Table

    table = Table("task", "scheme", *map(str, lengths), title=headline)
    lines = list(dict.fromkeys(line for line, _, _ in found))
    for task in dict.fromkeys(task for _, task, _ in found):
        for line in lines:
            rows = [found[line, task, length] for length in lengths]
            error = ["" if row.error is None else f" ± {100 * row.error:.0f}" for row in rows]
            cells = [f"{100 * row.score:.0f}{each}" for row, each in zip(rows, error, strict=True)]
            table.add_row(label(task, failed), line, *cells)
        table.add_section()
    Console().print(table)


def draw(
    found: Mapping[Any, Any],
    lengths: Sequence[int],
    failed: Mapping[str, float],
    trained: int,
    headline: str,
    path: Path,
) -> None:
    """A heat map for each scheme: task down, length across."""
    import numpy as np

    from rope_patch.evaluation.charts import write

    tasks = list(dict.fromkeys(task for _, task, _ in found))
    percents = {
        line: np.array([[100 * found[line, task, length].score for length in lengths] for task in tasks])
        for line in dict.fromkeys(line for line, _, _ in found)
    }
    note = "A task that the checkpoint cannot do within L means nothing." if failed else ""
    labels = [label(task, failed) for task in tasks]
    write(load_recipe("passkey").heat_maps(percents, lengths, labels, trained, headline, note), path)


def label(task: str, failed: Mapping[str, float]) -> str:
    """The task, and whether its row means anything."""
    return f"{task}\n(means nothing)" if task in failed else task


if __name__ == "__main__":
    run(Options, main)
