"""The training loop that every recipe shares: schedule, optimiser, saved state, log.

A run saves its state every few minutes, written aside and renamed; started again, it goes on where it stopped. For
that to change nothing, the loss of a step must be a function of the weights and of the step alone.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from rope_patch.errors import RopePatchError

STATE, LOG = "state.pt", "log.jsonl"
"""Names of the files in the folder of a run."""


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
        warmup_steps, decay_steps: the learning rate rises over the first and falls to zero over the last.
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
    loss_at: Callable[[int], torch.Tensor],
    held_out_loss: Callable[[], float],
    title: str | None = None,
) -> float:
    """Go on from the last saved state to `config.steps`, saving the state and writing the log on the way.

    Args:
        config: the schedule.
        model: trained in place.
        optimizer: of its parameters.
        loss_at: the loss of a step, a function of the weights and of the step alone.
        held_out_loss: a mean over other text, for the log.
        title: what the progress bar says.

    Returns:
        the seconds that all steps took, those before an interruption included.

    Raises:
        Diverged: the last saved state is intact.
    """
    output = Path(config.output)
    step, spent = restore(output, model, optimizer)
    saved = started = time.monotonic()
    bar = tqdm(total=config.steps, initial=step, unit="step", mininterval=10, desc=title)
    with (output / LOG).open("a", buffering=1) as log, bar:
        while step < config.steps:
            rate = learning_rate(step, config)
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = take_step(model, optimizer, loss_at, step)
            step += 1
            bar.update()
            if step % config.evaluate_every == 0 or step == config.steps:
                evaluating = time.monotonic()
                row = {
                    "step": step,
                    "tokens": step * config.batch_size * config.context,
                    "train_nll": round(loss, 4),
                    "held_out_nll": round(held_out_loss(), 4),
                    "learning_rate": rate,
                    "seconds": round(spent + time.monotonic() - started),
                }
                log.write(json.dumps(row) + "\n")
                bar.set_postfix(train=row["train_nll"], held_out=row["held_out_nll"])
                started += time.monotonic() - evaluating  # the measurement is not part of the training
            if time.monotonic() - saved > config.save_every_seconds:
                save_state(output, model, optimizer, step, spent + time.monotonic() - started)
                saved = time.monotonic()
    spent += time.monotonic() - started
    save_state(output, model, optimizer, step, spent)
    return spent


def take_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_at: Callable[[int], torch.Tensor], step: int
) -> float:
    """One step of the optimiser, with gradients clipped to a norm of 1.

    Raises:
        Diverged: nothing was changed.
    """
    loss = loss_at(step)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not (math.isfinite(loss.item()) and math.isfinite(norm.item())):
        raise Diverged(
            f"step {step + 1}: the loss is {loss.item():g} and the norm of its gradient {norm.item():g}; the last "
            "saved state is intact, lower the learning rate"
        )
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def make_optimizer(model: nn.Module, config: Schedule, undecayed: Iterable[nn.Parameter] = ()) -> torch.optim.Optimizer:
    """AdamW with weight decay on the matrices.

    Args:
        model: whose parameters are trained.
        config: the learning rate and the weight decay.
        undecayed: parameters that are left without weight decay although they are matrices.
    """
    spared = {id(parameter) for parameter in undecayed}
    parameters = list(model.parameters())
    matrices = [p for p in parameters if p.ndim >= 2 and id(p) not in spared]
    others = [p for p in parameters if p.ndim < 2 or id(p) in spared]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, config: Schedule) -> float:
    """It warms up, stays, and falls to zero: while it stays, `steps` may be changed between two starts."""
    warmup = (step + 1) / config.warmup_steps
    decay = (config.steps - step) / config.decay_steps
    return config.learning_rate * min(1.0, warmup, decay)


def next_token_loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Mean NLL in nats of every token of `rows`, `(batch, context + 1)`, but the first of each."""
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


def draw_crops(stream: torch.Tensor, context: int, batch_size: int, random: torch.Generator) -> torch.Tensor:
    """Random stretches of the stream, `(batch, context + 1)`."""
    starts = torch.randint(len(stream) - context - 1, (batch_size,), generator=random)
    return torch.stack([stream[start : start + context + 1] for start in starts])


def even_crops(stream: torch.Tensor, context: int, count: int) -> torch.Tensor:
    """Stretches spread evenly over the stream, `(count, context + 1)`: the same at every call."""
    starts = torch.linspace(0, len(stream) - context - 1, count).long()
    return torch.stack([stream[start : start + context + 1] for start in starts])


def save_state(
    output: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, seconds: float = 0.0
) -> None:
    """Write what `restore` needs aside, then rename it: an interruption leaves the old state or the new one."""
    aside = output / f"{STATE}.tmp"
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "seconds": seconds}
    torch.save(state, aside)
    os.replace(aside, output / STATE)


def restore(output: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, float]:
    """Load the last saved state, if there is one.

    Returns:
        the steps that were taken, and the seconds that they took.
    """
    path = output / STATE
    if not path.exists():
        return 0, 0.0
    state = torch.load(path, weights_only=True, map_location="cpu")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"], state.get("seconds", 0.0)


def read_log(output: Path) -> list[dict[str, Any]]:
    """The rows of the log by step; a resumed run may have logged a step twice."""
    path = output / LOG
    lines = path.read_text().splitlines() if path.exists() else []
    rows = {row["step"]: row for row in map(json.loads, lines)}
    return [rows[step] for step in sorted(rows)]
