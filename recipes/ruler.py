"""Run four tasks of RULER at several lengths, and draw what each scheme answers.

    rope-patch ruler --model DIR --scheme yarn:target=auto --lengths 4096,8192,16384 --samples 20
    python recipes/ruler.py recipes/configs/ruler_smollm2.yaml
    torchrun --nproc-per-node 4 recipes/ruler.py recipes/configs/ruler.yaml

The tasks are a needle in noise (niah_single_1), chains of variables (vt), common words (cwe) and frequent words
(fwe), with the prompts of NVIDIA/RULER for the same seed. Results are saved as you go: run the same command again to
resume.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rope_patch.cli.options import (
    Folder,
    Lengths,
    Measured,
    OptionalFile,
    OptionalName,
    Specs,
    is_main,
    run,
    say,
)
from rope_patch.cli.report import report


@dataclass(kw_only=True)
class Options(Measured):
    text: OptionalFile = None  # refused: the tasks bring their own texts
    dataset: OptionalName = None  # refused, like --text
    lengths: Lengths  # lengths to measure, ascending, each for a prompt with its longest answer
    schemes: Specs = ()  # scheme to measure, a heat map; target=auto takes each length in turn
    references: bool = True  # include the heat maps of plain and window
    tasks: tuple[Literal["niah_single_1", "vt", "cwe", "fwe"], ...] = ("niah_single_1", "vt", "cwe", "fwe")  # the tasks
    samples: int = 20  # samples of each task at each length; RULER takes 500
    chat: bool = False  # put the questions into the tokenizer's chat template
    seed: int = 42  # random seed of the prompts, as in RULER
    output: Folder = "runs/ruler"  # folder for ruler.jsonl and ruler.png


def main(options: Options) -> None:
    """Ask every scheme the same questions at every length."""
    from rope_patch.errors import EvaluationError, counted
    from rope_patch.evaluation.measured_model import pop_scheme
    from rope_patch.evaluation.row import Rows
    from rope_patch.evaluation.run import run as run_task
    from rope_patch.evaluation.scheme_specs import REFERENCES, check_lengths, with_references
    from rope_patch.evaluation.tables import failed_within
    from rope_patch.evaluation.tasks.ruler import Ruler
    from rope_patch.evaluation.verdict import of_answers
    from rope_patch.saving.loading import default_checkpoint, load_model, load_tokenizer, quiet_transformers

    # what can be wrong is found before anything slow
    schemes = with_references(options.schemes, REFERENCES if options.references else ())
    check_lengths(options.lengths)
    if options.samples < 1:
        raise EvaluationError(f"samples={options.samples}: at least 1 is needed, and 2 for a standard error")
    if text := options.text or options.dataset:
        raise EvaluationError(f"text {text!r}: the texts of RULER's tasks are part of them")
    results = Rows(Path(options.output) / "ruler.jsonl")

    checkpoint = options.model or default_checkpoint()
    with quiet_transformers():
        task = Ruler(load_tokenizer(checkpoint), options.samples, options.tasks, options.seed, options.chat)
        task.cells(options.lengths[0])  # is there room in the shortest length?
        model = load_model(checkpoint, dtype=options.dtype, device=options.device, attention=options.attention)
        trained = pop_scheme(model, say)
        cells = f"{counted(len(schemes), 'scheme')} at {counted(len(options.lengths), 'length')}"
        say(f"{counted(len(options.tasks), 'task')}: {cells}")
        name = options.model or "tiny-llama"
        rows = run_task(model, task, schemes, options.lengths, results, name=name, trained=trained)

    if not is_main():
        return
    if options.lengths[0] > rows[0].training_length:
        say(
            f"no length within L = {rows[0].training_length} was measured: it is not known whether this "
            "checkpoint can do the tasks"
        )
    for name, score in failed_within(rows).items():
        say(
            f"task {name} means nothing here: within its training length this checkpoint gives {score:.0%} of the "
            "answers under the best scheme; it cannot do the task"
        )
    what = f"{task.what}, ± standard error of {options.samples} samples"
    report(rows, options, results.path, of_answers(rows), what=what)


if __name__ == "__main__":
    run(Options, main)
