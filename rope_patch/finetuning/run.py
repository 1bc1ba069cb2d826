"""Train one checkpoint under one scheme at a longer context: measure, train, measure again, save."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.corpora import load_corpus, read_documents
from rope_patch.evaluation.documents import Documents
from rope_patch.evaluation.loading import load_model, load_tokenizer
from rope_patch.evaluation.perplexity import measure
from rope_patch.evaluation.results import LineFile, ResultFile, Row
from rope_patch.evaluation.sharing import on_main, only_main, world
from rope_patch.evaluation.specs import REFERENCES, scheme_at
from rope_patch.finetuning import adapters, parallel, saving
from rope_patch.finetuning.description import FineTuning
from rope_patch.finetuning.history import Point, point_key
from rope_patch.finetuning.in_memory import MemoryRows
from rope_patch.finetuning.rows import Rows, RowSettings, seeded
from rope_patch.finetuning.stream import StreamedRows
from rope_patch.finetuning.trackers import Trackers
from rope_patch.models.head import find_language_model
from rope_patch.models.reading import read_stacks
from rope_patch.mounting.parameters import learned_parameters
from rope_patch.patching import find_handle, patch, unpatch
from rope_patch.schemes import PositionInterpolation, Scheme
from rope_patch.training.cross_entropy import LanguageModelLoss
from rope_patch.training.loop import Diverged, make_optimizer, train
from rope_patch.training.memory import available, estimate, require_room
from rope_patch.training.state import restore

DESCRIPTION = "description.json"
"""In the output: what its runs were started with."""

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

    @property
    def is_finished(self) -> bool:
        """Whether the checkpoint is there, as it is asked for, and its measurement too."""
        facts = saving.facts_of(self.checkpoint)
        enough = facts.get("step", 0) >= self.description.steps and facts.get("merge") == self.description.merge
        return enough and self.has_point(facts["step"])

    def has_point(self, step: int) -> bool:
        """Whether the scheme was measured after so many steps; on processes that write nothing it never was."""
        return self.points is not None and self.points.find(point_key(self.spec, step)) is not None


def check_claim(description: FineTuning) -> None:
    """Make sure that the output holds no runs of another description.

    Raises:
        EvaluationError: it does; what differs.
    """
    path = Path(description.output) / DESCRIPTION
    if not path.exists():
        return
    theirs, ours = json.loads(path.read_text()), json.loads(_as_json(description))
    changed = [
        f"{name} was {theirs.get(name)!r} and is {ours[name]!r}" for name in ours if theirs.get(name) != ours[name]
    ]
    if changed:
        raise EvaluationError(f"{path.parent} holds other runs ({'; '.join(changed)}); choose another output")


def _claim(task: Task) -> None:
    """Make the output that of this description, once something has been done for it."""
    task.folder.mkdir(parents=True, exist_ok=True)
    (Path(task.description.output) / DESCRIPTION).write_text(_as_json(task.description))


def _as_json(description: FineTuning) -> str:
    return json.dumps(description.identity, indent=2) + "\n"


def run_task(task: Task) -> None:
    """Measure, train, measure, save. Started again, it goes on where it stopped; what is finished is left alone.

    Several processes train together where they were launched so; each has to come here.

    Raises:
        RopePatchError, OSError: something is wrong with the description, the checkpoint, the text or the folder.
        Diverged: a loss is not finite; what was saved last is also left as a checkpoint, `saving.LAST_GOOD`.
    """
    description = task.description
    if on_main(lambda: task.is_finished):
        task.say(f"{task.spec}: trained before, {task.checkpoint} is there")
        return
    if description.check_memory:
        _check_memory(task)
    model = _load(task)
    tokenizer = load_tokenizer(description.checkpoint)
    training_length = read_stacks(model)[0].training_length
    scheme = scheme_at(task.spec, description.length, training_length)
    settings = description.row_settings(training_length)
    settings.check_attention(find_language_model(model).config._attn_implementation, _rows_at_once(description))
    documents = _documents(description)
    data = _rows(task, documents, tokenizer, find_language_model(model).config.vocab_size, settings)
    measurement = _Measurement(task, tokenizer, scheme, description.measured_lengths(training_length))
    measurement.before(model)
    on_main(lambda: _claim(task))
    with _own_randomness(find_language_model(model).device, description.seed):
        _Trainer(task, model, tokenizer, scheme, training_length, data, measurement).train()
    if description.streaming:  # before, nobody knew
        task.say(f"training text: {data.facts}; {documents.bad_records}")


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

        Raises:
            Diverged: one is not finite.
        """
        handle = find_handle(model)
        rows = self._measure(model, step, self.task.spec, "plain" if handle is None else handle.scheme)
        found = {row.length: row.nll for row in rows}
        if not all(map(math.isfinite, found.values())):
            raise Diverged(f"after step {step}: the loss of the held-out text is {found}; lower the learning rate")
        return found

    def _measure(self, model: nn.Module, step: int, spec: str, scheme: str | Scheme) -> list[Row]:
        description = self.task.description
        device = find_language_model(model).device
        with _autocast(device, enabled=description.weights == "bfloat16"):  # else in float32, whatever it trained in
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
        point = Point.of(spec, step, rows)
        if self.task.points is not None and self.task.points.find(point.key()) != point:
            self.task.points.append(point)
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
        self.scheme, self.training_length = scheme, training_length
        self.device = find_language_model(model).device
        self.model = _trainable(task, model, scheme)
        if description.warm_start_steps and learned_parameters(model):
            raise EvaluationError(
                f"warm_start_steps={description.warm_start_steps}: {scheme} learns parameters, which have to be there "
                "from the first step on"
            )
        self.loss = parallel.wrap(LanguageModelLoss(self.model), self.device, description.parallel)
        self.optimizer = make_optimizer(self.loss, description.schedule(task.folder))

    def train(self) -> None:
        """All steps that are left, then the checkpoint.

        Raises:
            Diverged: a loss is not finite; the weights of the last saved state are left as `saving.LAST_GOOD`.
        """
        description, folder = self.task.description, self.task.folder
        self.loss.train()
        with Trackers(description.report_to, folder, dataclasses.asdict(description)) as trackers:
            try:
                train(
                    description.schedule(folder),
                    self.loss,
                    self.optimizer,
                    self._losses_at,
                    self._observe,
                    title=self.task.spec,
                    data=self.data,
                    report=trackers.log,
                )
            except Diverged as error:
                raise Diverged(f"{error}; {self._leave_last_good()}") from error
        if not on_main(lambda: self.task.has_point(description.steps)):  # killed at a bad moment, or thrown away since
            self._measure(description.steps)
        path = self._save(saving.CHECKPOINT, description.steps, description.merge)
        self.task.say(f"{self.task.spec}: saved as {path}")

    def _save(self, name: str, step: int, merge: bool) -> Path:
        """The weights as they are, as a checkpoint in the folder of the run."""
        path = self.task.folder / name
        weights = parallel.whole_weights(self.loss)
        facts = {**self.task.description.identity, "scheme": self.task.spec, "step": step, "merge": merge}
        only_main(lambda: saving.save(path, self.model, self.tokenizer, weights, merge, facts))
        return path

    def _leave_last_good(self) -> str:
        """Make a checkpoint of the state that was saved last.

        Returns:
            what can be done with it, for people.
        """
        step, _ = restore(self.task.folder, self.loss, self.optimizer)
        if not step:
            return "no state had been saved yet: the same command with another learning_rate begins anew"
        self._go_under(self._scheme_at(step - 1))
        path = self._save(saving.LAST_GOOD, step, merge=False)
        return (
            f"the same command with another learning_rate goes on from step {step}, the last that was saved; its "
            f"weights are also in {path}"
        )

    def _losses_at(self, step: int) -> Iterator[torch.Tensor]:
        """The parts of a step's loss: its mean over all targets of all processes is the mean over the processes."""
        description = self.task.description
        self._go_under(self._scheme_at(step))
        whole = self.data.batch(step)
        rows = whole.part(parallel.rank(), world()).to(self.device)
        parts = rows.split(_rows_at_once(description))
        share = world() / max(1, whole.targets)
        for number, part in enumerate(parts):
            # dropout, too, is a function of the step alone, so that a run that is resumed draws what it would have
            torch.manual_seed(seeded(description.seed, "dropout", step, parallel.rank(), number).initial_seed())
            with parallel.accumulating(self.loss, more=number + 1 < len(parts)):
                with _autocast(self.device, enabled=description.precision == "bfloat16"):
                    loss = self.loss(part.input_ids, part.labels, part.position_ids, part.attention_mask)
                yield loss * share

    def _scheme_at(self, step: int) -> Scheme | None:
        """What a step is trained under."""
        if step < self.task.description.warm_start_steps:
            return PositionInterpolation(factor=self.task.description.length / self.training_length)
        return self.scheme

    def _go_under(self, scheme: Scheme | None) -> None:
        """Change the scheme where the warm start ends, and where a run that is resumed is beyond it."""
        handle = find_handle(self.model)
        if (handle.scheme if handle else None) == scheme:
            return
        with parallel.whole(self.loss):
            if handle is not None:
                handle.remove()
            if scheme is not None:
                patch(self.model, scheme)

    def _observe(self, step: int) -> dict[str, Any]:
        """The measurement where one is due; the log has the training loss anyway."""
        every, last = self.task.description.evaluate_every, self.task.description.steps
        if step == last or (every is not None and step % every == 0):
            return {"nll": self._measure(step)}
        return {}

    def _measure(self, step: int) -> dict[int, float]:
        return self.measurement.at(self.loss, step)


