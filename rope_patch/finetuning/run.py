"""Train one checkpoint under one scheme at a longer context: measure, train, measure again, save."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.corpora import load_corpus, read_documents
from rope_patch.evaluation.loading import load_model, load_tokenizer
from rope_patch.evaluation.perplexity import measure
from rope_patch.evaluation.results import LineFile, ResultFile, Row
from rope_patch.evaluation.sharing import on_main, only_main, world
from rope_patch.evaluation.specs import REFERENCES, scheme_at
from rope_patch.finetuning import adapters, parallel, saving
from rope_patch.finetuning.description import FineTuning
from rope_patch.finetuning.history import Point
from rope_patch.finetuning.in_memory import MemoryRows
from rope_patch.finetuning.rows import Rows, RowSettings, seeded
from rope_patch.finetuning.stream import StreamedRows
from rope_patch.finetuning.trackers import Trackers
from rope_patch.models.head import find_language_model
from rope_patch.models.reading import read_stacks
from rope_patch.parameters import learned_parameters
from rope_patch.patch import find_handle, patch, unpatch
from rope_patch.schemes import PositionInterpolation, Scheme
from rope_patch.training.cross_entropy import LanguageModelLoss
from rope_patch.training.loop import make_optimizer, train
from rope_patch.training.memory import available, estimate, require_room

DESCRIPTION = "description.json"
"""What a run was started with, in its folder: going on with something else would be neither the one nor the other."""

# what may differ between two starts of a run without making it another one
_FREE = {
    "steps", "learning_rate", "warmup_steps", "decay_steps", "micro_batch_size", "gradient_checkpointing", "device",
    "parallel", "check_memory", "save_every_seconds", "log_every", "evaluate_every", "report_to", "output", "schemes",
    "lengths", "targets", "documents", "eval_text", "eval_dataset", "eval_split", "merge",
}  # fmt: skip

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Task:
    """One scheme of a description.

    Attributes:
        description: what to do.
        spec: the scheme, as the description names it.
        folder: of this run.
        rows, points: where measurements are written; None on processes that write nothing.
        say: is told, in a sentence each, what happens.
    """

    description: FineTuning
    spec: str
    folder: Path
    rows: ResultFile | None
    points: LineFile[Point] | None
    say: Say

    @property
    def checkpoint(self) -> Path:
        """What the run leaves."""
        return self.folder / saving.CHECKPOINT


def run_task(task: Task) -> None:
    """Measure, train, measure, save. Started again, it goes on where it stopped; what is finished is left alone.

    Several processes train together where they were launched so; each has to come here.

    Raises:
        RopePatchError, OSError: something is wrong with the description, the checkpoint, the text or the folder.
        Diverged: a loss is not finite; the state that was saved last is intact.
    """
    description = task.description
    on_main(lambda: _claim(task))
    if on_main(lambda: _is_finished(task)):
        task.say(f"{task.spec}: trained before, {task.checkpoint} is there")
        return
    model = _load(task)
    tokenizer = load_tokenizer(description.checkpoint)
    training_length = read_stacks(model)[0].training_length
    scheme = scheme_at(task.spec, description.length, training_length)
    settings = description.row_settings(training_length)
    settings.check_attention(find_language_model(model).config._attn_implementation, _rows_at_once(description))
    data = _rows(task, tokenizer, find_language_model(model).config.vocab_size, settings)
    if description.check_memory:
        _check_memory(task, scheme, settings.length)
    measurement = _Measurement(task, tokenizer, scheme, description.measured_lengths(training_length))
    measurement.before(model)
    with _own_randomness(find_language_model(model).device):
        trainer = _Trainer(task, model, tokenizer, scheme, training_length, data, measurement)
        trainer.train()


class _Measurement:
    """Perplexity against length of the same held-out text, before, during and after."""

    def __init__(self, task: Task, tokenizer: Any, scheme: Scheme | None, lengths: tuple[int, ...]) -> None:
        self.task, self.tokenizer, self.scheme, self.lengths = task, tokenizer, scheme, lengths
        source = task.description.eval_text or task.description.eval_dataset or "stdlib"
        self.corpus = load_corpus(source, split=task.description.eval_split, column=task.description.column)

    def before(self, model: nn.Module) -> None:
        """The checkpoint as it is, with attention cut at L, and under the scheme without training."""
        for line in REFERENCES:
            self._measure(model, 0, line, line)
        if self.scheme is not None:
            self._measure(model, 0, self.task.spec, self.scheme)

    def at(self, model: nn.Module, step: int) -> dict[int, float]:
        """A model in training, as it is.

        Returns:
            NLL in nats per token by length.
        """
        handle = find_handle(model)
        rows = self._measure(model, step, self.task.spec, "plain" if handle is None else handle.scheme)
        return {row.length: row.nll for row in rows}

    def _measure(self, model: nn.Module, step: int, spec: str, scheme: str | Scheme) -> list[Row]:
        description = self.task.description
        rows = measure(
            model,
            self.tokenizer,
            self.corpus,
            [scheme],
            self.lengths,
            protocol="last",
            targets=description.targets,
            documents=description.documents,
            seed=description.seed,
            name=description.name,
            results=self.task.rows,
        )
        if self.task.points is not None:
            self.task.points.append(Point.of(spec, step, rows))
        return rows


class _Trainer:
    """The training itself: what the loop asks for at each step."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        tokenizer: Any,
        scheme: Scheme | None,
        training_length: int,
        data: Rows,
        measurement: _Measurement,
    ) -> None:
        description = task.description
        self.task, self.data, self.measurement, self.tokenizer = task, data, measurement, tokenizer
        self.scheme, self.warm_up = scheme, PositionInterpolation(factor=description.length / training_length)
        self.device = find_language_model(model).device
        torch.manual_seed(seeded(description.seed, "parameters").initial_seed())  # on every process the same adapters
        self.model = _trainable(task, model, scheme)
        if description.warm_start_steps and learned_parameters(model):
            raise EvaluationError(
                f"warm_start_steps={description.warm_start_steps}: {scheme} learns parameters, which have to be there "
                "from the first step on"
            )
        self.loss = parallel.wrap(
            LanguageModelLoss(self.model), self.device, description.parallel, description.precision
        )
        self.trackers = Trackers(description.report_to, task.folder, dataclasses.asdict(description))

    def train(self) -> None:
        """All steps that are left, then the checkpoint."""
        description, schedule = self.task.description, self.task.description.schedule(self.task.folder)
        self.loss.train()
        optimizer = make_optimizer(self.loss, schedule)
        train(
            schedule,
            self.loss,
            optimizer,
            self._losses_at,
            self._observe,
            title=self.task.spec,
            data=self.data,
            report=self.trackers.log,
        )
        self.trackers.finish()
        weights = parallel.whole_weights(self.loss)
        path = only_main(lambda: saving.save(self.task.folder, self.model, self.tokenizer, weights, description.merge))
        if path is not None:
            self.task.say(f"{self.task.spec}: saved as {path}")

    def _losses_at(self, step: int) -> Iterator[torch.Tensor]:
        """The parts of a step's loss: its mean over all targets of all processes is the mean over the processes."""
        description = self.task.description
        self._go_under(self.warm_up if step < description.warm_start_steps else self.scheme)
        whole = self.data.batch(step)
        rows = whole.part(parallel.rank(), world()).to(self.device)
        parts = rows.split(_rows_at_once(description))
        share = world() / max(1, whole.targets)
        for number, part in enumerate(parts):
            # dropout, too, is a function of the step alone, so that a run that is resumed draws what it would have
            torch.manual_seed(seeded(description.seed, "dropout", step, parallel.rank(), number).initial_seed())
            with parallel.accumulating(self.loss, more=number + 1 < len(parts)):
                with torch.autocast(self.device.type, torch.bfloat16, enabled=description.precision == "bfloat16"):
                    loss = self.loss(part.input_ids, part.labels, part.position_ids, part.attention_mask)
                yield loss * share

    def _go_under(self, scheme: Scheme | None) -> None:
        """Change the scheme where the warm start ends, and where a run that is resumed is beyond it."""
        handle = find_handle(self.model)
        if (handle.scheme if handle else None) == scheme:
            return
        if handle is not None:
            handle.remove()
        if scheme is not None:
            patch(self.model, scheme)

    def _observe(self, step: int) -> dict[str, Any]:
        """The measurement where one is due; the log has the training loss anyway."""
        every, last = self.task.description.evaluate_every, self.task.description.steps
        found: dict[str, Any] = {}
        if step == last or (every is not None and step % every == 0):
            found = {"nll": self.measurement.at(self.loss, step)}
        return found


