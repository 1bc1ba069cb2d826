"""What servers make of an exported folder: their log-probabilities against those of the patched model.

    .venv-vllm/bin/python -m benchmarks.readers vllm --output readers.jsonl   # after `make vllm-check`
    .venv/bin/python -m benchmarks.readers llama_cpp --sources DIR --output readers.jsonl

Every scheme of docs/serving.md is exported from the embedded checkpoint, and its reader scores one text of 1 to 4 times
L, float32. A row has the mean and the largest difference over the text. Rows are appended as they come.

For llama.cpp, `pip install llama-cpp-python` builds its sdist. DIR is the unpacked sdist, whose own converter writes
the GGUF. The converter does not know the embedded tokenizer; so the GGUF has none, and the text goes in as token
numbers.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch.saving.export import export_checkpoint
from rope_patch.saving.loading import default_checkpoint

Reader = Callable[[str, list[list[int]]], tuple[str, list[torch.Tensor]]]

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
    parser.add_argument("reader", choices=["vllm", "llama_cpp"])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--sources", type=Path, help="the unpacked sdist of llama-cpp-python")
    arguments = parser.parse_args()
    if (arguments.reader == "llama_cpp") != (arguments.sources is not None):
        parser.error("--sources goes with the reader llama_cpp")
    read = by_vllm if arguments.sources is None else functools.partial(by_llama_cpp, sources=arguments.sources)
    output = arguments.output
    output.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(default_checkpoint())
    ids = tokenizer(Path(rope_patch.patching.__file__).read_text()).input_ids[: 4 * L]
    for scheme in SCHEMES:
        for row in rows_of(scheme, ids, read):
            print(*row.values(), sep="  ")
            with output.open("a") as file:
                file.write(json.dumps(row) + "\n")


def rows_of(scheme: str | rope_patch.Scheme, ids: list[int], read: Reader) -> Iterator[dict[str, Any]]:
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
        reader, all_found = read(place, texts)
        for text, found in zip(texts, all_found, strict=True):
            difference = (by_patched(model, text) - found).abs()
            yield {
                "reader": reader,
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


def by_vllm(folder: str, texts: list[list[int]]) -> tuple[str, list[torch.Tensor]]:
    """The same of each text by vLLM on this CPU, and its version."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": ""}
    os.environ |= {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    import vllm

    limits = {"hf_overrides": {"max_position_embeddings": 4 * L + 8}} if folder == default_checkpoint() else {}
    engine = vllm.LLM(folder, dtype="float32", enforce_eager=True, max_model_len=4 * L + 1, seed=0, **limits)
    settings = vllm.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in texts], settings, use_tqdm=False)
    return f"vLLM {version('vllm-cpu')}", [
        torch.tensor([chosen[token].logprob for token, chosen in zip(ids[1:], output.prompt_logprobs[1:], strict=True)])
        for ids, output in zip(texts, outputs, strict=True)
    ]


CONVERT = """
import sys
sys.path[:0] = [sys.argv.pop(1), sys.argv.pop(1)]
from conversion.llama import LlamaModel
LlamaModel.set_vocab = LlamaModel._set_vocab_none
import convert_hf_to_gguf
convert_hf_to_gguf.main()
"""
"""llama.cpp's own converter, without the tokenizer."""


def by_llama_cpp(folder: str, texts: list[list[int]], sources: Path) -> tuple[str, list[torch.Tensor]]:
    """The same by llama.cpp."""
    import llama_cpp

    code, exact = sources / "vendor" / "llama.cpp", llama_cpp.GGML_TYPE_F32
    with tempfile.TemporaryDirectory() as place:
        name = f"{place}/model.gguf"
        command = [sys.executable, "-c", CONVERT, str(code), str(code / "gguf-py"), folder]
        subprocess.run([*command, "--outfile", name, "--outtype", "f32"], check=True, capture_output=True)
        model = llama_cpp.Llama(
            name,
            n_ctx=4 * L,
            n_batch=4 * L,
            logits_all=True,
            type_k=exact,
            type_v=exact,
            flash_attn=False,
            verbose=False,
        )
        found = []
        for ids in texts:
            model.reset()
            model.eval(ids)
            scores = torch.from_numpy(model.scores[: len(ids) - 1]).log_softmax(dim=-1)
            found.append(scores.gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
        model.close()
    return f"llama.cpp of llama-cpp-python {version('llama-cpp-python')}", found


if __name__ == "__main__":
    main()