def _load(task: Task) -> nn.Module:
    """The checkpoint, without a scheme of its own."""
    description = task.description
    model = load_model(
        description.checkpoint, dtype=description.weights, device=description.device, attention=description.attention
    )
    if find_language_model(model).config.is_encoder_decoder:
        raise EvaluationError(f"{description.checkpoint} is an encoder with a decoder; only decoders alone are trained")
    if hasattr(model, "peft_config"):
        raise EvaluationError(f"{description.checkpoint} holds adapters; merge them before training on")
    if (handle := find_handle(model)) is not None:
        if handle.scheme.learns:
            raise EvaluationError(
                f"{description.checkpoint} was saved under {handle.scheme}, which learned parameters; training would "
                "throw them away"
            )
        task.say(f"the checkpoint was saved under {handle.scheme}; {task.spec} stands in its place")
        unpatch(model)
    return model


def _documents(description: FineTuning) -> Documents:
    """What is trained on."""
    return read_documents(
        description.text or description.dataset or "stdlib",
        split=description.split,
        column=description.column,
        config=description.config,
        streaming=description.streaming,
        on_bad_line=description.on_bad_line,
    )


def _rows(task: Task, documents: Documents, tokenizer: Any, vocab_size: int, settings: RowSettings) -> Rows:
    description = task.description
    if description.streaming:
        return StreamedRows(documents, tokenizer, settings, vocab_size, description.shuffle_buffer)
    rows = MemoryRows.of_texts(documents, tokenizer, settings, vocab_size)
    task.say(f"training text: {rows.facts}; {documents.bad_records}")
    return rows


