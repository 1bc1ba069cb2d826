"""Pretrain the small T5 of the repository: 256 tokens of context, spans of Python source to be filled in.

    python recipes/pretrain_tiny_t5.py recipes/configs/pretrain_tiny_t5.yaml

The text, the schedule and the saved state are those of `pretrain_tiny.py`. The tokenizer is that of the small Llama
with sentinels for hidden spans.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from pretrain_tiny import pretrain, tokenise
from transformers import AutoTokenizer, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from rope_patch.cli.common import run_recipe
from rope_patch.evaluation.corpora import standard_library
from rope_patch.evaluation.description import read_yaml
from rope_patch.evaluation.span_corruption import corrupt, draw_spans, sentinels_of
from rope_patch.training.loop import Schedule

SENTINELS = 64


@dataclass(frozen=True)
class Config(Schedule):
    tokenizer: str
    hidden_size: int
    intermediate_size: int
    encoder_layers: int
    decoder_layers: int
    heads: int
    head_dim: int


def main(path: str) -> None:
    config = read_yaml(Config, path)
    Path(config.output).mkdir(parents=True, exist_ok=True)

    tokenizer = make_tokenizer(config)
    stream, held_out = (tokenise(tokenizer, list(standard_library(split)["text"])) for split in ("train", "held_out"))
    torch.manual_seed(config.seed)
    model = T5ForConditionalGeneration(t5_config(config, tokenizer))

    def loss_at(step: int) -> torch.Tensor:
        return span_loss(model, draw_batch(stream, tokenizer, config, seed=config.seed * 1_000_003 + step))

    # as T5 was trained: steps in proportion to the size of a weight, which differs widely between its matrices
    optimizer = torch.optim.Adafactor(model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    pretrain(config, model, tokenizer, optimizer, loss_at, lambda: evaluate(model, held_out, tokenizer, config))


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


def span_loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    source, target = batch
    return model(input_ids=source, labels=target).loss


@torch.no_grad()
def evaluate(
    model: torch.nn.Module, held_out: torch.Tensor, tokenizer: PreTrainedTokenizerFast, config: Config, batches: int = 4
) -> float:
    """Mean loss on crops of the held-out modules, the same at every call."""
    losses = []
    for seed in range(batches):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses.append(span_loss(model, draw_batch(held_out, tokenizer, config, seed)).item())
    return sum(losses) / batches


if __name__ == "__main__":
    sys.exit(run_recipe(__doc__, main))
