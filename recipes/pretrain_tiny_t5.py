"""Pretrain the small T5 of the repository: 256 tokens of context, spans of Python source to be filled in.

    python recipes/pretrain_tiny_t5.py recipes/configs/pretrain_tiny_t5.yaml

The text, the schedule and the saved state are those of `pretrain_tiny.py`. The tokenizer is that of the small Llama
with sentinels for hidden spans.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from pretrain_tiny import (
    draw_loss_curve,
    learning_rate,
    make_optimizer,
    restore,
    save_checkpoint,
    save_state,
    tokenise,
)
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from rope_patch.evaluation.span_corruption import corrupt, draw_spans, sentinels_of

SENTINELS = 64


@dataclass(frozen=True)
class Config:
    output: str
    tokenizer: str
    context: int
    hidden_size: int
    intermediate_size: int
    encoder_layers: int
    decoder_layers: int
    heads: int
    head_dim: int
    batch_size: int
    steps: int
    warmup_steps: int
    decay_steps: int
    learning_rate: float
    weight_decay: float
    save_every_seconds: float
    evaluate_every: int
    seed: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    config = Config(**yaml.safe_load(parser.parse_args().config.read_text()))
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)

    tokenizer = make_tokenizer(config)
    stream, held_out = tokenise(tokenizer, "train"), tokenise(tokenizer, "held_out")
    torch.manual_seed(config.seed)
    model = T5ForConditionalGeneration(t5_config(config, tokenizer))
    optimizer = make_optimizer(model, config)
    step = restore(output, model, optimizer)
    log = (output / "log.jsonl").open("a", buffering=1)
    saved, started = time.monotonic(), time.monotonic()

    bar = tqdm(total=config.steps, initial=step, unit="step", mininterval=10)
    while step < config.steps:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        loss = train_step(model, optimizer, draw_batch(stream, tokenizer, config, seed=config.seed * 1_000_003 + step))
        step += 1
        bar.update()
        if step % config.evaluate_every == 0 or step == config.steps:
            row = {
                "step": step,
                "tokens": step * config.batch_size * config.context,
                "train_nll": round(loss, 4),
                "held_out_nll": round(evaluate(model, held_out, tokenizer, config), 4),
                "learning_rate": optimizer.param_groups[0]["lr"],
                "seconds": round(time.monotonic() - started),
            }
            log.write(json.dumps(row) + "\n")
            bar.set_postfix(train=row["train_nll"], held_out=row["held_out_nll"])
        if time.monotonic() - saved > config.save_every_seconds:
            save_state(output, model, optimizer, step)
            saved = time.monotonic()
    save_state(output, model, optimizer, step)
    save_checkpoint(output / "checkpoint", model, tokenizer)
    draw_loss_curve(output)


def make_tokenizer(config: Config) -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(config.tokenizer)
    added = ["</s>", *(f"<extra_id_{i}>" for i in range(SENTINELS))]
    tokenizer.add_special_tokens({"additional_special_tokens": added})
    tokenizer.eos_token = "</s>"
    return tokenizer


def t5_config(config: Config, tokenizer: PreTrainedTokenizerFast) -> T5Config:
    return T5Config(
        vocab_size=len(tokenizer),
        d_model=config.hidden_size,
        d_kv=config.head_dim,
        d_ff=config.intermediate_size,
        num_layers=config.encoder_layers,
        num_decoder_layers=config.decoder_layers,
        num_heads=config.heads,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        n_positions=config.context,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )


def draw_batch(
    stream: torch.Tensor, tokenizer: PreTrainedTokenizerFast, config: Config, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sources and targets, `(batch, ...)` each: spans of equal number and length in all, so that nothing is padded."""
    random = torch.Generator().manual_seed(seed)
    sentinels = sentinels_of(tokenizer)
    starts = torch.randint(len(stream) - config.context, (config.batch_size,), generator=random).tolist()
    pairs = [
        corrupt(
            stream[start : start + config.context],
            draw_spans(config.context, random),
            sentinels,
            tokenizer.eos_token_id,
        )
        for start in starts
    ]
    return torch.stack([source for source, _, _ in pairs]), torch.stack([target for _, target, _ in pairs])


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]
) -> float:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(input_ids=batch[0], labels=batch[1]).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if not math.isfinite(loss.item()):
        raise SystemExit("the loss is not finite: the last saved state is intact, lower the learning rate")
    return loss.item()


@torch.no_grad()
def evaluate(
    model: torch.nn.Module, held_out: torch.Tensor, tokenizer: PreTrainedTokenizerFast, config: Config, batches: int = 4
) -> float:
    """Mean loss on crops of the held-out modules, the same at every call."""
    losses = []
    for seed in range(batches):
        source, target = draw_batch(held_out, tokenizer, config, seed)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses.append(model(input_ids=source, labels=target).loss.item())
    return sum(losses) / batches


if __name__ == "__main__":
    main()
