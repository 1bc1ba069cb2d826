"""Fine-tune a checkpoint at a longer context under several schemes, and draw perplexity before and after.

    python recipes/finetune.py recipes/configs/finetune_tiny.yaml
    rope-patch finetune --model DIR --scheme yarn:target=auto --length 16384 --text books.jsonl --output runs/mine
    accelerate launch --config_file recipes/configs/accelerate/ddp.yaml recipes/finetune.py CONFIG

`transformers.Trainer` trains each scheme on its own from the same checkpoint. A share of the text is held out. The same
held-out tokens are scored before, during and after the training, from contexts of several lengths, with two references:
the plain checkpoint, and attention cut at its training length L. Run the same command again to resume.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import sys
from contextlib import ExitStack, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rope_patch.cli.options import Length, Lengths, Measured, Names, Specs, is_main, print_json, run, say


@dataclass(kw_only=True)
class Options(Measured):
    """What to train, on what, and where the results go."""

    schemes: Specs  # each trained on its own; target=auto means the length; plain trains the checkpoint as it is
    length: Length  # tokens of a training row
    dtype: str = "float32"  # of frozen weights; bfloat16 halves a checkpoint under adapters
    streaming: bool = False  # read the text while training on it
    shuffle_buffer: int = 1000  # documents among which a stream is shuffled
    layout: Literal["packed", "padded", "pose"] = "packed"  # pose: rows of L tokens whose positions skip up to length
    pose_chunks: int = 2  # pieces of a row under layout pose
    allow_short: bool = False  # train although no document fills a row
    held_out: float = 0.1  # share of the text that is held out for measuring
    eval_text: str | None = None  # measure on this text instead, and train on all of --text
    eval_dataset: str | None = None  # or on this dataset
    eval_split: str | None = None  # of that dataset or else of the one trained on; default its test or validation
    lengths: Lengths = ()  # contexts to measure; default L, 2 L, ... up to length
    targets: int | None = None  # scored tokens per document; default L
    documents: int | None = None  # how many are scored; default all
    windows_per_document: int | None = None  # places scored in each; default as many as make 16 in all
    evaluate_every: int | None = None  # steps between two measurements; default only before and after
    method: Literal["full", "lora", "lora_norms", "lora_embeddings", "lora_norms_embeddings"] = (
        "full"  # which weights are trained
    )
    rank: int = 8  # of LoRA
    alpha: float = 16.0  # of LoRA
    dropout: float = 0.0  # of LoRA
    merge: bool = False  # save whole weights instead of adapters
    steps: int = 400  # of the optimiser
    batch_size: int = 64  # rows per step, over all processes
    micro_batch_size: int | None = None  # rows in one forward; default all of a process
    learning_rate: float = 2e-5  # with AdamW (0.9, 0.95), as YaRN and LongLoRA
    warmup_steps: int = 20  # the learning rate rises over these
    decay_steps: int = 0  # and falls to zero over the last of these
    weight_decay: float = 0.0  # of AdamW
    warm_start_steps: int = 0  # first steps, trained under position interpolation
    precision: Literal["float32", "bfloat16"] = "float32"  # bfloat16 computes in it, by autocast
    gradient_checkpointing: bool = False  # compute activations again in the backward
    loss: Literal["chunked", "plain", "liger"] = "chunked"  # chunked and liger hold no logits of a whole row
    save_every: int = 50  # steps between two checkpoints of Trainer; the newest is kept to resume from
    log_every: int = 10  # steps between two losses in the log
    report_to: Names = ()  # trackers that Transformers knows, such as tensorboard or wandb
    output: str = "runs/finetune"  # folder of the results


KEPT = "model length text dataset layout pose_chunks method rank alpha dropout batch_size learning_rate warmup_steps"
KEPT += " weight_decay warm_start_steps precision dtype seed targets"
"""What may not differ between two starts on one output."""

COUNTED = "length steps batch_size micro_batch_size save_every log_every evaluate_every rank pose_chunks"
"""What must be at least 1."""


def main(options: Options) -> None:
    """Measure the checkpoint, train it under every scheme, measure again, and report."""
    check(options)
    from accelerate import PartialState

    from rope_patch.errors import MissingPackage
    from rope_patch.evaluation.row import Rows
    from rope_patch.evaluation.scheme_specs import REFERENCES, with_references
    from rope_patch.saving.loading import default_checkpoint, load_tokenizer, quiet_transformers

    with_references(options.schemes)  # a misspelled scheme is known before anything is loaded
    PartialState(cpu=options.device == "cpu")
    output = Path(options.output)
    rows: Any = None
    points: Any = None
    with ExitStack() as stack:
        stack.enter_context(quiet_transformers())
        tokenizer = load_tokenizer(options.model or default_checkpoint())
        documents, corpus, text = texts(options, tokenizer)
        if is_main():  # others measure and train as well, but write nothing
            stack.enter_context(alone_in(output))
            claim(output, options, text, corpus)
            rows, points = Rows(output / "perplexity.jsonl"), Rows(output / "finetune.jsonl")
        say(f"perplexity is measured on {text}")
        scored = ("targets", "documents", "windows_per_document", "seed")
        measured = {name: getattr(options, name) for name in scored} | {"name": options.model or "tiny-llama"}
        measured |= {"tokenizer": tokenizer, "corpus": corpus, "text": text, "results": rows}
        for spec in options.schemes:
            finetune(options, spec, documents, measured, points)
        if points is not None:
            found = [point for point in points.rows if point.line in (*REFERENCES, *options.schemes)]
            print_json([json.loads(point.to_json()) for point in found]) if options.json else print(table(found))
            try:
                draw(found, options)
            except MissingPackage as error:
                say(str(error))


def check(options: Options) -> None:
    """Refuse options that contradict each other, before anything is loaded."""
    from rope_patch.errors import EvaluationError, require

    for name in COUNTED.split():
        if (value := getattr(options, name)) is not None and value < 1:
            raise EvaluationError(f"{name}={value} is not allowed; it must be at least 1")
    if not 0 < options.held_out < 1:
        raise EvaluationError(f"held_out={options.held_out} is not allowed; it is a share between 0 and 1")
    at_once = int(os.environ.get("WORLD_SIZE", "1")) * (options.micro_batch_size or 1)
    if options.batch_size % at_once:
        raise EvaluationError(f"batch_size={options.batch_size} is not allowed; it must be a multiple of {at_once}")
    if options.device not in ("auto", "cpu"):
        raise EvaluationError(f"device={options.device} is not allowed; Trainer takes auto or cpu")
    if options.dtype != "float32" and (options.method == "full" or options.precision != "bfloat16"):
        raise EvaluationError(f"dtype={options.dtype} is only for what adapters leave alone, with precision=bfloat16")
    if options.method != "full":
        require("peft", f"method={options.method}", "finetune")
    elif options.merge:
        raise EvaluationError("merge with method=full: there are no adapters to merge")
    if options.loss == "liger":
        require("liger_kernel", "loss=liger", "finetune")


def alone_in(output: Path) -> Any:
    """Hold the folder: a second run on it ends at once, and a killed one lets it go."""
    from filelock import FileLock, Timeout

    from rope_patch.errors import EvaluationError

    output.mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(output / ".lock").acquire(timeout=0)
    except Timeout:
        raise EvaluationError(f"{output} is in use by another run; wait for it, or choose another output") from None


def claim(output: Path, options: Options, text: str, corpus: Any) -> None:
    """Record the settings of this folder, and refuse to resume with others."""
    from rope_patch.errors import EvaluationError

    path, ours = output / "options.json", {name: getattr(options, name) for name in KEPT.split()}
    digest = hashlib.sha256("".join(document["text"] for document in corpus).encode()).hexdigest()[:8]
    ours["measured on"] = f"{text} ({digest})"  # what was held out may not be trained on later
    theirs = dict.fromkeys(ours) | json.loads(path.read_text()) if path.exists() else ours
    changed = [f"{name} was {theirs[name]!r} and is {ours[name]!r}" for name in ours if theirs[name] != ours[name]]
    if changed:
        raise EvaluationError(f"{output} holds other runs ({'; '.join(changed)}); choose another output")
    path.write_text(json.dumps(ours, indent=2) + "\n")


def texts(options: Options, tokenizer: Any) -> tuple[Any, Any, str]:
    """The documents to train on, those to measure on, and what the latter are called."""
    from rope_patch.data.corpora import load_text, name_of_text
    from rope_patch.data.held_out import DOCUMENTS, hold_out
    from rope_patch.errors import CorpusError

    load, split = partial(load_text, column=options.column), options.split or "train"
    documents = load(options.text, options.dataset, split=split, streaming=options.streaming)
    other = options.eval_dataset or (options.eval_split and options.dataset)
    if options.eval_text or other or not (options.text or options.dataset):
        corpus = load(options.eval_text, other, split=options.eval_split)
        return documents, corpus, name_of_text(options.eval_text, other, options.eval_split)
    for own in [each for each in ("test", "validation") if options.dataset and each != split]:
        with suppress(CorpusError):  # there is none of this name
            corpus = load(dataset=options.dataset, split=own, streaming=options.streaming)
            corpus = list(corpus.take(DOCUMENTS)) if options.streaming else corpus
            return documents, corpus, name_of_text(None, options.dataset, own)
    asked = {"share": options.held_out, "seed": options.seed, "name": name_of_text(options.text, options.dataset)}
    return hold_out(documents, tokenizer, max(options.lengths, default=options.length), **asked)


def finetune(options: Options, spec: str, documents: Any, measured: dict[str, Any], points: Any) -> None:
    """One scheme, from the checkpoint to `<output>/<scheme>/checkpoint`."""
    import torch
    from accelerate import PartialState
    from transformers import TrainingArguments, default_data_collator, set_seed

    from rope_patch.data import pose
    from rope_patch.errors import EvaluationError
    from rope_patch.evaluation.scheme_specs import REFERENCES, scheme_at
    from rope_patch.models.find_stacks import read_stacks
    from rope_patch.models.head import find_language_model
    from rope_patch.patching import find_handle, mount_scheme, unpatch
    from rope_patch.saving.loading import default_checkpoint, load_model
    from rope_patch.training import adapters, callbacks, checkpoints, chunked_loss

    folder, facts = folder_of(options, spec), {"scheme": spec, "steps": options.steps, "merge": options.merge}
    done = folder / "checkpoint" / "training.json"
    if done.exists() and json.loads(done.read_text()) == facts:
        say(f"{spec}: trained before, {done.parent} is there")
        return
    path = options.model or default_checkpoint()
    path = str(Path(path).resolve()) if Path(path).exists() else path  # adapters name it
    model: Any = load_model(path, dtype=options.dtype, device=options.device, attention=options.attention)
    if hasattr(model, "peft_config"):
        raise EvaluationError(f"{path} holds adapters; merge them before training on")
    if (handle := find_handle(model)) is not None:
        if handle.scheme.learns:
            raise EvaluationError(f"{path} was saved under {handle.scheme}; training would lose what that learned")
        say(f"the checkpoint was saved under {handle.scheme}; it is trained under {spec} instead")
        unpatch(model)
    language_model, stacks = find_language_model(model), read_stacks(model)
    trained = stacks[0].training_length
    if "flash" in language_model.config._attn_implementation and options.layout != "padded":
        raise EvaluationError("flash attention would misread where the documents of a row begin; use attention=sdpa")
    row_length, tokenizer = trained if options.layout == "pose" else options.length, measured["tokenizer"]
    data = training_rows(options, documents, tokenizer, language_model.config.vocab_size, row_length)

    scheme = scheme_at(spec, options.length, [stack.checkpoint for stack in stacks])
    doublings = [trained * 2**n for n in range(30) if trained * 2**n < options.length]
    lengths = options.lengths or (*doublings, options.length)
    asked = {"every": options.evaluate_every, "start": False, "points": points, "line": spec}
    perplexity = callbacks.PerplexityCallback(lengths=lengths, **asked, **measured)
    for line in REFERENCES:
        perplexity.measure(model, line, 0, line)
    if scheme is not None:
        perplexity.measure(model, scheme, 0)
        mount_scheme(model, scheme)

    set_seed(options.seed)  # of new adapters
    adapted = {name: getattr(options, name) for name in ("rank", "alpha", "dropout")}
    model = adapters.make_trainable(model, options.method, **adapted)
    if options.gradient_checkpointing:
        language_model.gradient_checkpointing_enable({"use_reentrant": False})
    called: list[Any] = [perplexity]
    if options.warm_start_steps:
        called.append(callbacks.WarmStart(scheme, options.warm_start_steps, options.length / trained))
    skipping = pose.PoSECollator(options.length, options.pose_chunks, options.seed)
    collators = {"packed": default_data_collator, "padded": pose.PoSECollator(row_length, chunks=1), "pose": skipping}
    schedule: dict[str, Any] = {"lr_scheduler_type": "constant_with_warmup"}
    if options.decay_steps:
        decay = {"num_decay_steps": options.decay_steps, "decay_type": "linear"}
        schedule = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": decay}
    share = options.batch_size // PartialState().num_processes
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=options.steps,
        per_device_train_batch_size=options.micro_batch_size or share,
        gradient_accumulation_steps=share // (options.micro_batch_size or share),
        learning_rate=options.learning_rate,
        warmup_steps=options.warmup_steps,
        **schedule,
        weight_decay=options.weight_decay,
        adam_beta2=0.95,
        bf16=options.precision == "bfloat16",
        use_liger_kernel=options.loss == "liger",
        liger_kernel_config={"rope": False},  # schemes turn queries and keys themselves
        seed=options.seed,
        use_cpu=options.device == "cpu" or not torch.accelerator.is_available(),
        logging_steps=options.log_every,
        save_steps=options.save_every,
        save_total_limit=1,
        report_to=list(options.report_to) or "none",
        remove_unused_columns=False,
    )
    arguments._n_gpu = min(1, arguments.n_gpu)  # of one process: nn.DataParallel copies patched layers wrongly
    trainer = checkpoints.SafeTrainer(model, arguments, collators[options.layout], data, callbacks=called)
    chunked = chunked_loss.chunked_loss(model) if options.loss == "chunked" else nullcontext()
    with chunked, redirect_stdout(sys.stderr):  # Trainer prints its log
        trainer.resume()
    if options.merge:
        trainer.model = model = model.merge_and_unload()
    with checkpoints.whole_folder(folder / "checkpoint") if is_main() else nullcontext(folder) as aside:
        trainer.save_model(str(aside))  # where weights are spread, every process has to come here
        if is_main():
            find_language_model(model).config.save_pretrained(aside)  # beside adapters too: it names the scheme
            tokenizer.save_pretrained(aside)
            (aside / "training.json").write_text(json.dumps(facts))


def training_rows(options: Options, documents: Any, tokenizer: Any, vocabulary: int, length: int) -> Any:
    """Documents as rows of tokens: a dataset, or an endless stream of one."""
    from rope_patch.errors import EvaluationError

    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []

    def tokenise(batch: dict[str, list[str]]) -> dict[str, Any]:
        found = [ids + end for ids in tokenizer(batch["text"], verbose=False)["input_ids"] if ids]
        if (highest := max((max(ids) for ids in found), default=0)) >= vocabulary:
            raise EvaluationError(f"token {highest} is beyond the model's {vocabulary}: another model's tokenizer")
        return {"input_ids": found}

    if options.streaming and not hasattr(documents, "n_shards"):
        documents = documents.to_iterable_dataset()
    buffer = {"buffer_size": options.shuffle_buffer} if options.streaming else {}
    documents = documents.shuffle(seed=options.seed, **buffer)
    tokens = documents.map(tokenise, batched=True, remove_columns=["name", "text"])
    lay_out = partial(packed if options.layout == "packed" else cut, length=length)
    rows = tokens.map(lay_out, batched=True, input_columns="input_ids", remove_columns="input_ids")
    if options.streaming:
        return rows.repeat(None)
    longest = max(map(len, tokens["input_ids"]), default=0)
    if not len(rows) or (longest < length and not options.allow_short):
        raise EvaluationError(
            f"no document fills a row of {length} tokens: without what is held out the longest of {len(tokens)} has "
            f"{longest}; short ones teach nothing of long distances; give longer ones, less length, or allow_short=true"
        )
    rows = rows.repeat(-(-options.batch_size // len(rows)))
    return rows.take(len(rows) // options.batch_size * options.batch_size)  # so that every step of an epoch is full


def packed(documents: list[list[int]], length: int) -> dict[str, Any]:
    """Documents behind one another in full rows. A document that is cut continues in the next row; `position_ids` start
    again with each piece, by which attention keeps the pieces apart.
    """
    import numpy as np

    tokens = np.array([token for document in documents for token in document], dtype=int)
    places, begins = np.arange(len(tokens)), np.zeros(len(tokens), dtype=bool)
    begins[np.cumsum([0, *map(len, documents)])[:-1]] = True
    begins[::length] = True
    columns = {
        "input_ids": tokens,
        "labels": np.where(begins, -100, tokens),
        "position_ids": places - np.maximum.accumulate(np.where(begins, places, 0)),
    }
    full = len(tokens) // length * length
    return {name: list(values[:full].reshape(-1, length)) for name, values in columns.items()}


def cut(documents: list[list[int]], length: int) -> dict[str, Any]:
    """Every piece of a document is a row of its own."""
    return {"input_ids": [ids[at : at + length] for ids in documents for at in range(0, len(ids), length)]}


def folder_of(options: Options, spec: str) -> Path:
    """Where the results of a scheme are."""
    return Path(options.output, "".join(letter if letter.isalnum() or letter in "._" else "-" for letter in spec))


def stories(points: list[Any]) -> dict[tuple[str, int], dict[int, Any]]:
    """Points by length, for each scheme and step, references first."""
    found: dict[tuple[str, int], dict[int, Any]] = {}
    for point in points:
        found.setdefault((point.line, point.step), {})[point.length] = point
    lines = list(dict.fromkeys(line for line, _ in found))
    return dict(sorted(found.items(), key=lambda item: (lines.index(item[0][0]), item[0][1])))


def errors(points: list[Any]) -> dict[str, float]:
    """The standard error of each point's difference from attention cut at L, by key; of that, the error of its loss."""
    from rope_patch.evaluation.standard_errors import standard_error

    cut = {point.length: point.nll_by_document for point in points if point.line == "window"}
    found = {}
    for point in points:
        own = point.nll_by_document
        other = [0.0] * len(own) if point.line == "window" else cut.get(point.length, [])
        error = standard_error([nll - at_cut for nll, at_cut in zip(own, other, strict=False)])
        found[point.key()] = math.nan if error is None else error
    return found


