"""Train the same small model under each position encoding, and draw perplexity against context length.

    python recipes/compare_encodings.py recipes/configs/compare_demo.yaml
    rope-patch compare --encodings rope nope alibi --steps 100 --output runs/three
    rope-patch compare recipes/configs/compare.yaml --costs

Under one seed, weights and batches are the same for every encoding. Each model is trained on bytes at a short length,
then scored on the same held-out bytes from contexts of 1, 2, 4 and 8 times that length. "linear" before a scheme, as in
`linear rope`, trains the model with linear attention. Results are saved as you go: run the same command again to
resume. Two processes may share one output if `--only` gives them different encodings. `--costs` times a training step
of each encoding instead: both models take their steps in turn in one process, so that other work on the machine slows
both, and the ratio is taken within each turn. Memory is the bytes that autograd keeps between the passes: the CPU's
allocator counts no peak. `python -m tools.encodings_table` draws the table and the chart of the documentation.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from rope_patch.cli.options import (
    Count,
    Folder,
    Name,
    Names,
    Numbers,
    OptionalFile,
    in_one_process,
    print_json,
    run,
    say,
)
from rope_patch.errors import EvaluationError, MissingPackage, RopePatchError, did_you_mean
from rope_patch.json_files import read_fields, read_rows, read_settings

LINEAR = "linear "  # before a scheme: under linear attention

# the fields that are read from the rows of earlier runs, and their types, by file
FIELDS: dict[str, dict[str, Any]] = {}
FIELDS["costs.jsonl"] = {"encoding": str, "relative_speed": float, "relative_memory": float}
FIELDS["results.jsonl"] = {"encoding": str, "seed": int, "length": int, "nll": float | None, "failure": str | None}
FIELDS["results.jsonl"] |= {"slots": list[str], "windows": int, "encoding_parameters": int}


@dataclass(kw_only=True)
class Options:
    encodings: Names  # encodings to compare, such as rope nope alibi "linear rope"
    only: Names = ()  # of these encodings, train or time only some
    seeds: Numbers = (0,)  # random seeds; each gives other weights and other batches
    output: Folder = "runs/compare"  # folder for the rows, the table and the chart
    train_text: OptionalFile = None  # file or folder to train on (default: the standard library, no held-out modules)
    held_out_text: OptionalFile = None  # file or folder to measure on (default: the held-out modules)
    context: int = 128  # training length L in bytes
    multiples: Numbers = (1, 2, 4, 8)  # lengths to measure, in multiples of L
    targets: int = 64  # number of scored bytes in each window, the same at every length
    documents: Count = None  # number of held-out documents (default: all that are long enough)
    windows_per_document: int = 4  # windows scored in each document
    hidden_size: int = 64  # width of the model
    intermediate_size: int = 160  # width of its MLPs
    layers: int = 4  # number of layers
    heads: int = 4  # number of attention heads
    batch_size: int = 16  # rows in a step
    steps: int = 1000  # optimiser steps
    warmup_steps: int = 50  # steps over which the learning rate rises
    decay_steps: int = 250  # last steps, over which the learning rate falls to zero
    learning_rate: float = 0.004  # highest learning rate
    weight_decay: float = 0.1  # weight decay of the matrices, except those that an encoding learns
    evaluate_every: int = 100  # steps between two points of the loss curve
    save_every: int = 100  # steps between two checkpoints
    device: Name = "cpu"  # device to run on
    threads: int = 1  # CPU threads; models as small as these gain little from a second one
    costs: bool = False  # do not train; time a step of each encoding in turn with one of rope
    cost_repetitions: int = 15  # timed steps of each encoding
    json: bool = False  # print one JSON document instead of the table
    resumes: ClassVar[bool] = True


def main(options: Options) -> None:
    """Train and measure missing encodings, then write the table and the chart of all rows."""
    import torch
    from transformers.utils import logging

    check(options)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    texts = read_texts(options)
    results, chosen = Path(options.output) / "results.jsonl", options.only or options.encodings
    if options.costs:
        measure_costs(chosen, texts["train"], options)
    # seed by seed, so that a part of the seeds is a whole comparison
    for seed, spec in itertools.product(() if options.costs else options.seeds, chosen):
        done = {row["length"] for row in read(results) if (row["encoding"], row["seed"]) == (spec, seed)}
        lengths = [n for m in options.multiples if (n := m * options.context) not in done]
        rows = train_and_score(spec, seed, lengths, texts, options) if lengths else []
        for row in rows:
            append(results, row)
            say(f"{spec}, seed {seed}, {row['length']} bytes: {row['failure'] or 'NLL {nll:.3f}'.format(**row)}")
    if rows := [row for row in read(results) if row["encoding"] in options.encodings]:
        report(rows, options)


def check(options: Options) -> None:
    """Refuse wrong options before the training."""
    in_one_process("compare")
    for spec in options.encodings:
        scheme_of(spec)
    for spec in options.only:
        if spec not in options.encodings:
            raise EvaluationError(f"only {spec!r}: not among the encodings; {did_you_mean(spec, options.encodings)}")
    for name in ("encodings", "seeds", "multiples"):
        if not (values := getattr(options, name)) or len(set(values)) < len(values):
            raise EvaluationError(f"{name}={list(values)} is not allowed; it must name one or more, each once")
    if options.multiples[0] != 1 or sorted(options.multiples) != list(options.multiples):
        raise EvaluationError(f"multiples={list(options.multiples)} is not allowed; they begin with 1 and ascend")
    if not 1 <= options.targets <= options.context:
        raise EvaluationError(f"targets={options.targets} is not allowed; at most context={options.context} is")
    if options.hidden_size % (2 * options.heads):
        raise EvaluationError(f"hidden_size={options.hidden_size} is not a multiple of 2 * heads = {2 * options.heads}")
    if (options.train_text is None) != (options.held_out_text is None):
        raise EvaluationError("train_text and held_out_text: give both or neither")
    for spec in options.encodings:
        if spec.startswith(LINEAR):
            build(spec, 0, options)


def scheme_of(spec: str) -> Any:
    """The scheme of an encoding, whatever attention it has."""
    from rope_patch.schemes import get_scheme

    return get_scheme(spec.removeprefix(LINEAR))


def read_texts(options: Options) -> dict[str, Any]:
    """The bytes to train on, the held-out bytes, each document closed by a zero, and the windows that are scored.

    Settings that all rows of a table share are kept beside the rows.
    """
    import torch

    from rope_patch.data.corpora import load_text
    from rope_patch.data.windows import select_windows

    streams = {}
    for split, text in (("train", options.train_text), ("held_out", options.held_out_text)):
        corpus = load_text(text, split=split)  # without a text the standard library
        streams[split] = bytearray(b"".join(document.encode() + b"\0" for document in corpus["text"]))
        if len(streams[split]) < options.context + 2:
            raise EvaluationError(f"the {split} text is too short; a context of {options.context} bytes needs 2 more")
    windows = select_windows(
        corpus,
        Bytes(),
        longest=options.multiples[-1] * options.context,
        targets=options.targets,
        documents=options.documents,
        windows_per_document=options.windows_per_document,
    )
    of_rows = {"encodings", "only", "seeds", "output", "evaluate_every", "save_every", "device", "threads", "json"}
    of_rows |= {"costs", "cost_repetitions"}
    settings = {name: value for name, value in vars(options).items() if name not in of_rows}
    digest = hashlib.sha256(streams["train"]).hexdigest()[:16]
    settings |= {"multiples": list(options.multiples), "train_text": digest, "held_out_text": windows.fingerprint}
    path = Path(options.output) / "settings.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_text(json.dumps(settings, indent=2) + "\n")
    recorded = read_settings(path)
    if other := [
        f"{name}={recorded.get(name)} there, {mine} here"
        for name, mine in settings.items()
        if recorded.get(name) != mine
    ]:
        raise EvaluationError(f"{path.parent} holds rows of other settings ({'; '.join(other)}); choose another output")
    return {"windows": windows, **{split: torch.frombuffer(text, dtype=torch.uint8) for split, text in streams.items()}}


class Bytes:
    """A tokenizer to which every byte of UTF-8 is a token."""

    bos_token_id = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:  # noqa: D102
        return {"input_ids": list(text.encode())}


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, which have its `FIELDS`; a last line that a kill has truncated is dropped."""
    content = path.read_bytes() if path.exists() else b""
    rows, size = read_rows(path, content, partial(read_fields, allowed=FIELDS.get(path.name, {})))
    if size < len(content):
        os.truncate(path, size)
    return rows


