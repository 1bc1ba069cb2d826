"""A whole small model on 32,768 tokens under every scheme: does it fit, and how long does it take?

python -m benchmarks.long_texts [scheme ...]
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from benchmarks.comparison import Shape, Side
from benchmarks.machine import facts
from benchmarks.measure import peak_and_seconds
from rope_patch import list_schemes, patch
from rope_patch.evaluation.nll import chunked_nll

LENGTH = 32_768
CHECKPOINT = Path("recipes/assets/tiny-llama")
RESULTS = Path("benchmarks/results/long_texts.json")

FIELDS = {
    "pi": "factor=128",
    "ntk": "factor=128",
    "abf": "base=1000000",
    "yarn": "factor=128",
    "ntk_by_parts": "factor=128",
    "ntk_mixed": "factor=128",
    "llama3": "factor=128",
    "longrope": f"short_factor={[1] * 32},long_factor={list(range(1, 129, 4))},factor=128",
    "proportional": "partial_rotary_factor=0.5",
    "giraffe": "cutoff_length=256",
    "rerope": "window=128",
    "leaky_rerope": "window=128,factor=256",
    "self_extend": "group_size=512,window=128",
    "lm_infinite": "local_window=192",
}
"""Fields of the schemes that cannot do without."""


def main(names: list[str]) -> None:
    """Measure the schemes that are named, or all, and print the table."""
    logging.disable_progress_bar()
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    rows: dict[str, Any] = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else {}
    for name in tqdm(names or list_schemes(), unit="scheme", file=sys.stderr):
        spec = f"{name}:{FIELDS[name]}" if name in FIELDS else name
        peak, seconds = peak_and_seconds(partial(forward, spec=spec), Shape(LENGTH))
        rows[name] = {"scheme": spec, "seconds": seconds, "peak_bytes": peak}
        aside = RESULTS.with_suffix(".part")
        aside.write_text(json.dumps({"length": LENGTH, "facts": facts("cpu"), "rows": rows}, indent=1) + "\n")
        aside.replace(RESULTS)
    print("| scheme | seconds | peak memory beyond the model, MB |\n|---|---|---|")
    for name, row in sorted(rows.items()):
        print(f"| `{name}` | {row['seconds']:.1f} | {row['peak_bytes'] / 2**20:.0f} |")


def forward(shape: Shape, spec: str) -> Side:
    """Every token of a text predicted in one forward of the embedded checkpoint."""
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT).eval()
    patch(model, spec)
    text = torch.randint(1, model.config.vocab_size, (1, shape.length), generator=torch.Generator().manual_seed(0))
    return Side(lambda: chunked_nll(model, text[:, :-1], text[:, 1:]))


if __name__ == "__main__":
    main(sys.argv[1:])