def table(points: list[Any]) -> str:
    """NLL before, during and after, by context length; the best of each column has a star, unless all are equal."""
    from rope_patch.evaluation.scheme_specs import display_name

    lengths, width = sorted({point.length for point in points}), max(len(display_name(point.line)) for point in points)
    columns = {n: sorted((f"{point.nll:.3f}" for point in points if point.length == n), key=float) for n in lengths}
    best = {length: found[0] for length, found in columns.items() if found[0] != found[-1]}
    error = errors(points)
    shown = [f"{'scheme':{width}}{'steps':>7}" + "".join(f"{length:>8}{'':8}" for length in lengths)]
    for (line, step), cells in stories(points).items():
        row = f"{display_name(line):{width}}{step:>7}"
        for length in lengths:
            nll = f"{cells[length].nll:.3f}" if length in cells else "-"
            noise = f"±{error[cells[length].key()]:.3f}" if length in cells else ""
            row += f"{nll:>8}{' *'[nll == best.get(length)]}{noise:7}"
        shown.append(row.rstrip())
    scored = f"NLL in nats per token, at every length of the same {points[0].scored_tokens} tokens of {points[0].text}"
    noted = "± the standard error of the difference from attention cut at L, and of its own loss"
    return "\n".join([*shown, f"{scored}; L = {points[0].training_length}; * best of its column; {noted}"])