def append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:  # a whole line at once, so that two processes may share the file
        file.write(json.dumps(row, allow_nan=False) + "\n")


def train_and_score(
    spec: str, seed: int, lengths: list[int], texts: dict[str, Any], options: Options
) -> list[dict[str, Any]]:
    """Measure a row per length. An encoding that fails gets rows with the reason, and the others continue."""
    import torch

    from rope_patch.evaluation.nll import chunked_nll
    from rope_patch.evaluation.row import provenance

    scheme, windows, began, failure = scheme_of(spec), texts["windows"], time.monotonic(), None
    model, learned = build(spec, seed, options)
    try:
        train(model, learned, spec, seed, texts, options)
    except (RopePatchError, RuntimeError) as error:
        failure = f"{type(error).__name__}: {error}"
    shared = {
        "encoding": spec,
        "scheme": scheme.to_dict(),
        "slots": ["linear attention"] if spec.startswith(LINEAR) else sorted(scheme.slots),
        "seed": seed,
        "training_length": options.context,
        "steps": options.steps,
        "tokens_seen": options.steps * options.batch_size * options.context,
        "training_seconds": round(time.monotonic() - began, 2),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "encoding_parameters": sum(parameter.numel() for parameter in learned),
        "protocol": "last",
        "documents": windows.documents,
        "windows": len(windows.windows),
        "targets": options.targets,
        "precision": "float32",
        "device": options.device,
        **provenance(),
    }
    rows = []
    for length in lengths:
        row = {**shared, "length": length, "failure": failure, "nll": None}
        tokens = torch.stack([window.context(length) for window in windows.windows]).to(options.device)
        try:  # four windows at once: a bias by content takes memory for every pair of bytes
            parts = () if failure else tokens.split(4)
            nll = [chunked_nll(model.eval(), part[:, :-1], part[:, -options.targets :]) for part in parts]
            mean = torch.cat(nll).double().mean().item() if nll else math.nan
            row |= {"nll": mean} if math.isfinite(mean) else {"failure": failure or f"the NLL is {mean}"}
        except (RopePatchError, RuntimeError) as error:  # such as a position beyond the last learned one
            row["failure"] = f"{type(error).__name__}: {error}"
        rows.append(row)
    return rows


