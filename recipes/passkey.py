"""Hide a passkey or a span at several depths and lengths, and draw what each scheme finds.

    rope-patch passkey --task spans --scheme yarn:target=auto --lengths 256,1024 --trials 2
    python recipes/passkey.py recipes/configs/passkey_tiny.yaml
    torchrun --nproc-per-node 4 recipes/passkey.py recipes/configs/passkey_tiny.yaml

Task passkey hides five digits in English filler and asks for them. Task spans, for small checkpoints, gives the
beginning of a span of text and asks for the rest. Results are saved as you go: run the same command again to resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rope_patch.cli.options import (
    Folder,
    Lengths,
    Measured,
    Specs,
    is_main,
    run,
    say,
)
from rope_patch.cli.report import report

if TYPE_CHECKING:
    from rope_patch.evaluation.verdict import Verdict


@dataclass(kw_only=True)
class Options(Measured):
    lengths: Lengths  # context lengths to measure, ascending: tokens, or multiples of L such as 4x
    schemes: Specs = ()  # scheme to measure, a heat map; target=auto takes each length in turn
    references: bool = True  # include the heat maps of plain and window
    task: Literal["passkey", "spans"] = "passkey"  # passkey is in English; spans suits small checkpoints
    depths: tuple[str, ...] = ("5",)  # number of depths from 0 (the beginning) to 1, or a list such as 0,0.5,1
    trials: int = 10  # prompts in each cell
    span: int = 32  # under spans, tokens of a span
    batch_size: int = 1  # prompts in one batch
    output: Folder = "runs/retrieval"  # folder for TASK.jsonl and TASK.png


def main(options: Options) -> Verdict | None:
    """Ask every scheme the same questions at every length and depth."""
    from rope_patch.data.corpora import load_text
    from rope_patch.errors import EvaluationError, counted
    from rope_patch.evaluation.measured_model import pop_scheme
    from rope_patch.evaluation.row import Rows
    from rope_patch.evaluation.run import run as run_task
    from rope_patch.evaluation.scheme_specs import REFERENCES, check_lengths, with_references
    from rope_patch.evaluation.tasks.passkey import Passkey
    from rope_patch.evaluation.tasks.repeated_spans import RepeatedSpans
    from rope_patch.evaluation.tasks.retrieval import Retrieval, check_depths
    from rope_patch.evaluation.verdict import of_answers
    from rope_patch.saving.loading import default_checkpoint, load_model, load_tokenizer, quiet_transformers

    # what can be wrong is found before anything slow
    schemes, depths = with_references(options.schemes, REFERENCES if options.references else ()), shares(options.depths)
    check_lengths(options.lengths)
    check_depths(depths)
    if min(options.trials, options.batch_size) < 1:
        raise EvaluationError(f"trials={options.trials}, batch_size={options.batch_size}: both must be at least 1")
    if options.task == "passkey" and (text := options.text or options.dataset):
        raise EvaluationError(f"text {text!r}: the filler of task 'passkey' is part of it; texts are for 'spans'")
    results = Rows(Path(options.output) / f"{options.task}.jsonl")

    checkpoint = options.model or default_checkpoint()
    asked: dict[str, Any] = {"depths": depths, "trials": options.trials, "seed": options.seed}
    asked["batch_size"] = options.batch_size
    task: Retrieval
    with quiet_transformers():
        tokenizer = load_tokenizer(checkpoint)
        if options.task == "passkey":
            task = Passkey(tokenizer, **asked)
        else:
            corpus = load_text(options.text, options.dataset, split=options.split, column=options.column)
            task = RepeatedSpans(tokenizer, corpus, options.lengths[-1], options.span, **asked)
        task.prompts(options.lengths[0], depths[0])  # is there room in the shortest length?
        model = load_model(checkpoint, dtype=options.dtype, device=options.device, attention=options.attention)
        trained = pop_scheme(model, say)
        cells = f"{counted(len(options.lengths), 'length')} and {counted(len(depths), 'depth')}"
        say(f"task {options.task}: {counted(len(schemes), 'scheme')} at {cells}")
        name = options.model or "tiny-llama"
        rows = run_task(model, task, schemes, options.lengths, results, name=name, trained=trained)

    if not is_main():
        return None
    within = [row.accuracy for row in rows if row.length <= row.training_length]
    if options.task == "passkey" and within and not any(within):
        say("no scheme finds a key within the training length: this checkpoint cannot do the task; try task spans")
    return report(rows, options, results.path, of_answers(rows), what=task.what)


def shares(words: Sequence[str]) -> list[float]:
    """Convert typed depths: a number of depths, evenly spaced from 0 to 1, or a list of depths."""
    from rope_patch.errors import EvaluationError

    try:
        numbers = [float(word) for word in ",".join(words).split(",")]
    except ValueError:
        raise EvaluationError(f"depths {','.join(words)!r}: how many, such as 5, or shares, such as 0,0.5,1") from None
    if len(numbers) > 1 or numbers[0] < 1:
        return numbers
    count = int(numbers[0])
    return [place / (count - 1) for place in range(count)] if count > 1 else [0.5]


if __name__ == "__main__":
    run(Options, main)
