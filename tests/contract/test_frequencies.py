"""Frequencies equal those of Transformers bit for bit, for every type that it has."""

import dataclasses
import itertools

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRotaryEmbedding

from rope_patch import Scheme, export_rope_parameters, get_scheme, list_schemes, patch, unpatch
from rope_patch.schemes import scheme_class
from rope_patch.typing import RotarySpec
from tests.contract.test_definition import DEFINITIONS
from tests.definition import defined_logits
from tests.families import FAMILIES, FOLLOWING, SCALED, build
from tests.runs import LENGTH, assert_close, cached_logits, logits, tokens, usable_length

HEAD_DIMS = [16, 64, 80, 128, 256]
BASES = [500.0, 10000.0, 500000.0, 5e6]
TRAINING_LENGTHS = [256, 4096, 8192]
FACTORS = [1.0, 2.5, 4.0, 32.0]


def schemes_of(factor: float, pairs: int) -> list[Scheme]:
    """One or more settings of every scheme that has a type in Transformers."""
    short, long = ([1 + step * i / pairs for i in range(pairs)] for step in (0.5, factor))
    return [
        get_scheme("rope"),
        get_scheme("pi", factor=factor),
        get_scheme("ntk", factor=factor),
        get_scheme("abf", base=123456.0),
        get_scheme("dynamic_ntk", factor=factor),
        get_scheme("yarn", factor=factor),
        get_scheme("yarn", factor=factor, beta_fast=16, beta_slow=2, truncate=False, attention_factor=1.25),
        get_scheme("yarn", factor=factor, mscale=1.0, mscale_all_dim=0.5),
        get_scheme("ntk_by_parts", factor=factor),
        get_scheme("llama3", factor=factor),
        get_scheme("llama3", factor=factor, low_freq_factor=2, high_freq_factor=8),
        get_scheme("longrope", short_factor=short, long_factor=long, factor=factor),
        get_scheme("proportional", partial_rotary_factor=0.25, factor=factor),
    ]


def of_transformers(config: LlamaConfig, length: int) -> tuple[torch.Tensor, float]:
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        rotary = LlamaRotaryEmbedding(config)
        return rotary.inv_freq, rotary.attention_scaling
    return ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=torch.tensor(length))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("trained", TRAINING_LENGTHS)
def test_frequencies_equal_those_of_transformers_bit_for_bit(head_dim, trained):
    compared = set()
    for base, factor in itertools.product(BASES, FACTORS):
        plain = {"rope_type": "default", "rope_theta": base}
        config = LlamaConfig(head_dim=head_dim, max_position_embeddings=trained, rope_parameters=plain)
        for scheme in schemes_of(factor, head_dim // 2):
            exported = export_rope_parameters(scheme, config)
            loaded = LlamaConfig(head_dim=head_dim, max_position_embeddings=trained, rope_parameters=exported)
            for length in (1, trained, trained + 1, 3 * trained, 131072):
                expected, scaling = of_transformers(loaded, length)
                lengths = torch.tensor([length]) if scheme.length_dependent else None
                found = scheme.frequencies(RotarySpec(head_dim, base, trained), lengths)
                case = f"{scheme}, base {base}, length {length}"
                assert torch.equal(found.inv_freq.view(-1), expected), case
                assert found.attention_scaling == scaling, case
            compared.add(loaded.rope_parameters["rope_type"])
    assert compared == {"default", *ROPE_INIT_FUNCTIONS} - {"axial"}


def test_every_type_of_transformers_has_a_scheme():
    ours = {scheme_class(name).rope_type for name in list_schemes()} - {None}
    assert ours == {"default", *ROPE_INIT_FUNCTIONS} - {"axial"}  # axial positions are those of images


@pytest.mark.parametrize("length", [48, 64, 200])
def test_patching_after_loading_equals_loading_with_that_config(length):
    values = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    config = LlamaConfig(**values)
    model = LlamaForCausalLM(config).eval()
    for scheme in schemes_of(4.0, 8):
        loaded = LlamaForCausalLM(LlamaConfig(**values, rope_parameters=export_rope_parameters(scheme, config))).eval()
        loaded.load_state_dict(model.state_dict())
        expected = logits(loaded, tokens(length, rows=2))
        with patch(model, scheme) as handle:
            found = logits(model, tokens(length, rows=2))
        if handle.plan.late:  # scored by another kernel
            assert_close(found, expected)
        else:
            assert torch.equal(found, expected), str(scheme)


@pytest.mark.parametrize("family", [family for family in SCALED if FAMILIES[family]["model_type"] == "llama"])
@pytest.mark.parametrize("spec", ["window:window=7", "logn:training_length=8", "rerope:window=6"])
@pytest.mark.parametrize("mount", ["auto", "late"])
@pytest.mark.parametrize("attention", ["auto", "oracle", "segmented"])
def test_a_scheme_keeps_the_frequencies_and_the_sharpness_of_the_checkpoint(model, spec, mount, attention):
    """Transformers' own types turn pairs by their frequencies, and some make every score larger by a factor squared."""
    config, short = model.config, tokens(usable_length(model, spec))
    definition = dataclasses.replace(
        DEFINITIONS[spec],
        frequencies=lambda _, length: of_transformers(config, length)[0].double().numpy(),
        temperature=of_transformers(config, LENGTH)[1],
    )
    expected = [defined_logits(model, ids, definition) for ids in (tokens(), short)]
    with patch(model, spec, mount=mount, attention=attention):
        assert_close(logits(model, tokens()), expected[0], 1e-4)
        assert_close(cached_logits(model, short, [9, 1, short.shape[1] - 10]), expected[1], 1e-4)


def test_some_checkpoints_are_sharper_than_others():
    factors = {family: of_transformers(build(family).config, LENGTH)[1] for family in ("llama_yarn", "llama_longrope")}
    assert min(factors.values()) > 1.1


@pytest.mark.parametrize("family", FOLLOWING)
@pytest.mark.parametrize("spec", ["pi:factor=4", "yarn:factor=4+logn", "rerope:window=6"])
def test_tables_that_followed_the_length_follow_it_again_after_removal(model, family, spec):
    other = build(family)
    patch(model, spec)
    logits(model, tokens(3 * LENGTH))
    unpatch(model)
    for length in (8, 2 * LENGTH, 8):  # the second call finds the tables of the first one
        assert torch.equal(logits(model, tokens(length)), logits(other, tokens(length)))
    assert (logits(other, tokens(2 * LENGTH)) - logits(build(), tokens(2 * LENGTH))).abs().max() > 1e-2


@pytest.mark.parametrize("spec", ["dynamic_ntk:factor=2", "dynamic_yarn:factor=2"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_pads_do_not_add_to_the_length_of_a_text(llama, spec, side):
    short, pads = tokens(40), torch.zeros(1, 20, dtype=torch.long)
    row = torch.cat([pads, short] if side == "left" else [short, pads], dim=1)
    ids = torch.cat([row, tokens(60, seed=1)])
    mask = (ids > 0).long()
    with patch(llama, spec):
        found = logits(llama, ids, attention_mask=mask, position_ids=torch.arange(60)[None] - 20 * (side == "left"))
        assert_close(found[:1, mask[0].bool()], logits(llama, short))
