"""Pretrain the small T5 of the repository: 256 tokens of context, spans of Python source to be filled in.

    python -m tools.pretrain_tiny_t5 tools/configs/pretrain_tiny_t5.yaml

The text, the schedule and the checkpoints are those of `pretrain_tiny.py`. The tokenizer is that of the small Llama
with sentinels for hidden spans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rope_patch.cli.options import run
from tools import pretrain_tiny as pretraining

SENTINELS = 64


@dataclass(kw_only=True)
class Options(pretraining.Schedule):
    tokenizer: str  # folder of the tokenizer that is given sentinels
    hidden_size: int
    intermediate_size: int
    encoder_layers: int
    decoder_layers: int
    heads: int
    head_dim: int


def main(options: Options) -> None:
    """Train the model, and write the checkpoint."""
    import torch
    from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

    from rope_patch.data.corpora import load_corpus

    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    added = ["</s>", *(f"<extra_id_{i}>" for i in range(SENTINELS))]
    tokenizer.add_special_tokens({"additional_special_tokens": added})
    tokenizer.eos_token = "</s>"
    stream, held_out = (pretraining.tokenise(tokenizer, load_corpus(s)["text"]) for s in ("train", "held_out"))
    torch.manual_seed(options.seed)
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=options.hidden_size,
        d_kv=options.head_dim,
        d_ff=options.intermediate_size,
        num_layers=options.encoder_layers,
        num_decoder_layers=options.decoder_layers,
        num_heads=options.heads,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        n_positions=options.context,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    model = T5ForConditionalGeneration(config)
    pretraining.pretrain(
        options,
        model,
        tokenizer,
        # as T5 was trained: steps in proportion to the size of a weight, which differs widely between its matrices
        torch.optim.Adafactor(model.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay),
        lambda step: draw_batch(stream, tokenizer, options, seed=options.seed * 1_000_003 + step),
        [pair for seed in range(4) for pair in draw_batch(held_out, tokenizer, options, seed)],
    )


def draw_batch(stream: Any, tokenizer: Any, options: Options, seed: int) -> list[dict[str, Any]]:
    """Sources and targets: spans of equal number and length in all, so that nothing is padded."""
    import torch

    from rope_patch.data.hidden_spans import corrupt, draw_spans, sentinels_of

    random = torch.Generator().manual_seed(seed)
    pairs = []
    for start in torch.randint(len(stream) - options.context, (options.batch_size,), generator=random).tolist():
        spans = draw_spans(options.context, random)
        crop = stream[start : start + options.context]
        source, target, _ = corrupt(crop, spans, sentinels_of(tokenizer), tokenizer.eos_token_id)
        pairs.append({"input_ids": source, "labels": target})
    return pairs


if __name__ == "__main__":
    run(Options, main)