def _rows_at_once(description: FineTuning) -> int:
    share = max(1, description.batch_size // world())
    return min(share, description.micro_batch_size or share)


def _trainable(task: Task, model: nn.Module, scheme: Scheme | None) -> nn.Module:
    """The model under its scheme, with the parameters of the method to be trained."""
    description = task.description
    handle = None if scheme is None else patch(model, scheme)
    parallel.check_context_parallel(handle, description.context_parallel, find_language_model(model).device)
    if description.gradient_checkpointing:
        find_language_model(model).gradient_checkpointing_enable({"use_reentrant": False})
    return adapters.prepare(model, description.method, description.rank, description.alpha, description.dropout)


def _check_memory(task: Task) -> None:
    """Measure what a step takes on a copy that is thrown away: adapters, once joined, leave no model as it was.

    Raises:
        EvaluationError: it does not fit.
    """
    description = task.description
    model = _load(task)
    device, training_length = find_language_model(model).device, read_stacks(model)[0].training_length
    with _own_randomness(device, description.seed):
        model = _trainable(task, model, scheme_at(task.spec, description.length, training_length))
    sharded = world() > 1 and parallel.chosen(description.parallel) == "fsdp2"
    needed = estimate(
        LanguageModelLoss(model),
        description.row_settings(training_length).length,
        _rows_at_once(description),
        checkpointing=description.gradient_checkpointing,
        dtype=torch.bfloat16 if description.precision == "bfloat16" else None,
        shards=world() if sharded else 1,
    )
    task.say(f"{task.spec}: a step takes about {needed}")
    require_room(needed, available(device))
    del model
    gc.collect()  # patches and adapters refer to the model, and the next one needs the room


def _autocast(device: torch.device, enabled: bool) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled)


@contextmanager
def _own_randomness(device: torch.device, seed: int) -> Iterator[None]:
    """New parameters and dropout follow the seed; whoever called this finds the generators as they were."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
