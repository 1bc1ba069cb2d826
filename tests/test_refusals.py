"""What is not supported is refused by a sentence that names it, at patch time or at the call, and changes nothing."""

import contextlib

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForImageTextToText,
    Cache,
    DynamicLayer,
    QuantizedCache,
)

from rope_patch import UnsupportedModel, UnsupportedPositions, patch
from tests.cases import CASES, ROUTES
from tests.families import GENERIC, from_config
from tests.runs import tokens
from tests.snapshots import snapshot

LATE = [spec for spec in ROUTES if spec != CASES["yarn"]]
"""The schemes that come to see the cache and the positions of a call."""

SEVERAL_DIMENSIONS = "positions in several dimensions"


@contextlib.contextmanager
def refused(model, error, said):
    """The block raises one line that says `said`, and nothing changed."""
    before = snapshot(model)
    with pytest.raises(error, match=said) as caught:
        yield
    assert "\n" not in str(caught.value)
    assert snapshot(model) == before


@pytest.mark.parametrize("spec", ROUTES)
@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("hunyuan_v1_dense", "a norm"),
        ("nanochat", "a norm"),
        ("deepseek_v2", "one complex table in place of cos and sin"),
        ("llama4_text", "one complex table in place of cos and sin"),
        ("qwen3_5_text", SEVERAL_DIMENSIONS),
        ("granite_swa", "2 rotary modules"),
        ("deepseek_v32", "DeepseekV32Indexer requires q_resid"),
        ("diffllama", "DiffLlamaAttention does not call the attention interface"),
    ],
)
def test_a_family_that_is_not_understood(model_type, said, spec):
    if model_type not in CONFIG_MAPPING:
        pytest.skip("not in this version of Transformers")
    model = from_config(AutoConfig.for_model(model_type, **GENERIC))
    with refused(model, UnsupportedModel, said):
        patch(model, spec)


def test_positions_of_images():
    text = {**GENERIC, "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    text["rope_parameters"]["mrope_section"] = [2, 3, 3]
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2}
    model = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model("qwen2_vl", text_config=text, vision_config=vision)
    ).eval()
    with refused(model, UnsupportedModel, "several stacks"):
        patch(model, "rerope:window=6")
    with refused(model, UnsupportedModel, SEVERAL_DIMENSIONS):
        patch(model.model.language_model, "rerope:window=6")


@pytest.mark.parametrize("spec", LATE)
def test_positions_in_three_dimensions(llama, spec):
    mask = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
    with patch(llama, spec), refused(llama, UnsupportedPositions, r"position_ids of shape \(3, 1, 40\)"):
        llama(tokens(40), attention_mask=mask, position_ids=torch.arange(40).expand(3, 1, -1))


@pytest.mark.parametrize("spec", LATE)
def test_a_paged_cache(llama, spec):
    with patch(llama, spec), refused(llama, UnsupportedModel, "LlamaAttention passes 'cache'"):
        llama(tokens(), cache=object())


@pytest.mark.parametrize("spec", LATE)
def test_a_quantised_cache(llama, spec):
    cache = object.__new__(QuantizedCache)
    Cache.__init__(cache, layer_class_to_replicate=DynamicLayer)  # without a backend, which would be a package more
    with patch(llama, spec), refused(llama, UnsupportedPositions, "QuantizedCache: quantised caches are not supported"):
        llama(tokens(), past_key_values=cache)
