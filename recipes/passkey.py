"""Hide something at several depths and lengths, ask for it, and draw what each scheme finds again.

    rope-patch passkey --task spans --scheme yarn:target=auto --lengths 256,1024 --trials 2
    python recipes/passkey.py recipes/configs/passkey_tiny.yaml
    torchrun --nproc-per-node 4 recipes/passkey.py recipes/configs/passkey_tiny.yaml

Task passkey hides five digits in English filler and asks for them. Task spans, for small checkpoints, gives the
beginning of a span of text and asks for the rest. Rows are written as they are measured: run the same command again
to resume.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rope_patch.cli.options import Lengths, Measured, Specs, is_main, print_json, run, say


@dataclass(kw_only=True)
class Options(Measured):
    lengths: Lengths  # context lengths in tokens, ascending
    schemes: Specs = ()  # one for each heat map; target=auto is each length in turn
    references: bool = True  # add the heat maps of plain and window
    task: Literal["passkey", "spans"] = "passkey"  # in English, or synthetic, for small checkpoints
    depths: tuple[str, ...] = ("5",)  # how many from 0, the beginning of the context, to 1, or shares such as 0,0.5,1
    trials: int = 10  # prompts in each cell
    span: int = 32  # length of a span in tokens, for task spans
    batch_size: int = 1  # prompts of equal length in one batch
    output: str = "runs/retrieval"  # folder of TASK.jsonl and TASK.png


def main(options: Options) -> None:
    """Ask every scheme the same questions at every length and depth."""
    from rope_patch.data.corpora import load_text
    from rope_patch.errors import EvaluationError, MissingPackage, counted
    from rope_patch.evaluation.lines import check_lengths, with_references
    from rope_patch.evaluation.measured_model import take_off
    from rope_patch.evaluation.passkey import Passkey
    from rope_patch.evaluation.retrieval import RetrievalRow, check_depths, grids, measure_retrieval
    from rope_patch.evaluation.rows import Rows
    from rope_patch.evaluation.spans import Spans
    from rope_patch.evaluation.tables import display_name
    from rope_patch.saving import loading

    # what can be wrong is found before anything slow
    lines, depths = with_references(options.schemes, options.references), shares(options.depths)
    check_lengths(options.lengths)
    check_depths(depths)
    if min(options.trials, options.batch_size) < 1:
        raise EvaluationError(f"trials={options.trials}, batch_size={options.batch_size}: both must be at least 1")
    if options.task == "passkey" and (text := options.text or options.dataset):
        raise EvaluationError(f"text {text!r}: the filler of task 'passkey' is part of it; texts are for 'spans'")
    path = Path(options.output) / f"{options.task}.jsonl"
    results = Rows(path, RetrievalRow)

    checkpoint = options.model or loading.default_checkpoint()
    settings = {"dtype": options.dtype, "device": options.device, "attention": options.attention}
    with loading.quiet_transformers():
        tokenizer = loading.load_tokenizer(checkpoint)
        if options.task == "passkey":
            task: Any = Passkey(tokenizer, options.trials, options.seed)
        else:
            corpus = load_text(options.text, options.dataset, split=options.split, column=options.column)
            task = Spans(tokenizer, corpus, options.lengths[-1], options.span, options.trials, options.seed)
        task.prompts(options.lengths[0], depths[0])  # is there room in the shortest length?
        model = loading.load_model(checkpoint, **settings)
        learned = take_off(model, say)
        cells = f"{counted(len(options.lengths), 'length')} and {counted(len(depths), 'depth')}"
        say(f"task {options.task}: {counted(len(lines), 'scheme')} at {cells}")
        asked: dict[str, Any] = {"batch_size": options.batch_size, "name": options.model or "tiny-llama"}
        rows = measure_retrieval(model, task, lines, options.lengths, depths, **asked, results=results, trained=learned)
    if not is_main():
        return
    trained, found = rows[0].training_length, {display_name(line): grid for line, grid in grids(rows).items()}
    what = {"passkey": "five-digit keys", "spans": f"tokens of repeated spans of {options.span}, a synthetic task"}
    headline = f"{rows[0].model}, L = {trained}: percent of {what[options.task]}"
    if options.json:
        print_json([json.loads(row.to_json()) for row in rows])
    else:
        print_table(found, options.lengths, headline)
    within = [row.accuracy for row in rows if row.length <= trained]
    if options.task == "passkey" and within and not any(within):
        say("no scheme finds a key within the training length: this checkpoint cannot do the task; try task spans")
    try:
        draw(found, options.lengths, depths, trained, headline, path.with_suffix(".png"))
    except MissingPackage as error:
        say(str(error))
    say(f"wrote {options.output}")


def shares(words: Sequence[str]) -> list[float]:
    """Depths as they are typed: how many, evenly spaced from 0 to 1, or which."""
    from rope_patch.errors import EvaluationError

    try:
        found = [float(word) for word in ",".join(words).split(",")]
    except ValueError:
        raise EvaluationError(f"depths {','.join(words)!r}: how many, such as 5, or shares, such as 0,0.5,1") from None
    if len(found) > 1 or found[0] < 1:
        return found
    return [place / (found[0] - 1) for place in range(int(found[0]))] if found[0] > 1 else [0.5]


def print_table(found: Mapping[str, Any], lengths: Sequence[int], headline: str) -> None:
    """Means over all depths, over those that attention cut at L does not see, and the control of task spans."""
    import numpy as np
    from rich.console import Console
    from rich.table import Table

    table = Table("depths", "scheme", *map(str, lengths), title=headline)
    for title, which in [("all", 0), ("farther than L", 1), ("nothing hidden", 2)][: 3 if controlled(found) else 2]:
        for name, (accuracy, far, control) in found.items():
            means = [accuracy.mean(0), np.ma.masked_array(accuracy, ~far).mean(0).filled(np.nan), control][which]
            table.add_row(title, name, *(f"{100 * mean:.0f}".replace("nan", "-") for mean in means))
        table.add_section()
    Console().print(table)


def controlled(found: Mapping[str, Any]) -> bool:
    """Whether the task has a control: nobody guesses a passkey."""
    import numpy as np

    return not any(np.isnan(control).any() for _, _, control in found.values())


def draw(
    found: Mapping[str, Any], lengths: Sequence[int], depths: Sequence[float], trained: int, headline: str, path: Path
) -> None:
    """A heat map for each scheme: depth down, length across, and below them the control of task spans."""
    import numpy as np

    from rope_patch.evaluation.charts import write

    percents = {name: 100 * np.vstack([accuracy, control]) for name, (accuracy, _, control) in found.items()}
    down = [*(f"{depth:.0%}" for depth in depths), "nothing hidden"]
    if not controlled(found):
        percents, down = {name: cells[:-1] for name, cells in percents.items()}, down[:-1]
    note = "Above the steps, what is hidden is farther than L from the question."
    picture = heat_maps(percents, lengths, down, trained, headline, note)
    for axes, (_, far, _) in zip(picture.axes, found.values(), strict=True):
        axes.stairs(far.sum(0) - 0.5, np.arange(len(lengths) + 1) - 0.5, baseline=None, color="#D55E00", linewidth=2)
    write(picture, path)


def heat_maps(
    percents: Mapping[str, Any], lengths: Sequence[int], down: Sequence[str], trained: int, headline: str, note: str
) -> Any:
    """A figure with a heat map for each scheme: percents, `(down, lengths)`, and where the training length ends."""
    import numpy as np

    from rope_patch.evaluation.charts import SIZE, sheet

    wide = min(2, len(percents))
    high = -(-len(percents) // wide)
    caption = f"{headline}. Dashed: the training length L. {note}"
    picture, *axes = sheet(
        "Answers by context length", caption, (0.8 + 0.24 * len(down)) * high, high, wide, sharey=True
    )
    for panel, (name, cells) in zip(axes, percents.items(), strict=False):
        panel.set_title(name, loc="left", size=SIZE)
        panel.grid(False)
        panel.imshow(cells, cmap="Blues", vmin=0, vmax=100, aspect="auto")
        for (row, column), percent in np.ndenumerate(cells):
            ink = "white" if percent > 55 else "black"
            text = f"{percent:.0f}".replace("nan", "-")
            panel.text(column, row, text, ha="center", va="center", color=ink, size=SIZE)
        panel.set_xticks(range(len(lengths)), [f"{length / trained:g}L\n{length}" for length in lengths])
        panel.set_yticks(range(len(down)), down)
        panel.axvline(sum(length <= trained for length in lengths) - 0.5, color="grey", linestyle="--")
    for spare in axes[len(percents) :]:
        picture.delaxes(spare)
    return picture


if __name__ == "__main__":
    run(Options, main)