def _claim(task: Task) -> None:
    """Make the folder this run's own.

    Raises:
        EvaluationError: a run of another description is in it.
    """
    task.folder.mkdir(parents=True, exist_ok=True)
    path = task.folder / DESCRIPTION
    fields = {**dataclasses.asdict(task.description), "model": task.description.checkpoint, "scheme": task.spec}
    ours = json.loads(json.dumps({name: value for name, value in fields.items() if name not in _FREE}))
    if not path.exists():
        path.write_text(json.dumps(ours, indent=2) + "\n")
        return
    theirs = json.loads(path.read_text())
    changed = [
        f"{name} was {theirs.get(name)!r} and is {value!r}" for name, value in ours.items() if theirs.get(name) != value
    ]
    if changed:
        raise EvaluationError(f"{task.folder} holds another run ({'; '.join(changed)}); choose another output")


def _is_finished(task: Task) -> bool:
    reached = [point.step for point in task.points.rows if point.scheme == task.spec] if task.points else []
    return task.checkpoint.exists() and max(reached, default=0) >= task.description.steps


def _load(task: Task) -> nn.Module:
    """The checkpoint in float32, without a scheme of its own."""
    description = task.description
    model = load_model(
        description.checkpoint, dtype="float32", device=description.device, attention=description.attention
    )
    if find_language_model(model).config.is_encoder_decoder:
        raise EvaluationError(f"{description.checkpoint} is an encoder with a decoder; only decoders alone are trained")
    if (handle := find_handle(model)) is not None:
        if handle.scheme.learns:
            raise EvaluationError(
                f"{description.checkpoint} was saved under {handle.scheme}, which learned parameters; training would "
                "throw them away"
            )
        task.say(f"the checkpoint was saved under {handle.scheme}; {task.spec} stands in its place")
        unpatch(model)
    return model


