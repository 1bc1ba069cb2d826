"""Pretrain the small Llama that the demo patches: byte-level BPE, 256 tokens of context, Python source.

    python recipes/pretrain_tiny.py recipes/configs/pretrain_tiny.yaml
    python recipes/pretrain_tiny.py recipes/configs/pretrain_gpu.yaml     # 112 million parameters, on a GPU

The run saves its state every few minutes, written aside and renamed; started again, it goes on where it stopped.
The learning rate warms up, stays, and falls to zero over the last `decay_steps`: while it stays, `steps` may be
changed between two starts. A part of the sequences carries a span twice, with a gap between, so that attending far
back is worth something and retrieval can be measured.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from rope_patch.cli.common import run_recipe
from rope_patch.evaluation import figures
from rope_patch.evaluation.corpora import standard_library
from rope_patch.evaluation.description import read_yaml
from rope_patch.training.loop import (
    Diverged,
    Schedule,
    draw_crops,
    even_crops,
    make_optimizer,
    next_token_loss,
    read_log,
    train,
)

END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Config(Schedule):
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    repeat_probability: float
    repeat_span: tuple[int, int]
    device: str = "cpu"
    packages: bool = False  # train on the source of the installed packages, too


def main(path: str) -> None:
    config = read_yaml(Config, path)
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)

    texts = training_texts(config)
    tokenizer = train_tokenizer(config, output, texts)
    stream = tokenise(tokenizer, texts)
    held_out = tokenise(tokenizer, list(standard_library("held_out")["text"]))
    torch.manual_seed(config.seed)
    model = LlamaForCausalLM(llama_config(config, tokenizer)).to(config.device)
    pretrain(
        config,
        model,
        tokenizer,
        optimizer=make_optimizer(model, config),
        loss_at=lambda step: next_token_loss(model, draw_batch(stream, step, config).to(config.device)),
        held_out_loss=lambda: evaluate(model, held_out, config),
    )


def pretrain(
    config: Schedule,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    optimizer: torch.optim.Optimizer,
    loss_at: Callable[[int], torch.Tensor],
    held_out_loss: Callable[[], float],
) -> None:
    """Train in bfloat16, then write the checkpoint and draw the loss curve."""

    def rounded_loss(step: int) -> list[torch.Tensor]:
        with torch.autocast(model.device.type, dtype=torch.bfloat16):
            return [loss_at(step)]

    def observe(_: int) -> dict[str, float]:
        return {"held_out_nll": round(held_out_loss(), 4)}

    try:
        train(config, model, optimizer, rounded_loss, observe)
    except Diverged as error:
        raise SystemExit(str(error)) from error
    output = Path(config.output)
    save_checkpoint(output / "checkpoint", model, tokenizer)
    draw_loss_curve(output)


def training_texts(config: Config) -> list[str]:
    """Modules of the standard library, and of whatever is installed beside it where the config asks for more text."""
    texts = list(standard_library("train")["text"])
    if config.packages:
        files = sorted(Path(sysconfig.get_path("purelib")).rglob("*.py"))
        texts += [file.read_text(encoding="utf-8", errors="replace") for file in files]
    return texts


def train_tokenizer(config: Config, output: Path, texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE, trained once and kept beside the checkpoint."""
    path = output / "tokenizer.json"
    if not path.exists():
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=config.vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        bpe.train_from_iterator(texts, trainer)
        bpe.save(str(path))
    return PreTrainedTokenizerFast(
        tokenizer_file=str(path), bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def tokenise(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """All documents as one stream of token ids, each closed by the end-of-text token."""
    encodings = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return torch.tensor([token for ids in encodings for token in [*ids, tokenizer.eos_token_id]])


def llama_config(config: Config, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        max_position_embeddings=config.context,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def draw_batch(stream: torch.Tensor, step: int, config: Config) -> torch.Tensor:
    """Random crops, `(batch, context + 1)`; some carry a span from elsewhere twice. A function of the step alone."""
    random = torch.Generator().manual_seed(config.seed * 1_000_003 + step)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=random))

    rows = draw_crops(stream, config.context, config.batch_size, random)
    for row in rows:
        if torch.rand((), generator=random) < config.repeat_probability:
            length = integer(*config.repeat_span)
            origin = integer(0, len(stream) - length)
            first = integer(0, len(row) - 2 * length)
            second = integer(first + length, len(row) - length)
            row[first : first + length] = stream[origin : origin + length]
            row[second : second + length] = stream[origin : origin + length]
    return rows


@torch.no_grad()
def evaluate(model: torch.nn.Module, held_out: torch.Tensor, config: Config, windows: int = 64) -> float:
    rows = even_crops(held_out, config.context, windows).to(config.device)
    with torch.autocast(torch.device(config.device).type, dtype=torch.bfloat16):
        return sum(next_token_loss(model, part).item() for part in rows.split(16)) / (windows // 16)


def save_checkpoint(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """The Hugging Face folder: weights stored in bfloat16, half the size, and declared float32 to load as such."""
    rounded = type(model)(model.config)
    rounded.load_state_dict(model.state_dict())
    rounded.to(torch.bfloat16).save_pretrained(folder)
    declared = json.loads((folder / "config.json").read_text())
    declared["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(declared, indent=2, sort_keys=True) + "\n")
    tokenizer.save_pretrained(folder)


def draw_loss_curve(output: Path) -> None:
    """`checkpoint/loss.png`, and the figures behind it."""
    ordered = read_log(output)
    lines = (json.dumps(row) for row in ordered)
    (output / "checkpoint" / "training_log.jsonl").write_text("\n".join(lines) + "\n")
    if not figures.can_draw(print):
        return
    figure = figures.blank(7, 3.2, layout="constrained")
    axes = figure.add_subplot()
    tokens = [row["tokens"] / 1e6 for row in ordered]
    axes.plot(tokens, [row["held_out_nll"] for row in ordered], color="#0072b2", label="held-out modules")
    axes.plot(tokens, [row["train_nll"] for row in ordered], color="#999999", linewidth=1, label="last training batch")
    axes.set(xlabel="tokens seen, millions", ylabel="NLL, nats per token")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figures.save(figure, output / "checkpoint" / "loss.png", dpi=120)


if __name__ == "__main__":
    sys.exit(run_recipe(__doc__, main))
