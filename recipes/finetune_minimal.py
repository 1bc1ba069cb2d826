# /// script
# dependencies = ["rope-patch"]
# ///
"""Teach the small checkpoint four times its length, and print its loss before and after: patch, Trainer, callback.

    python recipes/finetune_minimal.py

It takes under a minute on a CPU. Copy it, and change the checkpoint, the texts, the scheme and the steps;
`finetune.py` has options for all of these, and for references, adapters and more.
"""

from __future__ import annotations

from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, default_data_collator

from rope_patch import patch
from rope_patch.data.corpora import load_text
from rope_patch.data.training_rows import training_rows
from rope_patch.evaluation.row import Rows
from rope_patch.evaluation.tables import print_table
from rope_patch.saving.loading import default_checkpoint
from rope_patch.training.callbacks import PerplexityCallback

CHECKPOINT = default_checkpoint()  # or a folder, or a Hub ID; this one was trained at 256 tokens
LENGTH = 1024
STEPS = 6
OUTPUT = "runs/finetune_minimal"


def main() -> None:
    """Train in full, measure before the first and after the last step, and save."""
    tokenizer, model = (auto.from_pretrained(CHECKPOINT) for auto in (AutoTokenizer, AutoModelForCausalLM))
    patch(model, "yarn", target=LENGTH)

    texts, held_out = (load_text(split=split) for split in ("train", "held_out"))  # Python's standard library
    texts = texts.shuffle(seed=0).select(range(20))
    rows = training_rows(texts, tokenizer, model.config.vocab_size, LENGTH, batch_size=1)
    arguments = TrainingArguments(
        output_dir=OUTPUT,
        max_steps=STEPS,
        per_device_train_batch_size=1,
        learning_rate=3e-4,
        warmup_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    points = Rows(f"{OUTPUT}/perplexity.jsonl")
    measured = PerplexityCallback(held_out, [256, LENGTH], tokenizer=tokenizer, points=points, targets=128, documents=4)
    Trainer(model, arguments, default_data_collator, rows, callbacks=[measured]).train()
    print_table(points.rows)
    model.save_pretrained(f"{OUTPUT}/checkpoint")  # rope_patch.from_pretrained loads it under its scheme
    tokenizer.save_pretrained(f"{OUTPUT}/checkpoint")


if __name__ == "__main__":
    main()