def draw(points: list[Any], options: Options) -> None:
    """Loss against length: dotted before, solid after the training."""
    from rope_patch.evaluation import charts
    from rope_patch.evaluation.scheme_specs import display_name

    trained, lengths = points[0].training_length, sorted({point.length for point in points})
    multiples = [length / trained for length in lengths]
    last, error = dict(stories(points).keys()), errors(points)  # the last step of every line
    caption = (
        f"NLL of the same tokens of {points[0].text}; trained at {trained} tokens, then at {options.length}. Dotted: "
        "before; solid: after. Bands: ± one standard error, of the difference from attention cut at L."
    )
    named = list(dict.fromkeys(line for line, _ in stories(points)))
    figure, chart = charts.sheet("Before and after fine-tuning", caption, max(3.2, 0.34 * len(named) + 0.4))
    charts.scale_lengths(chart, multiples, [f"{m:g}L\n{n}" for m, n in zip(multiples, lengths, strict=True)])
    colours, drawn = dict(zip(options.schemes, itertools.cycle(charts.COLOURS))), {}
    for (line, step), cells in stories(points).items():
        if step in (0, last[line]):
            style = ("-" if step else ":") if line in colours else "--"
            colour = colours.get(line, charts.INK if line == "window" else charts.FAINT)
            values = [(cell.nll, error[cell.key()]) for cell in cells.values()]
            at = [length / trained for length in cells]
            name = display_name(line) + (f", {step} steps" if step else ", before" if line in colours else "")
            look = {"color": colour, "linestyle": style, "marker": "o" if line in colours else None, "markersize": 4}
            drawn[name] = charts.plot_band(chart, at, values, **look)
    chart.axvline(options.length / trained, color=charts.FAINT, linewidth=1, linestyle=":")
    chart.set(xlabel="context length (L, tokens)", ylabel="NLL, nats per token")
    charts.name_lines(chart, drawn)
    charts.write(figure, Path(options.output) / "finetune.png")


if __name__ == "__main__":
    run(Options, main)
