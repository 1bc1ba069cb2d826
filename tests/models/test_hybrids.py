"""Models whose layers attend and also read the tokens in order: a convolution or a state must not read pads."""

import functools

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, StaticCache

from rope_patch import UnsupportedPositions, patch
from tests.families import GENERIC, TRAINING_LENGTH, VOCABULARY, from_config
from tests.families import build as build_text
from tests.models.t5_families import build as build_t5
from tests.runs import assert_close, cached_logits, generated, greedy, left_padded, logits, positions_of, tokens

_MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
_TURNS = {"layer_types": ["conv", "full_attention"] * 2}
CONFIGS = {
    # every layer attends, beside a state or behind a convolution
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64, "mamba_d_head": 16},
    "zaya": {"num_experts_per_tok": 1, "ffn_hidden_size": 64},
    # layers take turns
    "granitemoehybrid": {
        **{**_MAMBA, "layer_types": ["mamba", "attention"] * 2, "position_embedding_type": "rope"},
        **{"shared_intermediate_size": 32, "mamba_d_head": 32},
    },
    "lfm2": _TURNS,
    "lfm3": {},
}
FAMILIES = {
    family: {"model_type": family, **GENERIC, "head_dim": 16, "experts_implementation": "eager", **values}
    for family, values in CONFIGS.items()
    if family in CONFIG_MAPPING
}
SPECS = ["rerope:window=4", "alibi", "rope+fox:horizon=4,initial_std=0.1"]
every_layer_attends = pytest.mark.parametrize("family", [each for each in ("falcon_h1", "zaya") if each in FAMILIES])


@functools.cache
def build(family):
    model = from_config(AutoConfig.for_model(**FAMILIES[family]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and not any(part in name for part in ("embed", "lm_head", "experts")):
                parameter.mul_(2)  # what a convolution or a state reads is seen in the logits
    return model


@pytest.mark.parametrize(
    ("family", "spec"),
    [(family, spec) for family in FAMILIES for spec in SPECS if spec == SPECS[0] or family in ("falcon_h1", "zaya")],
)
def test_rows_with_left_pads_are_the_rows_alone(family, spec):
    model, rows = build(family), [tokens(size, seed=size) for size in (7, 12, 9)]
    ids, mask = left_padded(rows)
    with patch(model, spec):
        alone = [logits(model, row)[0] for row in rows]
        for inputs in ({}, {"position_ids": positions_of(mask)}):
            found = logits(model, ids, attention_mask=mask, **inputs)
            for row, expected in enumerate(alone):
                assert_close(found[row][mask[row] > 0], expected)
        with torch.no_grad():
            cached = cached_logits(model, ids, [10, 1, 1], mask)
        for row, expected in enumerate(alone):
            assert_close(cached[row][mask[row] > 0], expected, 5e-5)


@every_layer_attends
def test_generation_with_left_pads(family):
    model, rows = build(family), [tokens(size, seed=size) for size in (5, 9)]
    ids, mask = left_padded(rows)
    with patch(model, "rerope", window=4):
        found = generated(model, ids, 3, attention_mask=mask)
        assert torch.equal(found, torch.cat([generated(model, row, 3) for row in rows]))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "t5"])
def test_other_models_still_get_a_number_per_key(family):
    model = build_t5() if family == "t5" else build_text(family)
    stacks = [model.encoder, model.decoder] if family == "t5" else [model.base_model]
    ids, mask = left_padded([tokens(5), tokens(9)])
    with patch(model, "rerope", window=4):
        for stack in stacks:
            inputs = {"input_ids": ids, "attention_mask": mask}
            for hook in stack._forward_pre_hooks.values():
                inputs = (hook(stack, (), inputs) or ((), inputs))[1]
            assert inputs["attention_mask"].shape == (2, 9, 1, 1)


# --- positions that a stack does not give to its blocks ------------------------------------------------------------


@pytest.mark.parametrize(
    "family", [family for family in ("zaya", "granitemoehybrid", "modernbert") if family in CONFIG_MAPPING]
)
@pytest.mark.parametrize("attention", ["auto", "oracle"])
def test_given_positions_reach_the_attention(family, attention):
    if family == "modernbert":
        values = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
        values |= {"num_attention_heads": 4, "max_position_embeddings": TRAINING_LENGTH, "pad_token_id": 0}
        model = from_config(AutoConfig.for_model(family, **values, global_attn_every_n_layers=1), AutoModel)
    else:
        model = build(family)
    ids, positions = tokens(20), 3 * torch.arange(20)[None]

    @torch.no_grad()
    def outputs(**inputs):
        return model(ids, **inputs)[0]

    expected, counted = outputs(position_ids=positions), outputs()
    with patch(model, "rerope", window=1000, attention=attention):
        assert_close(outputs(position_ids=positions), expected)
        assert_close(outputs(), counted)
    assert (expected - counted).abs().max() > 1e-4


def test_positions_of_zaya_go_on_behind_a_cache():
    model, ids = build("zaya"), tokens(14)
    with patch(model, "rerope", window=4), torch.no_grad():
        expected = logits(model, ids)
        for cache in (None, StaticCache(config=model.config, max_cache_len=14)):
            assert_close(cached_logits(model, ids, [8, 1, 5], cache=cache), expected)


# --- a cache of the model's own class ------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["rnn:width=16", "fox:horizon=4,initial_std=0.1"])
def test_a_cache_that_counts_its_layers_otherwise_keeps_keys_alone(spec):
    values = {**GENERIC, "head_dim": 16, "num_local_experts": 4, "block_size": 8, "experts_implementation": "eager"}
    model, ids = from_config(AutoConfig.for_model("minimax", **values)), tokens(12)
    with patch(model, spec):
        for use in (model, model.generate):
            with torch.no_grad(), pytest.raises(UnsupportedPositions, match=r"MiniMaxCache .* pass use_cache=False"):
                use(ids, use_cache=True)
        assert torch.equal(generated(model, ids, 3, use_cache=False), greedy(model, ids, 3))
        assert_close(logits(model, ids)[:, :8], logits(model, ids[:, :8]))
    with patch(model, "rerope", window=4):
        assert torch.equal(generated(model, ids, 3), greedy(model, ids, 3))