def build(spec: str, seed: int, options: Options) -> tuple[Any, list[Any]]:
    """Build the patched model before training, and return it with the parameters that the encoding adds."""
    import torch
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    from rope_patch.attention import linear
    from rope_patch.patching import mount_scheme

    torch.manual_seed(seed)  # the same weights whatever is patched onto them
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        max_position_embeddings=options.context,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="linear" if spec.startswith(LINEAR) else None,
    )
    AttentionInterface.register("linear", linear.attention_function)
    model = LlamaForCausalLM(config).to(options.device)
    own = {id(parameter) for parameter in model.parameters()}
    mount_scheme(model, scheme_of(spec))
    for layer in model.model.layers if spec.startswith(LINEAR) else ():
        if layer.self_attn.config._attn_implementation != "linear":
            raise EvaluationError(
                f"{spec!r}: linear attention has no scores; use a static rotation, or positions at the input"
            )
        layer.self_attn.register_forward_pre_hook(linear.rotate_after_feature_map, with_kwargs=True)
    return model, [parameter for parameter in model.parameters() if id(parameter) not in own]


def train(model: Any, learned: list[Any], spec: str, seed: int, texts: dict[str, Any], options: Options) -> None:
    """Train in place, from the newest checkpoint if a stopped training left one, and keep the loss curve."""
    import torch
    from transformers import PrinterCallback, TrainingArguments

    from rope_patch.training.checkpoints import SafeTrainer

    readable = "".join(letter if letter.isalnum() else "_" for letter in spec)
    folder = Path(options.output) / "runs" / f"{readable}-seed_{seed}"
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=options.batch_size,
        train_sampling_strategy="sequential",  # the crops were drawn at random
        max_grad_norm=1.0,
        eval_strategy="steps",
        eval_steps=options.evaluate_every,
        logging_steps=options.evaluate_every,
        save_steps=options.save_every,
        save_total_limit=1,
        use_cpu=options.device == "cpu",
        disable_tqdm=True,
        report_to="none",
    )
    warmup, decay = options.warmup_steps, options.decay_steps
    optimizer = make_optimizer(model, learned, options)
    schedule = torch.optim.lr_scheduler.LambdaLR(  # it rises, stays, and falls to zero
        optimizer, lambda step: min(1.0, (step + 1) / warmup, (options.steps - step) / decay)
    )
    spread = torch.linspace(0, len(texts["held_out"]) - options.context - 1, 64).long()
    trainer = SafeTrainer(
        model,
        arguments,
        train_dataset=[crop for step in range(options.steps) for crop in draw(texts["train"], seed, step, options)],
        eval_dataset=crops(texts["held_out"], spread, options),
        compute_loss_func=loss_of,
        optimizers=(optimizer, schedule),
    )
    trainer.remove_callback(PrinterCallback)  # it prints on stdout
    trainer.resume()
    curve: dict[int, dict[str, float]] = {}
    for point in trainer.state.log_history:
        names = {"loss": "train_nll", "eval_loss": "held_out_nll", "learning_rate": "learning_rate"}
        numbers = {name: point[logged] for logged, name in names.items() if logged in point}
        curve.setdefault(point["step"], {"step": point["step"]}).update(numbers)
    append(Path(options.output) / "curves.jsonl", {"encoding": spec, "seed": seed, "curve": list(curve.values())})
    shutil.rmtree(folder)


