"""Pretrain the small Llama that the demo patches: byte-level BPE, 256 tokens of context, Python source.

    python -m tools.pretrain_tiny tools/configs/pretrain_tiny.yaml
    python -m tools.pretrain_tiny tools/configs/pretrain_gpu.yaml     # 112 million parameters, on a GPU

Run the same command again to resume from the last checkpoint. The learning rate warms up, stays, and falls to zero over
the last `decay_steps`: while it stays, you may change `steps` between two starts. Some sequences carry a span twice,
with a gap between, so that attending far back pays off and retrieval can be measured.
"""

from __future__ import annotations

import functools
import json
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_patch.cli.options import Numbers, run, say

END_OF_TEXT = "<|endoftext|>"


@dataclass(kw_only=True)
class Schedule:
    output: str  # folder of the run
    context: int  # L in tokens
    batch_size: int
    steps: int
    warmup_steps: int  # the learning rate rises over these
    decay_steps: int  # and falls to zero over the last of these
    learning_rate: float
    weight_decay: float
    evaluate_every: int  # steps between two points of the loss curve
    save_every: int  # steps between two checkpoints
    seed: int = 0  # of the weights and of the data
    device: str = "cpu"


@dataclass(kw_only=True)
class Options(Schedule):
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    repeat_probability: float  # of a sequence that carries a span twice
    repeat_span: Numbers  # its least and its greatest length
    packages: bool = False  # train on the source of the installed packages, too


def main(options: Options) -> None:
    """Train a tokenizer, then the model, and write the checkpoint."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rope_patch.data.corpora import load_corpus

    texts = list(load_corpus("train")["text"])
    if options.packages:
        files = sorted(Path(sysconfig.get_path("purelib")).rglob("*.py"))
        texts += [file.read_text(encoding="utf-8", errors="replace") for file in files]
    tokenizer = train_tokenizer(options, texts)
    stream, held_out = tokenise(tokenizer, texts), tokenise(tokenizer, load_corpus("held_out")["text"])
    torch.manual_seed(options.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        max_position_embeddings=options.context,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
    starts = torch.linspace(0, len(held_out) - options.context - 1, 64).long()
    pretrain(
        options,
        model,
        tokenizer,
        torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95), fused=True),
        lambda step: [next_tokens(row) for row in draw_batch(stream, step, options)],
        [next_tokens(held_out[start : start + options.context + 1]) for start in starts],
    )


def pretrain(
    options: Schedule,
    model: Any,
    tokenizer: Any,
    optimizer: Any,
    batch_at: Callable[[int], list[dict[str, Any]]],
    held_out: list[dict[str, Any]],
) -> None:
    """Train in bfloat16 on the batches of each step, then write the checkpoint and draw the loss curve."""
    import torch
    from transformers import TrainingArguments

    from rope_patch.training.checkpoints import SafeTrainer

    drawn = functools.lru_cache(maxsize=2)(batch_at)

    class Batches(torch.utils.data.Dataset):
        """The sequences of all steps, one after another, each drawn when it is asked for."""

        def __len__(self) -> int:
            return options.steps * options.batch_size

        def __getitem__(self, index: int) -> dict[str, Any]:
            step, row = divmod(index, options.batch_size)
            return drawn(step)[row]

    def share(step: int) -> float:
        return min(1.0, (step + 1) / options.warmup_steps, (options.steps - step) / options.decay_steps)

    model.config.use_cache = False
    trainer = SafeTrainer(
        model,
        TrainingArguments(
            output_dir=options.output,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch_size,
            per_device_eval_batch_size=16,
            train_sampling_strategy="sequential",  # the batches are drawn at random
            max_grad_norm=1.0,
            bf16=True,
            use_cpu=options.device == "cpu",
            eval_strategy="steps",
            eval_steps=options.evaluate_every,
            logging_steps=options.evaluate_every,
            prediction_loss_only=True,
            save_steps=options.save_every,
            save_total_limit=1,
            report_to="none",
        ),
        train_dataset=Batches(),
        eval_dataset=held_out,
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share)),
    )
    trainer.resume()
    model.config.use_cache = True
    folder = Path(options.output) / "checkpoint"
    save(folder, model, tokenizer)
    draw_loss_curve(folder, trainer.state.log_history, options)


def train_tokenizer(options: Options, texts: list[str]) -> Any:
    """A byte-level BPE, trained once and kept beside the checkpoint."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    path = Path(options.output) / "tokenizer.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=options.vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        bpe.train_from_iterator(texts, trainer)
        bpe.save(str(path))
    return PreTrainedTokenizerFast(
        tokenizer_file=str(path), bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def tokenise(tokenizer: Any, texts: Any) -> Any:
    """All documents as one stream of token ids, each closed by the end-of-text token."""
    import torch

    encodings = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return torch.tensor([token for ids in encodings for token in [*ids, tokenizer.eos_token_id]])


def next_tokens(row: Any) -> dict[str, Any]:
    """L tokens, and the L that they predict."""
    return {"input_ids": row[:-1], "labels": row[:-1], "shift_labels": row[1:]}


def draw_batch(stream: Any, step: int, options: Options) -> Any:
    """Random crops, `(batch, context + 1)`; some carry a span from elsewhere twice. A function of the step alone."""
    import torch

    random = torch.Generator().manual_seed(options.seed * 1_000_003 + step)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=random))

    starts = torch.randint(len(stream) - options.context - 1, (options.batch_size,), generator=random)
    rows = torch.stack([stream[start : start + options.context + 1] for start in starts])
    for row in rows:
        if torch.rand((), generator=random) < options.repeat_probability:
            length = integer(*options.repeat_span)
            origin = integer(0, len(stream) - length)
            first = integer(0, len(row) - 2 * length)
            second = integer(first + length, len(row) - length)
            row[first : first + length] = stream[origin : origin + length]
            row[second : second + length] = stream[origin : origin + length]
    return rows


def save(folder: Path, model: Any, tokenizer: Any) -> None:
    """The Hugging Face folder: weights stored in bfloat16, half the size, and declared float32 to load as such."""
    import torch

    rounded = type(model)(model.config)
    rounded.load_state_dict(model.state_dict())
    rounded.to(torch.bfloat16).save_pretrained(folder)
    declared = json.loads((folder / "config.json").read_text())
    declared["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(declared, indent=2, sort_keys=True) + "\n")
    tokenizer.save_pretrained(folder)


def draw_loss_curve(folder: Path, history: list[dict[str, Any]], options: Schedule) -> None:
    """`loss.png`, and the numbers behind it."""
    from rope_patch.evaluation.charts import SIZE, sheet, write

    losses = {name: [(p["step"], p[name]) for p in history if name in p] for name in ("loss", "eval_loss")}
    (folder / "training_log.jsonl").write_text("".join(json.dumps(point) + "\n" for point in history))
    figure, axes = sheet("Loss during pretraining", f"L = {options.context} tokens.", 2.6)
    for name, label in (("eval_loss", "held-out modules"), ("loss", "training batches")):
        tokens = [step * options.batch_size * options.context / 1e6 for step, _ in losses[name]]
        axes.plot(tokens, [loss for _, loss in losses[name]], label=label)
    axes.set(xlabel="tokens seen, millions", ylabel="NLL, nats per token")
    axes.legend(frameon=False, fontsize=SIZE)
    write(figure, folder / "loss.png")
    say(f"the checkpoint is {folder}")


if __name__ == "__main__":
    run(Options, main)
