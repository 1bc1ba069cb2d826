"""The training loop that every recipe shares: schedule, optimiser, log.

A run saves its state every few minutes; started again, it goes on where it stopped. For that to change nothing, the
loss of a step must be a function of the weights and of the step alone. A state is saved between the gradient of the
next step and that step, so that none is ever saved whose loss is not finite. Several processes train one model where
it is wrapped for them (`finetuning.parallel`); each then gives the losses of its own rows.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from rope_patch.errors import EvaluationError, RopePatchError
from rope_patch.evaluation.sharing import is_main, on_main, world
from rope_patch.files import written_aside
from rope_patch.training.state import HasState, restore, save_state

LOG = "log.jsonl"
"""Name of the log in the folder of a run."""


class Diverged(RopePatchError, ArithmeticError):
    """The loss or the gradient of a step is not finite."""


@dataclass(frozen=True)
class Schedule:
    """What every run is told.

    Attributes:
        output: folder of the run.
        context: tokens that a training sequence predicts.
        batch_size: sequences per step.
        steps: of the whole run.
        warmup_steps, decay_steps: the learning rate rises over the first and falls to zero over the last; with 0 it
            does not.
        learning_rate: between the two.
        weight_decay: of the matrices.
        save_every_seconds: how often the state is saved.
        evaluate_every: steps between two rows of the log.
        seed: of the weights and of the data.
    """

    output: str
    context: int
    batch_size: int
    steps: int
    warmup_steps: int
    decay_steps: int
    learning_rate: float
    weight_decay: float
    save_every_seconds: float
    evaluate_every: int
    seed: int


def train(
    config: Schedule,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    losses_at: Callable[[int], Iterable[torch.Tensor]],
    observe: Callable[[int], dict[str, Any]],
    title: str | None = None,
    data: HasState | None = None,
    report: Callable[[dict[str, Any]], None] = lambda _: None,
) -> float:
    """Go on from the last saved state to `config.steps`, saving the state and writing the log on the way.

    Args:
        config: the schedule.
        model: trained in place.
        optimizer: of its parameters.
        losses_at: the loss of a step, in parts, scalars whose gradients are taken one after another; a function of the
            weights and of the step alone.
        observe: what is measured on other text when so many steps are over, for the log.
        title: what the progress bar says.
        data: where `losses_at` reads, if that has a place that must be found again.
        report: is told every row of the log.

    Returns:
        the seconds that all steps took, those before an interruption included.

    Raises:
        Diverged: the loss of the state that was saved last is finite.
        EvaluationError: that state is of another model, or beyond `config.steps`.
    """
    output = Path(config.output)
    step, spent = restore(output, model, optimizer, data)
    if step > config.steps:
        raise EvaluationError(f"steps={config.steps}, but {output} is at step {step} already; choose another output")
    saved = started = time.monotonic()

    def is_due() -> bool:
        return time.monotonic() - saved >= config.save_every_seconds

    with ExitStack() as stack:
        silent = None if is_main() else True
        bar = stack.enter_context(
            tqdm(total=config.steps, initial=step, unit="step", mininterval=10, desc=title, disable=silent)
        )
        log = stack.enter_context(_open_log(output, step)) if is_main() else None
        while step < config.steps:
            rate = learning_rate(step, config)
            for group in optimizer.param_groups:
                group["lr"] = rate
            place = None if data is None else data.state_dict()
            loss = take_gradient(model, optimizer, losses_at, step)
            # the clocks of several processes differ, and all have to save together
            if step and on_main(is_due):
                save_state(output, model, optimizer, step, spent + time.monotonic() - started, place)
                saved = time.monotonic()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            bar.update()
            if step % config.evaluate_every == 0 or step == config.steps:
                evaluating = time.monotonic()
                row = {
                    "step": step,
                    "tokens": step * config.batch_size * config.context,
                    "train_nll": round(loss, 4),
                    "learning_rate": rate,
                    "seconds": round(spent + evaluating - started),
                    **observe(step),
                }
                if log is not None:
                    log.write(json.dumps(row) + "\n")
                report(row)
                bar.set_postfix({name: row[name] for name in ("train_nll", "held_out_nll") if name in row})
                started += time.monotonic() - evaluating  # the measurement is not part of the training
    spent += time.monotonic() - started
    save_state(output, model, optimizer, step, spent, None if data is None else data.state_dict())
    return spent


def take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    losses_at: Callable[[int], Iterable[torch.Tensor]],
    step: int,
) -> float:
    """One step of the optimiser, with gradients clipped to a norm of 1.

    Args:
        model: trained in place.
        optimizer: of its parameters.
        losses_at: the loss of a step in parts, scalars each; see `train`.
        step: its number, from 0.

    Returns:
        the loss; of several processes their mean, as the gradient is.

    Raises:
        Diverged: nothing was changed.
    """
    loss = take_gradient(model, optimizer, losses_at, step)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def take_gradient(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    losses_at: Callable[[int], Iterable[torch.Tensor]],
    step: int,
) -> float:
    """The gradient of a step, clipped to a norm of 1, and its loss, as `take_step` returns it.

    Args:
        model, optimizer, losses_at, step: as of `take_step`; the losses are scalars.

    Raises:
        Diverged: one of the two is not finite; the gradient is thrown away.
    """
    total = 0.0
    for part in losses_at(step):
        part.backward()
        total += part.item()
    loss = _mean_over_processes(total, part.device)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if not (math.isfinite(loss) and math.isfinite(norm.item())):
        optimizer.zero_grad()
        advice = "lower the learning rate" if step else "nothing was trained yet, so the weights came like this"
        raise Diverged(f"step {step + 1}: the loss is {loss:g} and the norm of its gradient {norm.item():g}; {advice}")
    return loss


def _mean_over_processes(value: float, device: torch.device) -> float:
    if world() == 1:
        return value
    total = torch.tensor(value, dtype=torch.float64, device=device)
    distributed.all_reduce(total)
    return total.item() / world()


def make_optimizer(model: nn.Module, config: Schedule, undecayed: Iterable[nn.Parameter] = ()) -> torch.optim.Optimizer:
    """AdamW for what is to be trained, with weight decay on the matrices.

    Args:
        model: whose parameters are trained.
        config: the learning rate and the weight decay.
        undecayed: parameters that are left without weight decay although they are matrices.
    """
    spared = {id(parameter) for parameter in undecayed}
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.ndim >= 2 and id(p) not in spared]
    others = [p for p in parameters if p.ndim < 2 or id(p) in spared]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, config: Schedule) -> float:
    """It warms up, stays, and falls to zero: while it stays, `steps` may be changed between two starts."""
    warmup = (step + 1) / max(1, config.warmup_steps)
    decay = (config.steps - step) / config.decay_steps if config.decay_steps else 1.0
    return config.learning_rate * min(1.0, warmup, decay)


def next_token_loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Mean NLL in nats of every token of `rows`, `(batch, context + 1)`, but the first of each."""
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


