"""LongLoRA's second table on a small checkpoint: which parameters have to be trained for a longer context?

    python -m tools.longlora tools/configs/longlora.yaml --model DIR --text stories.jsonl --eval-text held_out.txt

Adapters alone, with norms, with embeddings, with both, and all parameters: each is trained on the same tokens, once for
every rate and seed, and scored on the same held-out tokens at every length. Documents are joined to rows of `length`
tokens. Run the same command again to resume. The table is the second of Chen et al. 2023
(arXiv 2309.12307).
"""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
import sys
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rope_patch.cli.options import Lengths, Measured, Names, Numbers, print_json, run, say


@dataclass(kw_only=True)
class Options(Measured):
    """What is trained, how long, and where the results go."""

    eval_text: str | None = None  # text to measure on (default: held-out modules of the standard library)
    scheme: str = "pi:target=auto"  # auto means the length
    length: int = 1024  # tokens of a training row
    lengths: Lengths = (256, 1024)  # that are measured
    methods: Names = ("lora", "lora_norms", "lora_embeddings", "lora_norms_embeddings", "full")
    seeds: Numbers = (0, 1, 2)  # of the order of the documents, and of new adapters
    rank: int = 8  # of the adapters
    alpha: float = 16.0  # of the adapters
    steps: int = 96  # of the optimiser
    batch_size: int = 1  # rows per step
    learning_rates: tuple[float, ...] = (2e-5,)  # of AdamW (0.9, 0.95), constant after the warm-up, as in the paper
    warmup_steps: int = 20  # over which the learning rate rises
    output: str = "runs/longlora"  # folder of the results


def main(options: Options) -> None:
    """Train and measure seed by seed, so that an early end leaves whole tables."""
    from rope_patch.errors import MissingPackage
    from rope_patch.evaluation.row import Rows
    from rope_patch.saving.loading import quiet_transformers
    from rope_patch.training.checkpoints import claim

    output = Path(options.output)
    rows, points = Rows(output / "perplexity.jsonl"), Rows(output / "longlora.jsonl")
    more = ("methods", "learning_rates", "seeds", "lengths", "output", "json")  # may be added to
    claim(output, {name: value for name, value in asdict(options).items() if name not in more})
    with quiet_transformers():
        for rate, seed, method in itertools.product(options.learning_rates, options.seeds, options.methods):
            train(options, method, rate, seed, rows, points)
    if options.json:
        print_json([json.loads(point.to_json()) for point in points.rows])
    else:
        print(table(points.rows, rows.rows))
    try:
        draw(points.rows, output / "longlora.png")
    except MissingPackage as error:
        say(str(error))


def train(options: Options, method: str, rate: float, seed: int, rows: Any, points: Any) -> None:
    """One method with one rate and seed, from the checkpoint to its points."""
    import torch
    from transformers import TrainingArguments, default_data_collator, set_seed

    from rope_patch.data.corpora import load_text, name_of_text
    from rope_patch.evaluation.scheme_specs import REFERENCES, scheme_at
    from rope_patch.models.find_stacks import read_stacks
    from rope_patch.patching import mount_scheme
    from rope_patch.saving.loading import default_checkpoint, load_model, load_tokenizer
    from rope_patch.training.adapters import make_trainable
    from rope_patch.training.callbacks import PerplexityCallback
    from rope_patch.training.checkpoints import SafeTrainer
    from rope_patch.training.chunked_loss import chunked_loss

    line = f"{method}, {rate:g}, seed {seed}"
    if {point.length for point in points.rows if (point.line, point.step) == (line, options.steps)} >= {
        *options.lengths
    }:
        say(f"{line}: done before")
        return
    path = options.model or default_checkpoint()
    tokenizer, model = load_tokenizer(path), load_model(path, dtype="float32", device=options.device)
    told: dict[str, Any] = {"tokenizer": tokenizer, "lengths": options.lengths, "protocol": "last", "results": rows}
    told |= {"corpus": load_text(options.eval_text), "text": name_of_text(options.eval_text), "name": Path(path).name}
    measured = PerplexityCallback(start=False, points=points, line=line, **told)
    scheme: Any = scheme_at(options.scheme, options.length, [stack.checkpoint for stack in read_stacks(model)])
    for reference in (*REFERENCES, options.scheme):
        measured.measure(model, reference if reference in REFERENCES else scheme, 0, reference)
    mount_scheme(model, scheme)
    set_seed(seed)
    model = make_trainable(model, method, rank=options.rank, alpha=options.alpha)
    say(f"{line}: {sum(p.numel() for p in model.parameters() if p.requires_grad)} parameters are trained")
    texts = load_text(options.text, options.dataset, split=options.split or "train", column=options.column)["text"]
    arguments = TrainingArguments(
        output_dir=str(Path(options.output) / "trainer"),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        learning_rate=rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=options.warmup_steps,
        adam_beta2=0.95,
        bf16=True,  # computed in by autocast; weights and measurements are float32
        use_cpu=options.device == "cpu" or not torch.accelerator.is_available(),
        seed=seed,
        logging_steps=8,
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
    )
    data = joined(list(texts), tokenizer, options.length, options.steps * options.batch_size, seed)
    trainer = SafeTrainer(
        model, arguments, train_dataset=data, data_collator=default_data_collator, callbacks=[measured]
    )
    with chunked_loss(model), redirect_stdout(sys.stderr):  # Trainer prints its log
        trainer.train()


