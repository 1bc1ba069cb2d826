"""How far decoding with a cache is from recomputing everything, for schemes whose frequencies follow the length.

python -m benchmarks.dynamic_decoding

A cache holds hidden states that were made under the frequencies of shorter texts; a full forward makes them anew. In
a model of more than one layer the two cannot agree. A scheme that is fixed to one length has no such difference.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging

from rope_patch import patch
from rope_patch.data.corpora import load_corpus
from rope_patch.models.arguments import name_of_cache

CHECKPOINT = Path("recipes/assets/tiny-llama")
RESULTS = Path("benchmarks/results/dynamic_decoding.json")
PROMPT, LENGTH = 512, 640
SPECS = [
    f"{name}{fields}"
    for name in ("dynamic_ntk:factor=2", "dynamic_yarn")
    for fields in ("", f"{',' if ':' in name else ':'}length={LENGTH}")
]


@torch.no_grad()
def main() -> None:
    """Measure and print the table."""
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT).eval()
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    source = load_corpus()[0]["text"]
    text = tokenizer(source, return_tensors="pt").input_ids[:, : LENGTH + 1]
    print(f"{LENGTH - PROMPT} tokens decoded after {PROMPT}; L = {model.config.max_position_embeddings}\n")
    print("| scheme | NLL cached | NLL recomputed | mean difference of the token's log-probability | largest |")
    print("|---|---|---|---|---|")
    rows = {}
    for spec in SPECS:
        with patch(model, spec):
            cached, full = _cached(model, text), _recomputed(model, text)
        gap = (cached - full).abs()
        rows[spec] = {
            "nll_cached": -cached.mean().item(),
            "nll_recomputed": -full.mean().item(),
            "mean_difference": gap.mean().item(),
            "largest_difference": gap.max().item(),
        }
        print(f"| `{spec}` | " + " | ".join(f"{value:.4f}" for value in rows[spec].values()) + " |", flush=True)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({"prompt": PROMPT, "length": LENGTH, "rows": rows}, indent=1) + "\n")


def _cached(model: torch.nn.Module, text: torch.Tensor) -> torch.Tensor:
    """log p of every token after the prompt, one decoding step each."""
    cache, name = DynamicCache(), name_of_cache(model)
    logits = [model(text[:, :PROMPT], **{name: cache}).logits[:, -1]]
    for place in range(PROMPT, LENGTH):
        logits.append(model(text[:, place : place + 1], **{name: cache}).logits[:, -1])
    return _log_probabilities(logits, text)


def _recomputed(model: torch.nn.Module, text: torch.Tensor) -> torch.Tensor:
    """The same, each from a full forward."""
    logits = [model(text[:, :stop], use_cache=False).logits[:, -1] for stop in range(PROMPT, LENGTH + 1)]
    return _log_probabilities(logits, text)


def _log_probabilities(logits: list[torch.Tensor], text: torch.Tensor) -> torch.Tensor:
    return torch.cat(logits).log_softmax(-1).gather(-1, text[0, PROMPT:, None]).flatten()


if __name__ == "__main__":
    main()