def _rows(task: Task, tokenizer: Any, vocab_size: int, settings: RowSettings) -> Rows:
    description = task.description
    documents = read_documents(
        description.text or description.dataset or "stdlib",
        split=description.split,
        column=description.column,
        config=description.config,
        streaming=description.streaming,
        on_bad_line=description.on_bad_line,
    )
    if description.streaming:
        return StreamedRows(documents, tokenizer, settings, vocab_size, description.shuffle_buffer)
    rows = MemoryRows.of_texts(documents, tokenizer, settings, vocab_size)
    task.say(f"training text: {rows.facts}; {documents.bad_records}")
    return rows


def _rows_at_once(description: FineTuning) -> int:
    return description.micro_batch_size or max(1, description.batch_size // world())


def _trainable(task: Task, model: nn.Module, scheme: Scheme | None) -> nn.Module:
    """The model under its scheme, with the parameters of the method to be trained."""
    description = task.description
    handle = None if scheme is None else patch(model, scheme)
    parallel.check_context_parallel(handle, description.context_parallel, find_language_model(model).device)
    if description.gradient_checkpointing:
        find_language_model(model).gradient_checkpointing_enable({"use_reentrant": False})
    return adapters.prepare(model, description.method, description.rank, description.alpha, description.dropout)


def _check_memory(task: Task, scheme: Scheme | None, length: int) -> None:
    """Measure what a step takes on a copy that is thrown away: adapters, once joined, leave no model as it was.

    Raises:
        EvaluationError: it does not fit.
    """
    description = task.description
    model = _trainable(task, _load(task), scheme)
    device = find_language_model(model).device
    sharded = world() > 1 and parallel.chosen(description.parallel) == "fsdp2"
    needed = estimate(
        LanguageModelLoss(model),
        length,
        _rows_at_once(description),
        checkpointing=description.gradient_checkpointing,
        dtype=torch.bfloat16 if description.precision == "bfloat16" else None,
        shards=world() if sharded else 1,
    )
    task.say(f"{task.spec}: a step takes about {needed}")
    require_room(needed, available(device))


@contextmanager
def _own_randomness(device: torch.device) -> Iterator[None]:
    """Seeds are set here at every step; whoever called this finds the generators as they were."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield
