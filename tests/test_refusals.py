"""What is not supported is refused by a sentence that names it, at patch time or at the call, and changes nothing."""

import contextlib
import inspect

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    Cache,
    DynamicLayer,
    QuantizedCache,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from rope_patch import UnsupportedModel, UnsupportedPositions, patch
from tests.cases import CASES, ROUTES
from tests.families import GENERIC, from_config
from tests.runs import tokens
from tests.snapshots import snapshot
from tests.zoo.builder import specimen

LATE = [spec for spec in ROUTES if spec != CASES["yarn"]]
"""The schemes that come to see the cache and the positions of a call."""


@contextlib.contextmanager
def refused(model, error, said):
    """The block raises one line that contains `said`, and nothing changed."""
    before = snapshot(model)
    with pytest.raises(error, match=said) as caught:
        yield
    assert "\n" not in str(caught.value)
    assert snapshot(model) == before


@pytest.mark.parametrize("spec", LATE)
@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("hunyuan_v1_dense", "a norm"),
        ("deepseek_v4", "DeepseekV4HCACompressor inside it rotates keys of its own"),
        ("deepseek_v32", "DeepseekV32Indexer inside it reads the rotary tables as well"),
        ("diffllama", "DiffLlamaAttention calls the attention interface of Transformers 2 times"),
        ("doge", "DogeAttention has an attention interface of its own"),
    ],
)
def test_a_family_that_is_not_understood(model_type, said, spec):
    if model_type not in CONFIG_MAPPING:
        pytest.skip("not in this version of Transformers")
    model = from_config(AutoConfig.for_model(model_type, **GENERIC))
    with refused(model, UnsupportedModel, said):
        patch(model, spec)


def test_a_model_of_which_only_the_eyes_have_positions():
    if "glm5_next" not in CONFIG_MAPPING:
        pytest.skip("not in this version of Transformers")
    model = specimen("glm5_next").model
    with pytest.raises(
        UnsupportedModel, match="were found in its Glm5NextVisionModel alone, which reads no text: Glm5"
    ):
        patch(model, "pi:factor=4")


def test_a_norm_that_would_undo_a_temperature():
    model = from_config(AutoConfig.for_model("hunyuan_v1_dense", **GENERIC))
    with refused(model, UnsupportedModel, "a norm"):
        patch(model, "yarn:factor=4")


def test_a_norm_after_the_rotation_whose_weights_are_all_one_as_yet():
    config = AutoConfig.for_model("hunyuan_v1_dense", **GENERIC)
    model = AutoModelForCausalLM.from_config(config).eval()
    assert all((layer.self_attn.query_layernorm.weight == 1).all() for layer in model.model.layers)
    with refused(model, UnsupportedModel, "a norm"):
        patch(model, "rerope", window=6)


@pytest.mark.parametrize("spec", LATE)
def test_positions_in_three_dimensions(llama, spec):
    mask = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
    with patch(llama, spec), refused(llama, UnsupportedPositions, r"position_ids of shape \(3, 1, 40\)"):
        llama(tokens(40), attention_mask=mask, position_ids=torch.arange(40).expand(3, 1, -1))


@pytest.mark.skipif(
    "cache" in inspect.signature(LlamaAttention.forward).parameters,
    reason="since Transformers 5.24, attention modules read any cache under this name",
)
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
