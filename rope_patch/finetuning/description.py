"""One fine-tuning from a description of it: what the command line and the recipe share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from rope_patch.errors import EvaluationError, did_you_mean
from rope_patch.evaluation.description import check_at_least, check_types, read_yaml
from rope_patch.evaluation.loading import default_checkpoint
from rope_patch.finetuning.adapters import Method
from rope_patch.finetuning.parallel import Parallel
from rope_patch.finetuning.pose import PoSE
from rope_patch.finetuning.rows import LAYOUTS, RowSettings
from rope_patch.training.loop import Schedule

POSE = "pose"
"""The layout whose rows have the training length, with positions that skip over the target length."""

PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True)
class FineTuning:
    """What to train, on what, and where the results go. The fields are the keys of the YAML.

    Optimiser and schedule are those of YaRN and LongLoRA where nothing else is said: AdamW (0.9, 0.95) without weight
    decay, 2e-5 after 20 steps of warm-up, constant; gradients clipped to a norm of 1. What trains is held in float32.

    Attributes:
        length: tokens of a training row, and the longest that is meant to be used.
        schemes: such as `yarn:factor=auto`; each is trained on its own from the same checkpoint. `factor=auto` is
            length / L. `plain` trains the checkpoint as it is.
        model: checkpoint folder or hub id; default the one that comes with the repository.
        text: a `.txt`, `.jsonl` or `.parquet` file or a folder of them; default Python's standard library.
        dataset: a dataset's name instead, with its `config`, its `split` and the `column` that holds the text.
        streaming: read the text as it is trained on, shuffled among `shuffle_buffer` documents.
        on_bad_line: `stop` at a record that is no document, or `skip` and count them.
        layout: `packed`, `padded`, or `pose` for rows of L tokens whose positions skip (PoSE) in `pose_chunks` chunks.
        allow_short: train although no document fills a row.
        eval_text, eval_dataset, eval_split: what perplexity is measured on; default the modules of the standard
            library that are held out.
        lengths: of the measurement; default L, 2 L, ... up to `length`.
        targets, documents: of the measurement, see `measure`.
        evaluate_every: steps between two measurements, a multiple of `log_every`; default only before and after.
        method: `full`, `lora`, or `lora_norms_embeddings`, which LongLoRA found to be needed for longer context.
        rank, alpha, dropout: of LoRA.
        merge: whether the adapters are merged into the saved weights.
        steps, batch_size: of the training; rows per step, over all processes.
        micro_batch_size: rows that pass through the model at once; default all rows of a process.
        learning_rate, warmup_steps, decay_steps, weight_decay: see `Schedule`.
        warm_start_steps: the first steps are trained under position interpolation by length / L, from which the
            scheme then goes on.
        seed: of the order of the texts, of new parameters and of dropout.
        precision: `bfloat16` computes in it, by autocast.
        weights: `bfloat16` holds what is not trained in it: half the memory of a checkpoint under adapters.
        gradient_checkpointing: compute activations again in the backward instead of keeping them.
        device, attention: see `Experiment`.
        parallel: `ddp` or `fsdp2` where several processes were launched; `auto` asks the launcher.
        context_parallel: processes that share one row.
        check_memory: whether what cannot fit is refused before it is tried.
        output: folder of the results.
        save_every_seconds: how often the state is saved.
        log_every: steps between two rows of the log.
        report_to: trackers that accelerate knows, such as `tensorboard` or `wandb`.
    """

    length: int
    schemes: tuple[str, ...]
    model: str | None = None
    text: str | None = None
    dataset: str | None = None
    config: str | None = None
    split: str | None = None
    column: str = "text"
    streaming: bool = False
    shuffle_buffer: int = 1000
    on_bad_line: str = "stop"
    layout: str = "packed"
    pose_chunks: int = 2
    allow_short: bool = False
    eval_text: str | None = None
    eval_dataset: str | None = None
    eval_split: str | None = None
    lengths: tuple[int, ...] = ()
    targets: int | None = None
    documents: int | None = None
    evaluate_every: int | None = None
    method: str = "full"
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    merge: bool = False
    steps: int = 400
    batch_size: int = 64
    micro_batch_size: int | None = None
    learning_rate: float = 2e-5
    warmup_steps: int = 20
    decay_steps: int = 0
    weight_decay: float = 0.0
    warm_start_steps: int = 0
    seed: int = 0
    precision: str = "float32"
    weights: str = "float32"
    gradient_checkpointing: bool = False
    device: str = "auto"
    attention: str = "auto"
    parallel: str = "auto"
    context_parallel: int = 1
    check_memory: bool = True
    output: str = "runs/finetune"
    save_every_seconds: float = 300.0
    log_every: int = 10
    report_to: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 1, "length", "pose_chunks", "steps", "batch_size", "micro_batch_size", "rank", "log_every")
        check_at_least(self, 1, "evaluate_every", "shuffle_buffer", "context_parallel", "targets", "documents")
        check_at_least(self, 0, "warmup_steps", "decay_steps", "weight_decay", "warm_start_steps", "dropout")
        check_at_least(self, 0, "save_every_seconds")
        for name, allowed in _CHOICES.items():
            if (value := getattr(self, name)) not in allowed:
                raise EvaluationError(f"{name}={value!r} is not allowed; {did_you_mean(value, allowed)}")
        if not self.schemes:
            raise EvaluationError("no schemes were given; give at least one, such as yarn:factor=auto")
        if twice := {spec for spec in self.schemes if self.schemes.count(spec) > 1}:
            raise EvaluationError(f"scheme {sorted(twice)[0]!r} is there twice")
        for pair in (("text", "dataset"), ("eval_text", "eval_dataset")):
            if all(getattr(self, name) is not None for name in pair):
                raise EvaluationError(f"{pair[0]} and {pair[1]} are both given: give one of them")
        for name in ("learning_rate", "alpha"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise EvaluationError(f"{name}={value} is not allowed; it must be above 0")
        if not self.dropout < 1:
            raise EvaluationError(f"dropout={self.dropout} is not allowed; it must be below 1")
        if self.warm_start_steps >= self.steps:
            raise EvaluationError(
                f"warm_start_steps={self.warm_start_steps} of steps={self.steps}: nothing would be left for the scheme"
            )
        if self.evaluate_every is not None and self.evaluate_every % self.log_every:
            raise EvaluationError(
                f"evaluate_every={self.evaluate_every} with log_every={self.log_every}: what is measured "
                "is logged too, so it must be a multiple"
            )
        if self.weights == "bfloat16" and (self.method == "full" or self.precision != "bfloat16"):
            raise EvaluationError(
                f"weights='bfloat16' with method={self.method!r} and precision={self.precision!r}: only what adapters "
                "leave as it is may be rounded, and only computing in bfloat16 goes with it"
            )
        if self.merge and self.method == "full":
            raise EvaluationError("merge=true with method='full': there are no adapters to merge")

    @classmethod
    def from_yaml(cls, path: str | Path, changed: Mapping[str, Any] = MappingProxyType({})) -> FineTuning:
        """Read a description.

        Args:
            path: of the file.
            changed: settings that overrule those of the file.

        Raises:
            EvaluationError: the file is no YAML mapping, or a key or a value is wrong or missing.
            OSError: it cannot be read.
        """
        return read_yaml(cls, path, changed)

    @property
    def checkpoint(self) -> str:
        """The folder, as an absolute path that adapters can name, or the id that is loaded."""
        name = self.model or default_checkpoint()
        return str(Path(name).resolve()) if Path(name).exists() else name

    @property
    def identity(self) -> dict[str, Any]:
        """What may not differ between two starts on one output: its runs would be neither the one nor the other."""
        fields = {**dataclasses.asdict(self), "model": self.checkpoint}
        return {name: value for name, value in fields.items() if name not in _FREE}

    @property
    def name(self) -> str:
        """The model, as the results name it."""
        return self.model or "tiny-llama"

    def measured_lengths(self, training_length: int) -> tuple[int, ...]:
        """Lengths of the measurement, in tokens."""
        if self.lengths:
            return self.lengths
        doubled = [training_length]
        while doubled[-1] * 2 < self.length:
            doubled.append(doubled[-1] * 2)
        return (*doubled, self.length) if self.length > training_length else tuple(doubled)

    def schedule(self, folder: Path) -> Schedule:
        """What the training loop is told."""
        return Schedule(
            output=str(folder),
            context=self.length,
            batch_size=self.batch_size,
            steps=self.steps,
            warmup_steps=self.warmup_steps,
            decay_steps=self.decay_steps,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            save_every_seconds=self.save_every_seconds,
            evaluate_every=self.log_every,
            seed=self.seed,
        )

    def row_settings(self, training_length: int) -> RowSettings:
        """What training rows look like.

        Raises:
            EvaluationError: positions are to skip, and the rows are no longer than L.
        """
        shared: dict[str, Any] = {"batch_size": self.batch_size, "seed": self.seed, "allow_short": self.allow_short}
        if self.layout != POSE:
            return RowSettings(length=self.length, layout=self.layout, **shared)
        if self.length <= training_length:
            raise EvaluationError(
                f"layout='pose' with length={self.length}: rows of the training length, {training_length} tokens, have "
                "nothing to skip to; length must be above it"
            )
        positions = PoSE(target_length=self.length, chunks=self.pose_chunks, seed=self.seed)
        return RowSettings(length=training_length, layout="padded", positions=positions, **shared)


_FREE = {
    "schemes", "steps", "learning_rate", "warmup_steps", "decay_steps", "micro_batch_size", "gradient_checkpointing",
    "device", "parallel", "context_parallel", "check_memory", "save_every_seconds", "log_every", "evaluate_every",
    "report_to", "output", "merge", "on_bad_line",
}  # fmt: skip

_CHOICES: dict[str, tuple[str, ...]] = {
    "layout": (*LAYOUTS, POSE),
    "method": get_args(Method),
    "precision": PRECISIONS,
    "weights": PRECISIONS,
    "parallel": get_args(Parallel),
    "on_bad_line": ("stop", "skip"),
}
