"""Costs by formula: against models of Transformers, and the page that shows them."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from tools import gpu_costs
from tools.gpu_costs import LLAMAS, Shape

ROOT = Path(__file__).parents[2]
TINY = ROOT / "recipes/assets/tiny-llama"


def model_of(shape, **others):
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=shape.inner,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            tie_word_embeddings=shape.tied,
            dtype=torch.bfloat16,
            **others,
        )
    )


@pytest.mark.parametrize("shape", LLAMAS, ids=lambda shape: shape.name)
def test_weights_are_those_of_a_model(shape):
    with torch.device("meta"):
        model = model_of(shape)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    assert shape.weights == 2 * sum(parameter.numel() for parameter in matrices)


def test_cache_and_operations_are_those_of_a_forward():
    shape, length = Shape("small", 3, 8, 2, 16, 64, 96, 128, tied=True), 64
    model, cache = model_of(shape, attn_implementation="eager").to(torch.bfloat16), DynamicCache()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.ones(1, length, dtype=torch.long), past_key_values=cache, use_cache=True, logits_to_keep=1)
    assert shape.cache(length) == sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    of_layers = counter.get_total_flops() - 2 * shape.hidden * shape.vocabulary
    pairs = of_layers - 2 * shape.in_layers * length  # all of them: eager attention scores the hidden half, too
    assert shape.attention_share(length) == pytest.approx(pairs / 2 / (of_layers - pairs / 2), rel=1e-3)


def test_a_folder_gives_its_shape():
    shape = Shape.from_folder(str(TINY))
    assert shape.cache(1) == 2 * 2 * shape.layers * shape.kv_heads * shape.head_dim
    assert gpu_costs.table([shape], [1024], 128).count("tiny-llama") == 1


def test_keys_of_a_window_are_read_and_written_and_a_short_text_has_fewer():
    shape = LLAMAS[1]
    assert shape.turned(8192, 4096) == 2 * 32 * 8 * 128 * 2 * 4096
    assert shape.turned(1024, 4096) == shape.turned(1024, 1024)


def test_the_page_shows_what_the_tool_prints():
    page = (ROOT / "docs/how-to/gpu.md").read_text()
    assert gpu_costs.table() in page


@pytest.mark.parametrize("shape", LLAMAS, ids=lambda shape: shape.name)
@pytest.mark.parametrize("length", [32768, 131072])
def test_the_page_of_a_model_that_falls_apart_has_its_memory(shape, length):
    page = (ROOT / "docs/how-to/falls-apart.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith(f"| {shape.name} |") and f" {length:,} " in line]
    cells = [cell.strip() for cell in row.split("|")[2:-2]]
    layers, kv_heads, head_dim = map(int, cells[0].split(", "))
    assert (layers, kv_heads, head_dim) == (shape.layers, shape.kv_heads, shape.head_dim)
    cache = 2 * layers * kv_heads * head_dim * length * 2  # keys and values, two bytes a number
    assert cells[2:5] == [f"{count / 2**30:.2g} GiB" for count in (shape.weights, cache, shape.weights + cache)]
