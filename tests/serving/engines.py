"""Engines of real vLLM on this CPU, and what this library computes for the same prompts."""

import os

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ALLOW_LONG_MAX_MODEL_LEN="1",
    VLLM_LOGGING_LEVEL="ERROR",
)

import pytest
import torch

vllm = pytest.importorskip("vllm")

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

import rope_patch  # noqa: E402
from rope_patch.saving.loading import default_checkpoint  # noqa: E402

L = 256
LENGTHS = (L // 2, L, L + 44, 3 * L, 8 * L)
NEW = 24
TOLERANCE = 1e-3
"""Of a log-probability, float32."""


def text(length):
    """The first ids of some code."""
    with open(rope_patch.patching.__file__, encoding="utf-8") as file:
        return AutoTokenizer.from_pretrained(default_checkpoint())(file.read() * 2).input_ids[:length]


def by_spec(spec):
    """The small checkpoint under a scheme."""
    model = AutoModelForCausalLM.from_pretrained(default_checkpoint(), dtype=torch.float32).eval()
    if spec is not None:
        rope_patch.patch(model, spec)
    return model


def keep(model, folder):
    """Save a model and its tokenizer."""
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(default_checkpoint()).save_pretrained(folder)


def saved(folder, spec):
    """A folder under a scheme, and its model."""
    model = by_spec(spec)
    keep(model, folder)
    return model


@torch.no_grad()
def by_this_library(model, texts):
    """Log-probabilities of each prompt, and greedy tokens."""
    for ids in texts:
        row = torch.tensor([ids])
        found = model(row).logits[0].log_softmax(dim=-1)
        new = model.generate(row, max_new_tokens=NEW, do_sample=False, eos_token_id=-1)[0, len(ids) :]
        yield found[:-1].gather(1, row[0, 1:, None])[:, 0], new.tolist()


def by_vllm(engine, texts, **extra):
    settings = vllm.SamplingParams(temperature=0, max_tokens=NEW, prompt_logprobs=0, ignore_eos=True, **extra)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in texts], settings, use_tqdm=False)
    for ids, output in zip(texts, outputs, strict=True):
        found = [chosen[token].logprob for token, chosen in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
        yield torch.tensor(found), list(output.outputs[0].token_ids)


def engine_of(folder, **settings):
    settings = {"max_num_batched_tokens": 640, "enable_prefix_caching": False, **settings}
    settings = {"enforce_eager": True, "max_model_len": LENGTHS[-1] + NEW, **settings}
    return vllm.LLM(str(folder), **{"dtype": "float32", "seed": 0, **settings})


def assert_equal(expected, found):
    """Log-probabilities of prompts and greedy tokens, from `by_this_library` and `by_vllm`."""
    for one, other in zip(expected, found, strict=True):
        assert (one[0] - other[0]).abs().max() < TOLERANCE
        assert one[1] == other[1]


def assert_same(engine, model, texts):
    assert_equal(by_this_library(model, texts), by_vllm(engine, texts))