def draw(stream: Any, seed: int, step: int, options: Options) -> list[dict[str, Any]]:
    """Draw the batch of a step, which depends only on the seed and the step."""
    import torch

    random = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(stream) - options.context - 1, (options.batch_size,), generator=random)
    return crops(stream, starts, options)


def crops(stream: Any, starts: Any, options: Options) -> list[dict[str, Any]]:
    """L bytes from each start, and the L bytes that they predict."""
    rows = [stream[start : start + options.context + 1].long() for start in starts.tolist()]
    return [{"input_ids": row[:-1], "labels": row[1:]} for row in rows]


def loss_of(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """Mean NLL in nats per byte; the labels are shifted already."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(outputs.logits.flatten(0, 1).float(), labels.flatten())


def make_optimizer(model: Any, learned: list[Any], options: Options) -> Any:
    """AdamW with weight decay on the matrices, except those that the encoding learns."""
    import torch

    spared = {id(parameter) for parameter in learned}
    matrices = [p for p in model.parameters() if p.ndim >= 2 and id(p) not in spared]
    others = [p for p in model.parameters() if p.ndim < 2 or id(p) in spared]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95), fused=True)


def measure_costs(encodings: tuple[str, ...], stream: Any, options: Options) -> None:
    """Append a row to `costs.jsonl` for each encoding that has none."""
    path = Path(options.output) / "costs.jsonl"
    for spec in encodings:
        if spec not in {row["encoding"] for row in read(path)}:
            append(path, row := cost_of(spec, stream, options))
            say(f"{spec}: {row['relative_speed']:.2f}x the speed of rope, {row['relative_memory']:.2f}x its memory")


def cost_of(spec: str, stream: Any, options: Options) -> dict[str, Any]:
    """The row of one encoding: medians of the ratios to rope, with their quartiles."""
    import torch

    from rope_patch.evaluation.row import provenance

    def forward(model: Any, step: int) -> torch.Tensor:
        batch = torch.utils.data.default_collate(draw(stream, 0, step, options))
        return loss_of(model(batch["input_ids"].to(options.device)), batch["labels"].to(options.device))

    built = [build(name, 0, options) for name in ("rope", spec)]
    sides = [(model, make_optimizer(model, learned, options)) for model, learned in built]
    times: list[list[float]] = []
    for step in range(2 + options.cost_repetitions):
        times.append([])
        for model, optimizer in sides:
            began = time.perf_counter()
            forward(model, step).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            next(model.parameters()).sum().item()  # waits for an accelerator
            times[-1].append(time.perf_counter() - began)
    turns = times[2:]  # the first two warm up
    slowest, speed, fastest = statistics.quantiles([rope / own for rope, own in turns], n=4, method="inclusive")
    of_rope, kept = (kept_for_backward(model, lambda model=model: forward(model, 0)) for model, _ in sides)
    return {
        "encoding": spec,
        "tokens_per_second": options.batch_size * options.context / statistics.median(own for _, own in turns),
        "relative_speed": speed,
        "slowest": slowest,
        "fastest": fastest,
        "repetitions": len(turns),
        "memory_bytes": kept,
        "relative_memory": kept / of_rope,
        "device": options.device,
        "threads": torch.get_num_threads(),
        **provenance(),
    }


def kept_for_backward(model: Any, forward: Callable[[], Any]) -> int:
    """Bytes that autograd keeps between a forward and its backward pass, every storage once, without weights."""
    import torch

    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = forward()  # while it lives, no address is used twice
    del loss
    return sum(kept.values())


def report(rows: list[dict[str, Any]], options: Options) -> None:
    """Write mean and spread over the seeds beside the rows: as a table, as JSON, and as a chart."""
    from rope_patch.evaluation.standard_errors import best_of_seeds

    newest = {(row["encoding"], row["length"], row["seed"]): row for row in rows}
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for spec, length, seed in sorted(newest, key=lambda key: (options.encodings.index(key[0]), *key[1:])):
        groups.setdefault((spec, length), []).append(newest[spec, length, seed])
    best, cells = best_of_seeds(newest.values()), []
    for (spec, length), seeds in groups.items():
        losses = [row["nll"] for row in seeds if row["nll"] is not None]
        cell = {"encoding": spec, "slot": ", ".join(seeds[0]["slots"]), "length": length, "seeds": len(losses)}
        cell |= {"mean": statistics.fmean(losses) if losses else None}
        cell |= {"std": statistics.stdev(losses) if len(losses) > 1 else None}
        cells.append(cell | {"best": best.get(length) == spec, "new_parameters": seeds[0]["encoding_parameters"]})
    notes = [
        f"trained from scratch at L = {options.context} bytes for {options.steps} steps; NLL in nats per byte of the "
        f"same last {options.targets} bytes of {rows[0]['windows']} windows, mean ± standard deviation over the seeds",
        "a star marks the best of its column, if it is below every other by more than noise over the seeds",
        *dict.fromkeys(f"{row['encoding']}: {row['failure']}" for row in newest.values() if row["failure"]),
    ]
    folder, text = (
        Path(options.output),
        "\n".join([*table(cells, options.context), "", *(f"- {note}" for note in notes)]),
    )
    (folder / "table.md").write_text(text + "\n", encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps({"notes": notes, "cells": cells}, indent=2) + "\n")
    print_json({"notes": notes, "cells": cells}) if options.json else print(text)
    try:
        draw_chart(cells, notes[0], options)
        say(f"the chart is {folder / 'comparison.png'}")
    except MissingPackage as error:
        say(str(error))


def table(cells: list[dict[str, Any]], training_length: int) -> list[str]:
    """The lines of a table in Markdown, with a line for every encoding and a column for every length."""
    lengths = sorted({cell["length"] for cell in cells})
    header = ["encoding", "slot", "new parameters", *(f"{length // training_length}L" for length in lengths)]
    rows_of: dict[str, list[str]] = {}
    for cell in cells:
        start = [f"`{cell['encoding']}`", cell["slot"], f"{cell['new_parameters']:,}"]
        number = "failed"
        if cell["mean"] is not None:
            number = f"{cell['mean']:.3f}" + "*" * cell["best"]
            number += "" if cell["std"] is None else f" ± {cell['std']:.3f}"
        rows_of.setdefault(cell["encoding"], start).append(number)
    rows = [header, ["---"] * 2 + ["---:"] * (len(header) - 2), *rows_of.values()]
    return [f"| {' | '.join(row)} |" for row in rows]


def draw_chart(cells: list[dict[str, Any]], caption: str, options: Options) -> None:
    """Draw loss against length, with bands of one standard deviation over the seeds on either side."""
    from rope_patch.evaluation import charts

    lines, lengths = {}, sorted({cell["length"] for cell in cells})
    multiples = [length / options.context for length in lengths]
    figure, chart = charts.sheet("Position encodings trained from scratch", f"{caption[0].upper()}{caption[1:]}.", 3.6)
    charts.scale_lengths(chart, multiples, [f"{m:g}L\n{n}" for m, n in zip(multiples, lengths, strict=True)])
    names = dict.fromkeys(cell["encoding"] for cell in cells if cell["mean"] is not None)
    for place, spec in enumerate(names):
        own = [cell for cell in cells if cell["encoding"] == spec and cell["mean"] is not None]
        look = {
            "color": charts.COLOURS[place % len(charts.COLOURS)],
            "marker": charts.MARKERS[place % len(charts.MARKERS)],
        }
        values = [(cell["mean"], cell["std"] or 0.0) for cell in own]
        at = [cell["length"] / options.context for cell in own]
        lines[spec] = charts.plot_band(chart, at, values, markersize=4, **look)
    chart.set(xlabel="context length (L, bytes)", ylabel="NLL, nats per byte")
    charts.name_lines(chart, lines)
    charts.write(figure, Path(options.output) / "comparison.png")


if __name__ == "__main__":
    run(Options, main)
