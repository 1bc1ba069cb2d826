"""Log-n by its formula, and the temperatures of models against the modules of Transformers that have them."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import InklingTextConfig, Llama4TextConfig, Ministral3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.inkling.modeling_inkling import InklingAttention
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention
from transformers.models.ministral3.modeling_ministral3 import Ministral3Attention
from transformers.models.mistral4.configuration_mistral4 import Mistral4Config
from transformers.models.mistral4.modeling_mistral4 import Mistral4Attention

from rope_patch import InvalidField, LogN, patch
from rope_patch.schemes import Checkpoint
from tests.definition import Definition
from tests.families import VOCABULARY, from_config
from tests.runs import assert_close, left_padded, logits, positions_of, tokens

CASES = ["logn:training_length=8", "logn:form=llama4,scale=0.5,floor=8"]

DEFINITIONS = {
    "logn:training_length=8": Definition(query_scale=lambda m: np.maximum(1, np.log(m + 1) / np.log(8))),
    "logn:training_length=8,clip=False": Definition(query_scale=lambda m: np.log(m + 1) / np.log(8)),
    "logn:training_length=8,power=0.5": Definition(
        query_scale=lambda m: np.maximum(1, (np.log(m + 1) / np.log(8)) ** 0.5)
    ),
    "logn:training_length=8,clip=False,power=2": Definition(query_scale=lambda m: (np.log(m + 1) / np.log(8)) ** 2),
    "logn": Definition(query_scale=lambda m: np.maximum(1, np.log(m + 1) / np.log(32))),
    "logn:form=llama4,scale=0.5,floor=8": Definition(query_scale=lambda m: 1 + 0.5 * np.log(1 + (m + 1) // 8)),
    "logn:form=mistral,scale=0.5,floor=8": Definition(query_scale=lambda m: 1 + 0.5 * np.log(1 + m // 8)),
    "logn:form=inkling,scale=0.5,floor=8": Definition(
        query_scale=lambda m: 1 + 0.5 * np.log(np.maximum(1, (m + 1) / 8))
    ),
    "logn:form=mistral,scale=2": Definition(query_scale=lambda m: 1 + 2 * np.log(1 + m // 32)),
    "logn:training_length=8+logn:training_length=16": Definition(
        query_scale=lambda m: np.maximum(1, np.log(m + 1) / np.log(8)) * np.maximum(1, np.log(m + 1) / np.log(16))
    ),
    "ntk:factor=4+logn:training_length=8": Definition(
        frequencies=lambda theta, length: theta * (4 ** (16 / 14)) ** -(np.arange(8) / 8),
        query_scale=lambda m: np.maximum(1, np.log(m + 1) / np.log(8)),
    ),
}


@pytest.mark.parametrize("length", [2, 256, 4096])
def test_scale_is_one_up_to_the_training_length_and_two_at_its_square(length):
    scale = LogN(length).query_scale(torch.tensor([0, length - 1, length, length**2 - 1]), 4)[0]
    torch.testing.assert_close(scale[[0, 1, 3]], torch.tensor([1.0, 1.0, 2.0]))
    assert scale[2] > 1


def test_without_clip_the_first_tokens_are_scaled_down():
    positions = torch.arange(1000)
    expected = np.log(np.arange(1000) + 1) / np.log(256)
    np.testing.assert_allclose(LogN(256, clip=False).query_scale(positions, 4)[0], expected, rtol=1e-6)


def test_the_default_training_length_is_that_of_the_checkpoint():
    assert LogN().resolve(Checkpoint(256, 4, 256)) == LogN(256)


@pytest.mark.parametrize("power", [0.5, 1.0, 1.5, 2.0])
@pytest.mark.parametrize("clip", [True, False])
def test_the_power_is_of_the_ratio_of_logarithms(clip, power):
    positions = torch.tensor([0, 1, 5, 254, 255, 256, 1000, 65535, 10**7])
    ratio = (np.log(positions.double().numpy() + 1) / np.log(256)) ** power
    found = LogN(256, clip=clip, power=power).query_scale(positions, 4)[0]
    np.testing.assert_allclose(found, np.maximum(1, ratio) if clip else ratio, rtol=2e-6)
    assert torch.equal(LogN(256, clip, power=1).query_scale(positions, 1), LogN(256, clip).query_scale(positions, 1))


@pytest.mark.parametrize(
    "spec", ["logn:training_length=8,clip=False", "logn:training_length=8,clip=False,power=0.5", "ssmax"]
)
def test_positions_below_zero_are_those_of_pads_and_hurt_nobody(llama, spec):
    ids, mask = left_padded([tokens(12), tokens(9)])
    patch(llama, spec)
    expected = logits(llama, ids, attention_mask=mask, position_ids=positions_of(mask))
    found = logits(llama, ids, attention_mask=mask, position_ids=mask.cumsum(dim=-1) - 1)
    assert torch.equal(found[mask.bool()], expected[mask.bool()])


# --- the temperatures of models --------------------------------------------------------------------------------------


@pytest.fixture
def queries(monkeypatch):
    """The queries with which a module calls its attention function, `(1, heads, length, head_dim)`."""
    seen = []

    def captured(module, query, key, value, mask, **kwargs):
        seen.append(query.detach())
        return torch.zeros(len(query), query.shape[2], query.shape[1], value.shape[-1]), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "captured", captured)

    def call(module, length, **arguments):
        # weights are not started by the module itself
        for parameter in module.parameters():
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
        states = torch.randn(1, length, 32, generator=torch.Generator().manual_seed(1))
        module(hidden_states=states, attention_mask=None, **arguments)
        return seen[-1]

    return call


def sizes(heads):
    return {
        **{"hidden_size": 32, "num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": 8},
        "attn_implementation": "captured",
    }


class Past:
    """A cache that has seen so many tokens and gives the new keys back."""

    def __init__(self, length):
        self.length = length

    def get_seq_length(self, layer):
        return self.length

    def update(self, key, value, layer, *others, **more):
        return key, value


def assert_scaled(found, plain, scheme, positions):
    scale = scheme.query_scale(positions, found.shape[1])
    assert scale.max() > 1
    torch.testing.assert_close(found, plain * scale[:, None, :, None], rtol=1e-6, atol=0)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize(("n0", "past"), [(1, 0), (7, 0), (7, 100), (64, 0), (8192, 8180), (8192, 10**7)])
def test_llama4_scales_by_it_on_layers_without_rotation(queries, heads, n0, past):
    settings = {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "floor_scale": n0, "attn_scale": 0.3}
    module = Llama4TextAttention(Llama4TextConfig(**sizes(heads), **settings), 3)
    call = {"length": 100, "position_embeddings": None, "past_key_values": Past(past)}
    found = queries(module, **call)
    module.attn_temperature_tuning = False
    assert_scaled(found, queries(module, **call), LogN(form="llama4", scale=0.3, floor=n0), torch.arange(100) + past)


def of_mistral(model, heads, beta, n0):
    said = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": beta}
    said["original_max_position_embeddings"] = n0
    if model == "ministral3":
        return Ministral3Attention(Ministral3Config(**sizes(heads), rope_parameters=said), 0)
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8}
    config = Mistral4Config(**{**sizes(heads), "num_key_value_heads": heads, **latent}, rope_parameters=said)
    return Mistral4Attention(config, 0)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("n0", [1, 7, 64, 16384])
@pytest.mark.parametrize(("model", "turned"), [("ministral3", 8), ("mistral4", 4)])
def test_mistral_scales_by_it(queries, model, turned, heads, n0):
    positions = torch.tensor([0, 1, 5, 6, 7, 8, 63, 64, 127, 128, 16383, 16384, 10**6, 10**7])
    found, plain = (
        queries(
            of_mistral(model, heads, beta, n0),
            length=len(positions),
            position_ids=positions[None],
            position_embeddings=(torch.ones(1, len(positions), turned), torch.zeros(1, len(positions), turned)),
        )
        for beta in (0.3, 0.0)
    )
    assert_scaled(found, plain, LogN(form="mistral", scale=0.3, floor=n0), positions)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("n0", [1, 7, 64, 500])
def test_inkling_scales_by_it(queries, heads, n0):
    settings = {"num_hidden_layers": 1, "layer_types": ["hybrid"], "d_rel": 4, "rel_extent": 8}
    found, plain = (
        queries(
            InklingAttention(
                InklingTextConfig(
                    **sizes(heads), **settings, log_scaling_n_floor=floor, log_scaling_alpha=0.3, num_mtp_layers=None
                ),
                0,
            ),
            length=600,
        )
        for floor in (n0, None)
    )
    assert_scaled(found, plain, LogN(form="inkling", scale=0.3, floor=n0), torch.arange(600))


def test_a_model_of_mistral_without_its_temperature_gets_it_back():
    def build(beta):
        said = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": beta}
        said["original_max_position_embeddings"] = 8
        config = Ministral3Config(
            **{**sizes(4), "attn_implementation": "sdpa", "num_hidden_layers": 2, "intermediate_size": 48},
            **{"vocab_size": VOCABULARY, "max_position_embeddings": 32, "rope_parameters": said},
        )
        return from_config(config)

    expected, plain = logits(build(0.5), tokens()), build(0.0)
    assert (logits(plain, tokens()) - expected).abs().max() > 1e-2
    with patch(plain, "logn:form=mistral,scale=0.5,floor=8"):
        assert_close(logits(plain, tokens()), expected)


@pytest.mark.parametrize(("form", "steps"), [("mistral", [0, 0, 1]), ("llama4", [0, 1, 1])])
def test_steps_are_exact_where_float32_is_not(form, steps):
    n0 = 2**24 + 1
    found = LogN(form=form, scale=0.1, floor=n0).query_scale(torch.tensor([n0 - 2, n0 - 1, n0]), 1)[0]
    np.testing.assert_allclose(found, 1 + 0.1 * np.log1p(steps), rtol=1e-6)


def test_the_defaults_of_the_models():
    assert LogN(form="llama4").resolve(Checkpoint(256, 4, 1024)) == LogN(form="llama4", scale=0.1, floor=256)
    assert Llama4TextConfig().attn_scale == InklingTextConfig().log_scaling_alpha == 0.1
    assert Ministral3Config().rope_parameters["llama_4_scaling_beta"] == 0.1


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"scale": 0.1}, "scale=0.1 is not allowed; form='clip' has training_length, clip, power"),
        ({"floor": 8}, "floor=8 is not allowed; form='clip'"),
        ({"form": "llama4", "training_length": 8}, "training_length=8 is not allowed; form='llama4' has scale, floor"),
        ({"form": "mistral", "clip": False}, "clip=False is not allowed; form='mistral'"),
        ({"form": "mistral", "power": 2.0}, "power=2.0 is not allowed; form='mistral' has scale, floor"),
        ({"power": 0}, "power=0 is not allowed; power must be a number above 0"),
        ({"form": "inkling", "scale": 0}, "scale=0 is not allowed"),
        ({"form": "inkling", "floor": 0}, "floor=0 is not allowed"),
        ({"form": "llama"}, "did you mean 'llama4'"),
    ],
)
def test_fields_of_another_form_are_refused_by_name(fields, named):
    with pytest.raises(InvalidField, match=named):
        LogN(**fields)
