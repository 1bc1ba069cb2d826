# /// script
# dependencies = ["rope-patch[cli,plots,finetune]"]
# ///
"""Fine-tune a checkpoint at a longer context under several schemes, and draw perplexity before and after.

    python recipes/finetune.py recipes/configs/finetune_tiny.yaml
    rope-patch finetune --model DIR --scheme yarn:target=auto --length 16384 --text books.jsonl --output runs/mine
    accelerate launch --config_file recipes/configs/accelerate/ddp.yaml recipes/finetune.py CONFIG

`transformers.Trainer` trains each scheme on its own from the same checkpoint. A share of the text is held out. The
held-out tokens are scored before, during and after the training, from contexts of several lengths. The plain checkpoint
and a sliding window of its training length L are scored for comparison. Run the same command again to resume.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from contextlib import ExitStack, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rope_patch.cli.options import (
    Count,
    Folder,
    Length,
    Lengths,
    Measured,
    Name,
    Names,
    OptionalFile,
    OptionalName,
    Specs,
    is_main,
    run,
    say,
)
from rope_patch.cli.report import report
from rope_patch.errors import CorpusError, EvaluationError, counted
from rope_patch.json_files import read_settings


@dataclass(kw_only=True)
class Options(Measured):
    """The options of a fine-tuning."""

    schemes: Specs  # scheme to train, each on its own; target=auto means --length; plain trains the checkpoint as it is
    length: Length  # tokens of a training row: the context length to teach
    dtype: Name = "float32"  # dtype of frozen weights; bfloat16 halves the memory of a checkpoint under adapters
    streaming: bool = False  # read the text during the training instead of before it
    shuffle_buffer: int = 1000  # documents in the shuffle buffer of a stream
    # layout of the rows; mixed: every second row restarts after L tokens; the last three: positions skip
    layout: Literal["packed", "padded", "mixed", "pose", "cream", "randomized"] = "packed"
    pose_chunks: int = 2  # under pose, number of pieces of a row
    pose_row: Count = None  # under pose, cream and randomized, tokens of a row (default: L)
    # under randomized, ranges of positions in equal parts of the training (default: five that grow to --length)
    position_ranges: Lengths = ()
    allow_short: bool = False  # train even if no document fills a row
    held_out: float = 0.1  # share of the text to hold out and measure on
    eval_text: OptionalFile = None  # measure on this text instead, and train on all of --text
    eval_dataset: OptionalName = None  # measure on this dataset instead
    eval_split: OptionalName = None  # split to measure on (default: test or validation)
    lengths: Lengths = ()  # context lengths to measure before and after (default: L, 2 L, ... up to --length)
    targets: Count = None  # number of scored tokens in each document (default: L)
    documents: Count = None  # number of documents to measure on (default: all)
    windows_per_document: Count = None  # windows scored in each document (default: enough for 16 in all)
    evaluate_every: Count = None  # steps between two measurements (default: only before and after)
    method: Literal["full", "lora", "lora_norms", "lora_embeddings", "lora_norms_embeddings"] = "full"  # what to train
    rank: int = 8  # LoRA rank
    alpha: float = 16.0  # LoRA alpha
    dropout: float = 0.0  # LoRA dropout
    merge: bool = False  # save whole weights instead of adapters
    steps: int = 400  # optimiser steps
    batch_size: int = 64  # rows in a step, over all processes
    context_parallel: int = 1  # processes that share each row; started for you, unless by a launcher
    micro_batch_size: Count = None  # rows in one forward (default: all of a process)
    learning_rate: float = 2e-5  # learning rate of AdamW (0.9, 0.95), as in YaRN and LongLoRA
    warmup_steps: int = 20  # steps over which the learning rate rises
    decay_steps: int = 0  # last steps, over which the learning rate falls to zero
    weight_decay: float = 0.0  # weight decay of AdamW
    warm_start_steps: int = 0  # first steps, trained under position interpolation
    precision: Literal["float32", "bfloat16"] = "float32"  # bfloat16 computes by autocast and keeps float32 weights
    gradient_checkpointing: bool = False  # recompute activations in the backward pass to save memory
    # only plain holds the logits of a whole row; longce weighs tokens by their gain from far context
    loss: Literal["chunked", "plain", "liger", "longce"] = "chunked"
    save_every: int = 50  # steps between two checkpoints to resume from; the newest is kept
    log_every: int = 10  # steps between two losses in the log
    report_to: Names = ()  # trackers of Transformers, such as tensorboard or wandb
    output: Folder = "runs/finetune"  # folder for the results


KEPT = "model length text dataset layout pose_chunks pose_row method rank alpha dropout batch_size learning_rate"
KEPT += " warmup_steps weight_decay warm_start_steps precision dtype seed targets"
"""Options that may not differ between two starts on one output."""

SKIPPING = ("pose", "cream", "randomized")
"""Layouts whose rows have positions with skips."""

COUNTED = "length steps batch_size micro_batch_size save_every log_every evaluate_every rank pose_chunks pose_row"
"""Options that must be at least 1."""


def main(options: Options) -> None:
    """Measure the checkpoint, train it under every scheme, measure again, and report."""
    check(options)
    from accelerate import PartialState

    from rope_patch.evaluation.row import Rows
    from rope_patch.evaluation.scheme_specs import REFERENCES, with_references
    from rope_patch.evaluation.verdict import of_training
    from rope_patch.saving.loading import default_checkpoint, load_tokenizer, quiet_transformers, trained_length
    from rope_patch.training.callbacks import completed
    from rope_patch.training.checkpoints import alone_in, claim

    with_references(options.schemes)  # a misspelled scheme is known before anything is loaded
    PartialState(cpu=options.device == "cpu")
    output = Path(options.output)
    measurements: Any = None
    points: Any = None
    with ExitStack() as stack:
        stack.enter_context(quiet_transformers())
        tokenizer = load_tokenizer(options.model or default_checkpoint())
        documents, corpus, text = texts(options, tokenizer)
        if is_main():  # others measure and train as well, but write nothing
            stack.enter_context(alone_in(output))
            digest = hashlib.sha256("".join(document["text"] for document in corpus).encode()).hexdigest()[:8]
            settings = {name: getattr(options, name) for name in KEPT.split()}
            settings["longce"] = options.loss == "longce" or None  # as in older runs, which recorded nothing
            growing = {"position_ranges": list(options.position_ranges), "steps": options.steps}
            settings |= growing if options.layout == "randomized" else dict.fromkeys(growing)
            claim(output, {**settings, "measured on": f"{text} ({digest})"})  # held-out text is never trained on later
            measurements, points = Rows(output / "perplexity.jsonl"), Rows(output / "finetune.jsonl")
        say(f"perplexity is measured on {text}")
        say(cost_of(options, trained_length(options.model or default_checkpoint())))
        scored = ("targets", "documents", "windows_per_document", "seed")
        measured = {name: getattr(options, name) for name in scored} | {"name": options.model or "tiny-llama"}
        measured |= {"tokenizer": tokenizer, "corpus": corpus, "text": text, "results": measurements, "start": False}
        for spec in options.schemes:
            finetune(options, spec, documents, {**measured, "points": points})
        if is_main():
            rows = completed([row for row in points.rows if row.line in (*REFERENCES, *options.schemes)])
            verdict = of_training(rows, partial(folder_of, options))
            report(rows, options, points.path, verdict, title="Before and after fine-tuning")


def cost_of(options: Options, trained: int) -> str:
    """The number of tokens that the training of each scheme reads, as a sentence.

    Args:
        trained: L in tokens, which is the length of rows whose positions skip.
    """
    tokens = row_length_of(options, trained)
    every = f" for each of {len(options.schemes)} schemes" if len(options.schemes) > 1 else ""
    return (
        f"training reads {options.steps * options.batch_size * tokens:,} tokens{every}: "
        f"{counted(options.steps, 'step')} of {counted(options.batch_size, 'row')} of {tokens} (--steps, --batch-size)"
    )


def row_length_of(options: Options, trained: int) -> int:
    """The number of tokens in a row, which is less than --length if positions skip."""
    return (options.pose_row or trained) if options.layout in SKIPPING else options.length


def check(options: Options) -> None:
    """Refuse options that contradict each other, before anything is loaded."""
    from rope_patch.errors import require

    for name in COUNTED.split():
        if (value := getattr(options, name)) is not None and value < 1:
            raise EvaluationError(f"{name}={value} is not allowed; it must be at least 1")
    if not 0 < options.held_out < 1:
        raise EvaluationError(f"held_out={options.held_out} is not allowed; it is a share between 0 and 1")
    at_once = int(os.environ.get("WORLD_SIZE", "1")) // options.context_parallel * (options.micro_batch_size or 1)
    if options.batch_size % at_once:
        raise EvaluationError(f"batch_size={options.batch_size} is not allowed; it must be a multiple of {at_once}")
    if options.device not in ("auto", "cpu"):
        raise EvaluationError(f"device={options.device} is not allowed; Trainer takes auto or cpu")
    if options.dtype != "float32" and (options.method == "full" or options.precision != "bfloat16"):
        raise EvaluationError(f"dtype={options.dtype} is only for weights frozen by adapters, with precision=bfloat16")
    if options.pose_row and options.layout not in SKIPPING:
        raise EvaluationError(f"pose_row={options.pose_row} is only for layout=pose, cream and randomized")
    if options.position_ranges and options.layout != "randomized":
        raise EvaluationError(f"position_ranges={options.position_ranges} is only for layout=randomized")
    if options.method != "full":
        require("peft", f"method={options.method}", "finetune")
    elif options.merge:
        raise EvaluationError("merge with method=full: there are no adapters to merge")
    if options.loss == "liger":
        import torch

        require("liger_kernel", "loss=liger", "finetune")
        on_cpu = options.device == "cpu" or not torch.accelerator.is_available()
        if on_cpu and os.environ.get("TRITON_INTERPRET") != "1":
            raise EvaluationError("loss=liger is not allowed on a CPU, where Triton compiles nothing; use loss=chunked")


def texts(options: Options, tokenizer: Any) -> tuple[Any, Any, str]:
    """The documents to train on, the documents to measure on, and the name of the latter."""
    from rope_patch.data.corpora import load_text, name_of_text
    from rope_patch.data.held_out import DOCUMENTS, hold_out

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
    share_of = {"share": options.held_out, "seed": options.seed, "name": name_of_text(options.text, options.dataset)}
    return hold_out(documents, tokenizer, max(options.lengths, default=options.length), **share_of)


def finetune(options: Options, spec: str, documents: Any, measured: dict[str, Any]) -> None:
    """Train under one scheme, from the checkpoint to `<output>/<scheme>/checkpoint`."""
    from transformers import default_data_collator, set_seed

    from rope_patch.data import randomized
    from rope_patch.data.pose import PoSECollator
    from rope_patch.data.training_rows import training_rows
    from rope_patch.evaluation.scheme_specs import REFERENCES, scheme_at
    from rope_patch.models.find_stacks import read_stacks
    from rope_patch.models.head import find_language_model
    from rope_patch.patching import mount_scheme
    from rope_patch.training import adapters, callbacks, checkpoints, chunked_loss, long_ce

    folder, facts = folder_of(options, spec), {"scheme": spec, "steps": options.steps, "merge": options.merge}
    done = folder / "checkpoint" / "training.json"
    if done.exists() and read_settings(done) == facts:
        say(f"{spec}: already trained, {done.parent} exists")
        return
    model = load_plain(options, spec)
    language_model, stacks = find_language_model(model), read_stacks(model)
    trained = stacks[0].max_length
    if "flash" in language_model.config._attn_implementation and options.layout != "padded":
        raise EvaluationError("flash attention would misread where the documents of a row begin; use attention=sdpa")
    row_length = row_length_of(options, trained)
    weights = long_ce.LongCE.beyond(trained, row_length) if options.loss == "longce" else None
    order = {name: getattr(options, name) for name in ("batch_size", "seed", "allow_short")}
    order |= {"shuffle_buffer": options.shuffle_buffer if options.streaming else None}
    order |= {"pack": options.layout in ("packed", "mixed"), "short": trained if options.layout == "mixed" else None}
    rows = training_rows(documents, measured["tokenizer"], language_model.config.vocab_size, row_length, **order)
    if options.layout == "randomized":
        rows = randomized.numbered(rows, options.steps * options.batch_size, options.seed)

    scheme = scheme_at(spec, options.length, [stack.checkpoint for stack in stacks])
    doublings = [trained * 2**n for n in range(30) if trained * 2**n < options.length]
    lengths = options.lengths or (*doublings, options.length)
    perplexity = callbacks.PerplexityCallback(lengths=lengths, line=spec, every=options.evaluate_every, **measured)
    for reference in REFERENCES:
        perplexity.measure(model, reference, 0, reference)
    if scheme is not None:
        perplexity.measure(model, scheme, 0)
        mount_scheme(model, scheme)

    set_seed(options.seed)  # of new adapters
    adapted = {name: getattr(options, name) for name in ("rank", "alpha", "dropout")}
    model = adapters.make_trainable(model, options.method, **adapted)
    if options.gradient_checkpointing:
        language_model.gradient_checkpointing_enable({"use_reentrant": False})
    called: dict[str, Any] = {"callbacks": [perplexity], "sharing": options.context_parallel}
    if options.warm_start_steps:
        called["callbacks"].append(callbacks.WarmStart(scheme, options.warm_start_steps, options.length / trained))
    collators = {"packed": default_data_collator, "mixed": default_data_collator, "padded": PoSECollator(row_length, 1)}
    collators["pose"] = PoSECollator(options.length, options.pose_chunks, options.seed)
    collators["cream"] = PoSECollator(options.length, seed=options.seed, middle="gaussian")
    collators["randomized"] = randomized.RandomizedCollator(
        options.position_ranges or randomized.curriculum(row_length, options.length),
        options.steps * options.batch_size,
        options.seed,
    )
    arguments = training_arguments(options, folder / "trainer")
    trainer = checkpoints.SafeTrainer(model, arguments, collators[options.layout], rows, **called)
    loss = nullcontext() if options.loss in ("plain", "liger") else chunked_loss.chunked_loss(model, long_ce=weights)
    with loss, redirect_stdout(sys.stderr):  # Trainer prints its log
        trainer.resume()

    if options.merge:
        trainer.model = model = model.merge_and_unload()
    with checkpoints.whole_folder(folder / "checkpoint") if is_main() else nullcontext(folder) as aside:
        trainer.save_model(str(aside))  # where weights are spread, every process has to come here
        if is_main():
            find_language_model(model).config.save_pretrained(aside)  # beside adapters too: it names the scheme
            measured["tokenizer"].save_pretrained(aside)
            (aside / "training.json").write_text(json.dumps(facts))


def load_plain(options: Options, spec: str) -> Any:
    """Load the checkpoint, without the scheme under which it may have been saved."""
    from rope_patch.evaluation.measured_model import pop_scheme
    from rope_patch.saving.loading import default_checkpoint, load_model

    path = options.model or default_checkpoint()
    path = str(Path(path).resolve()) if Path(path).exists() else path  # adapters name it
    model: Any = load_model(path, dtype=options.dtype, device=options.device, attention=options.attention)
    if hasattr(model, "peft_config"):
        raise EvaluationError(f"{path} holds adapters; merge them before training on")
    if (learned := pop_scheme(model, say, f"trained under {spec} instead")) is not None:
        raise EvaluationError(f"{path} was saved under {learned.scheme}; training would lose its learned parameters")
    return model


def training_arguments(options: Options, folder: Path) -> Any:
    """Convert the options to arguments of `transformers.Trainer`."""
    from accelerate import PartialState
    from transformers import TrainingArguments

    decay = {"num_decay_steps": options.decay_steps, "decay_type": "linear"}
    share = options.batch_size * options.context_parallel // PartialState().num_processes
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=options.steps,
        per_device_train_batch_size=options.micro_batch_size or share,
        gradient_accumulation_steps=share // (options.micro_batch_size or share),
        learning_rate=options.learning_rate,
        warmup_steps=options.warmup_steps,
        lr_scheduler_type="warmup_stable_decay" if options.decay_steps else "constant_with_warmup",
        lr_scheduler_kwargs=decay if options.decay_steps else {},
        weight_decay=options.weight_decay,
        adam_beta2=0.95,
        bf16=options.precision == "bfloat16",
        use_liger_kernel=options.loss == "liger",
        liger_kernel_config={"rope": False},  # schemes turn queries and keys themselves
        seed=options.seed,
        train_sampling_strategy="sequential" if options.layout == "randomized" else "random",
        use_cpu=PartialState().device.type == "cpu",
        logging_steps=options.log_every,
        save_steps=options.save_every,
        save_total_limit=1,
        report_to=list(options.report_to) or "none",
        remove_unused_columns=False,
        accelerator_config={"dispatch_batches": False} if options.context_parallel > 1 else None,
    )
    arguments._n_gpu = min(1, arguments.n_gpu)  # of one process: nn.DataParallel copies patched layers wrongly
    return arguments


def folder_of(options: Options, spec: str) -> Path:
    """The folder of a scheme's results."""
    return Path(options.output, "".join(letter if letter.isalnum() or letter in "._" else "-" for letter in spec))


if __name__ == "__main__":
    run(Options, main)