def draw_crops(stream: torch.Tensor, context: int, batch_size: int, random: torch.Generator) -> torch.Tensor:
    """Random stretches of the stream, `(batch, context + 1)`.

    Args:
        stream: tokens, `(tokens,)`.
        context: L in tokens.
        batch_size: how many stretches.
        random: the only source of chance.
    """
    starts = torch.randint(len(stream) - context - 1, (batch_size,), generator=random)
    return torch.stack([stream[start : start + context + 1] for start in starts])


def even_crops(stream: torch.Tensor, context: int, count: int) -> torch.Tensor:
    """Stretches spread evenly over the stream, `(count, context + 1)`: the same at every call.

    Args:
        stream: tokens, `(tokens,)`.
        context: L in tokens.
        count: how many stretches.
    """
    starts = torch.linspace(0, len(stream) - context - 1, count).long()
    return torch.stack([stream[start : start + context + 1] for start in starts])


def read_log(output: Path) -> list[dict[str, Any]]:
    """The rows of the log by step, without a last one that was cut off in the middle of writing."""
    path = output / LOG
    *lines, _ = path.read_text().split("\n") if path.exists() else [""]
    rows = {row["step"]: row for row in map(json.loads, lines)}
    return [rows[step] for step in sorted(rows)]


def _open_log(output: Path, step: int) -> TextIO:
    """The log to be written on, with the rows up to a step: those behind it will be written again."""
    rows = [row for row in read_log(output) if row["step"] <= step]
    with written_aside(output / LOG, sole_writer=True) as aside:
        aside.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (output / LOG).open("a", buffering=1)
