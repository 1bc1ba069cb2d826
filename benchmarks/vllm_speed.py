"""Tokens per second of vLLM on a CPU under schemes, beside plain vLLM of the same checkpoint.

    python -m benchmarks.vllm_speed rerope:window=512 self_extend:window=512,group_size=8 dca:chunk_size=768 logn \
        --model DIR --output docs/results/serving/vllm_speed.jsonl

Needs the environment of `make vllm-check`. Without `--model` (bfloat16), the model has random weights in float32: 4
layers, 4 query and 2 key heads of 64, width 256, L = 8192. Tokens are counted per second of the processor (one thread;
a busy machine changes little): reading the prompts, and then, from the cached prompts, one token of each answer after
another, the better of two runs each. `of_plain` are both as shares of plain vLLM in the same call.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "3",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import torch
import vllm
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import rope_patch
from benchmarks.machine import facts

LENGTHS, BATCHES, NEW = (512, 4096), (1, 8, 32), 32
SHAPE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4}
CONFIG = LlamaConfig(**SHAPE, num_key_value_heads=2, vocab_size=2048, max_position_embeddings=8192)


def seconds(engine: Any, batch: int, length: int, seed: int = 0) -> tuple[float, float]:
    """Of the processor: to read a batch of prompts, and to answer them with `NEW` tokens each."""
    torch.manual_seed(seed)
    # one token more than whole blocks of the cache: the answers begin with a step of one token
    prompts = [{"prompt_token_ids": row.tolist()} for row in torch.randint(2048, (batch, length + 1))]
    spent = []
    for new in (1, NEW):
        settings = vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        began = time.process_time()
        outputs = engine.generate(prompts, settings, use_tqdm=False)
        spent.append(time.process_time() - began)
    if any(output.num_cached_tokens != length for output in outputs):
        raise RuntimeError(f"the cache does not hold {batch} prompts of {length} tokens")
    return spent[0], spent[1]


def rows_of(
    folder: Path, spec: str, cases: list[tuple[int, int]], eager: bool, source: Path | None
) -> dict[tuple[int, int], tuple[float, float]]:
    """The seconds for prompts and for answers, by batch and length."""
    torch.manual_seed(0)
    dtype = torch.float32 if source is None else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype) if source else LlamaForCausalLM(CONFIG)
    if spec != "plain":
        rope_patch.patch(model, spec)
    model.save_pretrained(folder)
    del model
    batches, lengths = zip(*cases, strict=True)
    limits = {"max_model_len": max(lengths) + NEW + 1, "max_num_batched_tokens": 2048, "max_num_seqs": max(batches)}
    flags = {"enforce_eager": eager, "enable_prefix_caching": True, "skip_tokenizer_init": True}
    engine = vllm.LLM(str(folder), dtype=dtype, seed=0, **limits, **flags)
    found = {}
    for seed, (batch, length) in enumerate([(batch, 128) for batch, _ in cases] + cases):  # the first ones allocate
        both = seconds(engine, batch, length, 2 * seed), seconds(engine, batch, length, 2 * seed + 1)
        reading, answers = zip(*both, strict=True)
        found[batch, length] = min(reading), min(answers)
    return {case: found[case] for case in cases}


def main() -> None:
    """Measure plain vLLM, then each scheme, and print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("schemes", nargs="+")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--model", type=Path, help="the folder of a checkpoint, instead of random weights")
    parser.add_argument("--eager", action="store_true", help="without compiled graphs")
    parser.add_argument("--output", type=Path, help="where rows are added, as JSON lines")
    options = parser.parse_args()
    cases = [(batch, length) for batch in options.batches for length in options.lengths]
    plain = None
    for spec in ("plain", *options.schemes):
        with tempfile.TemporaryDirectory() as folder:
            found = rows_of(Path(folder), spec, cases, options.eager, options.model)
        plain = plain or found
        gc.collect()
        for (batch, length), (reading, answers) in found.items():
            before = plain[batch, length]
            row = {
                "model": options.model.name if options.model else "random weights",
                "scheme": spec,
                "batch": batch,
                "length": length,
                "compiled": not options.eager,
                "prompt_tokens_per_second": round(batch * length / reading, 1),
                "answer_tokens_per_second": round(batch * NEW / answers, 1),
                "of_plain": [round(before[0] / reading, 3), round(before[1] / answers, 3)],
                "vllm": vllm.__version__,
                "machine": facts("cpu")["machine"],
            }
            print(json.dumps(row), file=sys.stderr)
            if options.output is not None:
                with options.output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