def joined(texts: list[str], tokenizer: Any, length: int, count: int, seed: int) -> list[dict[str, list[int]]]:
    """`count` rows of the documents in an order of their own, joined by empty lines; each begins like a context."""
    from rope_patch.data.windows import prefix_of
    from rope_patch.errors import EvaluationError

    random.Random(seed).shuffle(texts)
    prefix = prefix_of(tokenizer).tolist()
    ids = tokenizer("\n\n".join(texts), add_special_tokens=False, verbose=False)["input_ids"]
    width = length - len(prefix)
    if len(ids) < width * count:
        raise EvaluationError(f"{count} rows of {length} tokens are asked for, the text fills {len(ids) // width}")
    rows = [prefix + ids[n * width : (n + 1) * width] for n in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def table(points: list[Any], rows: list[Any]) -> str:
    """Mean and standard deviation over the seeds, and what each method lacks of full fine-tuning at the longest length,
    with a standard error over the windows.
    """
    from rope_patch.evaluation.standard_errors import standard_error

    lengths, methods = sorted({point.length for point in points}), by_method(points)
    windows = {(row.weights, row.length): row.nll_by_document for row in rows}

    def means(method: str, rate: str) -> list[float]:
        """The loss of each window, as the seeds have it on average."""
        losses = [windows[point.weights, lengths[-1]] for point in methods.get((method, rate), {}).get(lengths[-1], [])]
        return [statistics.fmean(of_seeds) for of_seeds in zip(*losses, strict=True)]

    shown = [f"{'':32}" + "".join(f"{length:>16}" for length in lengths) + f"{'minus full':>18}"]
    for (method, rate), cells in methods.items():
        row = f"{f'{method}, {rate}' if rate else method:32}"
        for nlls in ([point.nll for point in cells.get(length, [])] for length in lengths):
            spread = f" ± {statistics.stdev(nlls):.3f}" if len(nlls) > 1 else ""
            row += f"{f'{statistics.fmean(nlls):.3f}{spread}' if nlls else '-':>16}"
        apart = [one - full for one, full in zip(means(method, rate), means("full", rate), strict=False)]
        if method != "full" and apart:
            row += f"{f'{statistics.fmean(apart):+.3f} ± {standard_error(apart) or math.nan:.3f}':>18}"
        shown.append(row)
    return "\n".join(
        [*shown, "NLL in nats per token ± standard deviation over seeds; minus full ± standard error over windows"]
    )


def by_method(points: list[Any]) -> dict[tuple[str, str], dict[int, list[Any]]]:
    """The points of all seeds by method and rate, and by length; lines that are not trained have no rate."""
    groups: dict[tuple[str, str], dict[int, list[Any]]] = {}
    for point in points:
        method, rate = (*point.line.split(", "), "")[:2]
        groups.setdefault((method, rate), {}).setdefault(point.length, []).append(point)
    return groups


def draw(points: list[Any], path: Path) -> None:
    """The loss of every method at the longest length: a dot for each seed, a colour for each rate."""
    from rope_patch.evaluation import charts

    longest, groups = max(point.length for point in points), by_method(points)
    methods = list(dict.fromkeys(method for method, rate in groups if rate))[::-1]
    rates = list(dict.fromkeys(rate for _, rate in groups if rate))
    caption = f"NLL of the held-out tokens from {longest} tokens; a dot for each seed. Not trained: "
    caption += "the sliding window (dashed), the scheme (dotted)." + f" Learning rate {rates[0]}." * (len(rates) == 1)
    figure, chart = charts.sheet("What has to be trained for a longer context", caption, 0.9 + 0.36 * len(methods))
    for (method, rate), cells in groups.items():
        nlls = [point.nll for point in cells.get(longest, [])]
        if rate:
            turn = rates.index(rate)
            height = [methods.index(method) + 0.12 * (turn - (len(rates) - 1) / 2)] * len(nlls)
            label = f"learning rate {rate}" if method == methods[-1] else None
            chart.plot(nlls, height, charts.MARKERS[turn], color=charts.COLOURS[turn], label=label, alpha=0.8)
        elif method == "window":
            chart.axvline(nlls[0], color=charts.INK, linestyle="--")
        elif method != "plain":
            chart.axvline(nlls[0], color=charts.FAINT, linestyle=":")
    chart.set_yticks(range(len(methods)), [method.replace("_", " + ") for method in methods])
    chart.set_xlabel("NLL, nats per token")
    if len(rates) > 1:
        chart.legend(frameon=False, fontsize=charts.SIZE)
    charts.write(figure, path)


if __name__ == "__main__":
    run(Options, main)
