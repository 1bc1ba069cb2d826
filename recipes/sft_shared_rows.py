# /// script
# dependencies = ["rope-patch[finetune]", "trl"]
# ///
"""Long-context SFT with TRL in which several processes share each packed row, under any scheme.

    torchrun --nproc-per-node 2 recipes/sft_shared_rows.py
    accelerate launch --config_file recipes/configs/accelerate/ddp.yaml recipes/sft_shared_rows.py

TRL's own context parallelism (`ParallelismConfig(cp_size=...)`) refuses packing, and its ring attention drops windows.
Here documents of a packed row stay apart, and windows of a scheme or of the checkpoint are kept. Losses and weights
equal those of a single process. It takes a minute on two cores. Copy it, and change the constants in capitals.
"""

from __future__ import annotations

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from rope_patch import patch
from rope_patch.data.corpora import load_text
from rope_patch.saving.loading import default_checkpoint
from rope_patch.training.context_parallel import ContextParallelTrainer

CHECKPOINT = default_checkpoint()  # or a folder, or a Hub ID; this one was trained at 256 tokens
SCHEME = "layers:[0::2=window:window=256;rest=rerope:window=128+logn]"  # or "yarn:factor=4"
LENGTH = 1024
ROWS = 2  # packed rows in a step
STEPS = 4
OUTPUT = "runs/sft_shared_rows"


class SharedSFTTrainer(ContextParallelTrainer, SFTTrainer):
    """TRL's trainer, with rows that processes share."""


def main() -> None:
    """Train in full, and save the checkpoint with its scheme and the log of the training."""
    on_cpu = not torch.accelerator.is_available()
    processes = PartialState(cpu=on_cpu).num_processes  # all share each row; a divisor leaves several groups
    model = patch(AutoModelForCausalLM.from_pretrained(CHECKPOINT), SCHEME).model
    texts = load_text(split="train").shuffle(seed=0).select(range(20)).select_columns("text")  # Python's library
    arguments = SFTConfig(
        output_dir=OUTPUT,
        max_length=LENGTH,
        packing=True,
        packing_strategy="bfd_split",  # "bfd" drops what is beyond max_length
        per_device_train_batch_size=1,  # TRL joins the packed rows of a batch into one
        gradient_accumulation_steps=ROWS,
        max_steps=STEPS,
        learning_rate=3e-4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=not on_cpu,
        use_cpu=on_cpu,
    )
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    trainer = SharedSFTTrainer(model, arguments, train_dataset=texts, processing_class=tokenizer, sharing=processes)
    trainer.train()
    trainer.save_model()  # rope_patch.from_pretrained loads it under its scheme
    trainer.save_state()


if __name__ == "__main__":
    main()
