"""Checkpoints that others made their own way: quantized weights, and words in configs that nobody reads."""

import pytest
import torch
from torch import nn

from rope_patch import export_rope_parameters, native_scheme, patch
from rope_patch.models.find_stacks import read_stack
from tests.cases import ALL, ROUTES
from tests.families import TRAINING_LENGTH, build, config_of
from tests.runs import LENGTH, assert_close, generated, logits, tokens

# --- RoPE that follows the length -----------------------------------------------------------------------------------

MAXIMUM = 24
"""The config's length, and so L; a number that differs from those of all entries."""
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 8}
NESTED = {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
WITH_YARN = {
    "full_attention": DYNAMIC,
    "sliding_attention": {**DYNAMIC, "rope_type": "yarn", "original_max_position_embeddings": 12},
}
SAID = [("llama", DYNAMIC), ("llama", {**DYNAMIC, "length": 64}), ("gemma3", NESTED), ("gemma3", WITH_YARN)]


@pytest.mark.parametrize("length", [6, 16, MAXIMUM, MAXIMUM + 1, LENGTH])
@pytest.mark.parametrize(("family", "parameters"), SAID, ids=["flat", "with a length", "nested", "beside yarn"])
def test_the_length_that_dynamic_rope_grows_from_is_the_maximum_of_the_config(family, parameters, length):
    def fresh():  # because Transformers remembers the longest call
        return build(family, rope_parameters=parameters, max_position_embeddings=MAXIMUM)

    expected = logits(fresh(), tokens(length))
    model = fresh()
    assert read_stack(model).training_length == MAXIMUM
    for mount in ("auto", "late"):
        with patch(model, native_scheme(model), mount=mount):
            assert_close(logits(model, tokens(length)), expected)


def test_exported_dynamic_rope_is_read_as_it_was():
    config = config_of("llama", rope_parameters=DYNAMIC, max_position_embeddings=MAXIMUM)
    model = build("llama", rope_parameters=DYNAMIC, max_position_embeddings=MAXIMUM)
    said = {key: value for key, value in DYNAMIC.items() if key != "original_max_position_embeddings"}
    assert export_rope_parameters(native_scheme(model), config) == said


# --- quantized weights ----------------------------------------------------------------------------------------------


class Int8(nn.Module):
    """A linear layer as bitsandbytes has them: integer weights, and factors that are no parameters."""

    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.detach()
        self.factors = weight.abs().amax(dim=1, keepdim=True).float() / 127
        self.weight = nn.Parameter((weight / self.factors).round().to(torch.int8), requires_grad=False)
        self.bias = linear.bias

    def forward(self, states):
        return nn.functional.linear(states, (self.weight * self.factors).to(states.dtype), self.bias)


class Packed(nn.Module):
    """A linear layer as those of GPTQ: integer buffers, no parameters at all."""

    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.detach()
        factors = weight.abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("qweight", (weight / factors.float()).round().to(torch.int32))
        self.register_buffer("scales", factors)

    def forward(self, states):
        return nn.functional.linear(states, (self.qweight * self.scales).to(self.scales.dtype))


def quantized(family, kind, dtype=torch.float32):
    model = build(family).to(dtype)
    if kind == "dynamic":
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    for name, module in list(model.model.named_modules()):
        if isinstance(module, nn.Linear):
            model.model.set_submodule(name, kind(module))
    return model


KINDS = [
    ("dynamic", torch.float32),
    *((kind, dtype) for kind in (Int8, Packed) for dtype in (torch.float32, torch.bfloat16)),
]


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_quantized_weights_are_patched_and_left_as_they_were(family, kind, dtype):
    model = quantized(family, kind, dtype)
    expected = logits(model, tokens())
    if dtype is torch.float32:
        with patch(model, native_scheme(model), mount="late"):
            assert_close(logits(model, tokens()), expected)
    for spec in ROUTES:
        with patch(model, spec):
            assert (logits(model, tokens()) - expected).abs().max() > 1e-2
            assert generated(model, tokens(6)).shape == (1, 3)
    assert torch.equal(logits(model, tokens()), expected)


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.parametrize("spec", ALL)
def test_every_scheme_on_weights_out_of_sight(spec):
    model = quantized("llama", "dynamic")
    with patch(model, spec):
        assert logits(model, tokens(TRAINING_LENGTH)).isfinite().all()
