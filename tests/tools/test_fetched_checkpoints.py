"""The checkpoints of `rope-patch checkpoint`, fetched for real: hundreds of megabytes, so only where that is asked for.

    ROPE_PATCH_NETWORK=1 pytest tests/tools/test_fetched_checkpoints.py

`ROPE_PATCH_CHECKPOINTS=DIR` keeps them there, and takes what is there already.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import torch

import rope_patch
from rope_patch.cli import main
from rope_patch.models.config import training_length
from rope_patch.saving.loading import load_model, load_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "ROPE_PATCH_NETWORK" not in os.environ,
        reason="fetches packages through pip and npm; ROPE_PATCH_NETWORK=1 asks for it",
    ),
]

TEXT = (
    "Once upon a time there was a little lighthouse keeper who lived alone on a rock in the sea. Every evening he "
    "climbed the stairs and lit the lamp, and every morning he put it out again. One day a storm came, and the lamp "
    "would not burn. The keeper took his old lantern, stood on the balcony all night and swung it from side to side. "
    "In the morning the sailors came to thank him."
)

CASES = {
    "stories15m": (
        15_191_712,
        256,
        "Once upon a time, there was a little",
        2.847,
        "girl named Lily. She loved to play outside in the",
    ),
    "smollm2-135m": (134_515_008, 8192, "The capital of France is", 2.701, "Paris.\n\nThe answer is: 201"),
    "tinyllama-1.1b": (
        1_100_048_384,
        2048,
        "The capital of France is",
        2.516,
        "the second largest city in the country. It is located in",
    ),
    "gemma3-270m": (
        268_098_176,
        32768,
        "The capital of France is",
        2.630,
        "the capital of the country of France. It is the largest",
    ),
    "qwen2.5-coder-0.5b": (
        630_167_424,
        32768,
        "def fibonacci(n):\n",
        3.167,
        'if n <= 0:\n        return "Invalid input',
    ),
    "qwen2.5-coder-1.5b": (
        1_777_088_000,
        32768,
        "def fibonacci(n):\n",
        2.360,
        'if n <= 0:\n        return "Invalid input',
    ),
}
"""Weights, L, the beginning of a text, the loss of `TEXT` in nats per token, and how the model continues the text."""

TITLE = "Added exponential backoff to upload client"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Path(os.environ.get("ROPE_PATCH_CHECKPOINTS") or tmp_path_factory.mktemp("checkpoints"))


def fetched(name: str, folder: Path) -> str:
    assert main(["checkpoint", name, "--output", str(folder / name)]) == 0
    return str(folder / name)


def loss_of(model, tokenizer, text: str) -> float:
    ids = torch.tensor([tokenizer(text).input_ids])
    with torch.no_grad():
        return model(ids, labels=ids).loss.item()


@pytest.mark.parametrize("name", CASES)
def test_a_language_model(name, folder):
    weights, length, beginning, loss, continuation = CASES[name]
    path = fetched(name, folder)
    model, tokenizer = load_model(path, dtype="float32", device="cpu"), load_tokenizer(path)
    assert sum(parameter.numel() for parameter in model.parameters()) == weights
    assert training_length(model.config.get_text_config()) == length
    assert loss_of(model, tokenizer, TEXT) == pytest.approx(loss, abs=0.002)
    ids = torch.tensor([tokenizer(beginning).input_ids])
    written = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(written, skip_special_tokens=True).strip() == continuation


def test_gemma_has_two_bases_and_three_full_layers(folder):
    """As published: five sliding layers of 512 tokens under base 10,000, then a full one under 1,000,000."""
    config = rope_patch.from_pretrained(fetched("gemma3-270m", folder)).config
    assert config.layer_types == (["sliding_attention"] * 5 + ["full_attention"]) * 3
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1e6
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 1e4
    assert (config.sliding_window, config.head_dim, config.query_pre_attn_scalar) == (512, 256, 256)


def test_a_t5_that_writes_titles(folder):
    path = fetched("flan-t5-small-title", folder)
    model, tokenizer = load_model(path, device="cpu"), load_tokenizer(path)
    assert sum(parameter.numel() for parameter in model.parameters()) == 76_961_152
    text = "Added a retry with exponential backoff to the upload client, because the storage service answers 503."
    written = model.generate(torch.tensor([tokenizer(text).input_ids]), max_new_tokens=20, do_sample=False)
    assert tokenizer.decode(written[0], skip_special_tokens=True) == TITLE
    ids, labels = (torch.tensor([tokenizer(each).input_ids]) for each in (text, TITLE))
    with torch.no_grad():
        assert model(ids, labels=labels).loss.item() == pytest.approx(0.126, abs=0.002)


TEXTS = {
    "moby-dick": "db58b8efee1804888454eb160cd83b65cc48511c308c276f8742dc636cd3c225",
    "state-of-the-union": "89428c28f60248759fa8d78b60796f1e7dbb324333690f246e4be0e20b16eb6a",
    "graham-essays": "650ad0683f9bedeaad9cc605cc84e0e7dcceadd279a842a7996efaae19813f00",
    "openai-agents": "2e3d8fc10ec8d9a87203931b839d028c54802692ec723588643326e0488a7079",
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_the_same_for_everybody(name, folder):
    assert hashlib.sha256(Path(fetched(name, folder), f"{name}.txt").read_bytes()).hexdigest() == TEXTS[name]


def test_a_novel(folder):
    text = Path(fetched("moby-dick", folder), "moby-dick.txt").read_bytes()
    assert text.decode().startswith("CHAPTER 1. Loomings.\n\nCall me Ishmael.")
    assert text.count(b"\nCHAPTER ") == 134
