"""Stacks whose attention cannot be scored here, or whose layers receive different tables, or none."""

import copy
import functools

import pytest
import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    DynamicCache,
    EncoderDecoderCache,
)
from transformers.models.moonshine.modeling_moonshine import MoonshineDecoder

from rope_patch import (
    NotExpressible,
    UnsupportedModel,
    describe,
    export_rope_parameters,
    get_scheme,
    native_scheme,
    patch,
    unpatch,
)
from rope_patch.doctor.versions import older
from tests.families import GENERIC, config_of, from_config
from tests.runs import LENGTH, assert_close, generated, greedy, left_padded, positions_of, tokens
from tests.snapshots import snapshot
from tests.zoo import truth

_HEADS = {**GENERIC, "num_key_value_heads": 2, "head_dim": 16}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
_WIDE = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": LENGTH}
_GEMMA = {
    **{**_HEADS, **_ALTERNATING, "num_kv_shared_layers": 2},
    **{"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8},
}
_INDEXER = {"num_hidden_layers": 2, "index_n_heads": 2, "index_head_dim": 16, "index_topk": LENGTH}

TABLES_ONLY = {
    "gemma3n_text": {**_GEMMA, "altup_num_inputs": 2, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": {**_GEMMA, "global_head_dim": 32, "num_global_key_value_heads": 1},
    "deepseek_v32": {**GENERIC, **_INDEXER},
    "glm_moe_dsa": {**GENERIC, **_INDEXER},
    "gpt_neox_japanese": {"intermediate_multiple_size": 2, "rotary_pct": 0.5, "head_dim": 16},
    "falcon": {"alibi": False},
    "doge": {**_HEADS, "head_dim": 16},
    "diffllama": _HEADS,
}
"""Model types of which only the tables can be replaced, and values for a small config."""

WRONG_IN_5_17 = {"gpt_neox_japanese", "doge"}
"""Model types that Transformers 5.17 cannot run if a part of each head turns, or misreads after a cache, unpatched."""

SCORED = {
    "beam": {**_HEADS, **_WIDE},
    "muse_glimmer_text": {**_HEADS, **_WIDE, "layer_rope_theta": [1e4, 1e4, 0, 1e4]},
    "granite_swa": {
        **{**_HEADS, "layer_types": ["full_attention"] * 4, "attn_implementation": "eager"},
        "layer_rope_theta": [1e4, 500.0, 0, 5e5],
    },
    "esmc": {},
    "neomme": {**_HEADS, "per_layer_config": {str(i): {"sliding_window": 100} for i in range(4)}},
    "embedding_gemma2_text": {**_HEADS, **_ALTERNATING, "global_head_dim": 32, "hidden_size_per_layer_input": 8},
    "gemma4_unified_text": {**_HEADS, **_ALTERNATING, "global_head_dim": 32, "num_global_key_value_heads": 1},
}
"""Model types that are scored although their layers or their stack differ from the usual."""

_TYPES = {**TABLES_ONLY, **SCORED}
_SMALL = {key: GENERIC[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
_SMALL |= {"num_hidden_layers": 2, "max_position_embeddings": 32, "initializer_range": 0.05, "pad_token_id": 0}


def _config(model_type, **changes):
    return AutoConfig.for_model(model_type, **copy.deepcopy({**_SMALL, **_TYPES[model_type], **changes}))


@functools.cache
def _prototype(model_type):
    config = _config(model_type)
    kinds = (AutoModelForCausalLM, AutoModelForMaskedLM, AutoModel)
    model = from_config(config, next(kind for kind in kinds if type(config) in kind._model_mapping))
    random = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.numel() > 1 and not weight.any():
            weight.data.normal_(0, 0.1, generator=random)
    return model


def _build(model_type):
    if model_type not in CONFIG_MAPPING:
        pytest.skip("not in this version of Transformers")
    if model_type in WRONG_IN_5_17 and older(transformers.__version__, "5.18"):
        pytest.skip(f"Transformers {transformers.__version__} itself computes it wrongly")
    return copy.deepcopy(_prototype(model_type))


@torch.no_grad()
def _run(model, ids, **inputs):
    found = model(ids, **inputs)
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


def _plain(model, model_type, parameters):
    """The same weights in a model that Transformers builds from these `rope_parameters`."""
    values = {**_config(model_type).to_dict(), "rope_parameters": parameters}
    values["attn_implementation"] = model.config._attn_implementation
    plain = type(model)(type(model.config)(**copy.deepcopy(values))).eval()
    plain.load_state_dict(model.state_dict())
    return plain


@pytest.mark.parametrize("spec", ["pi:factor=4", "yarn:factor=4", "abf:base=500000"])
@pytest.mark.parametrize("model_type", _TYPES)
def test_static_frequencies_are_those_that_transformers_builds(model_type, spec):
    model, ids = _build(model_type), tokens()
    before, native = snapshot(model, lambda model: _run(model, ids)), _run(model, ids)
    handle = patch(model, spec)
    assert handle.plan.mounts() == "rotary"
    found = _run(model, ids)
    assert not torch.equal(found, native)
    try:
        exported = export_rope_parameters(handle.scheme, _config(model_type))
    except NotExpressible:
        assert spec != "pi:factor=4"
    else:
        assert torch.equal(_run(_plain(model, model_type, exported), ids), found)
    unpatch(model)
    assert snapshot(model, lambda model: _run(model, ids)) == before


@pytest.mark.parametrize("model_type", TABLES_ONLY)
def test_text_in_pieces_and_rows_with_pads_under_other_tables(model_type):
    model, ids = _build(model_type), tokens()
    with patch(model, "pi:factor=4"):
        whole, cache = _run(model, ids), DynamicCache(config=model.config)
        pieces = [_run(model, piece, past_key_values=cache, use_cache=True) for piece in ids.split([20, 1, 1, 18], 1)]
        assert_close(torch.cat(pieces, dim=1), whole, 5e-4)
        assert torch.equal(generated(model, ids[:, :20], 3), greedy(model, ids[:, :20], 3))
        if model_type == "doge":
            return  # masks no pads
        batch, mask = left_padded([ids[0], ids[0, :25]])
        padded = _run(model, batch, attention_mask=mask, position_ids=positions_of(mask))
        assert_close(padded[1:, -25:], _run(model, ids[:, :25]), 5e-5)


@pytest.mark.parametrize("model_type", TABLES_ONLY)
def test_a_scheme_that_scores_names_the_layer_and_the_reason(model_type):
    model = _build(model_type)
    for spec in ("rerope:window=6", "logn:training_length=8", "dynamic_ntk:factor=4"):
        with pytest.raises(UnsupportedModel, match=r" scores \S+ here, which is not supported: .*static frequencies"):
            patch(model, spec)
    assert "frequencies only" in describe(model)


def test_keys_that_other_layers_read_are_not_scored_by_some_of_them():
    with pytest.raises(UnsupportedModel, match="other layers read its keys"):
        patch(_build("gemma3n_text"), "layers:[1=rerope:window=6;rest=none]")


def test_a_second_table_of_tokens_is_not_bypassed():
    with pytest.raises(UnsupportedModel, match="does not read vectors instead of tokens"):
        patch(_build("gemma3n_text"), "sinusoidal")


@pytest.mark.parametrize("model_type", SCORED)
def test_layers_with_other_tables_or_none_are_scored(model_type):
    model, ids = _build(model_type), tokens()
    plain = _run(model, ids)
    with patch(model, native_scheme(model), mount="late"):
        assert torch.equal(_run(model, ids), plain)
    with patch(model, "rerope", window=2 * LENGTH):
        assert_close(_run(model, ids), plain, 5e-5)
    with patch(model, "rerope", window=6):
        fast = _run(model, ids)
    with patch(model, "rerope", window=6, attention="oracle"):
        assert_close(_run(model, ids), fast, 5e-5)
    assert not torch.allclose(fast, plain, atol=1e-4)


def test_layers_that_receive_no_tables_are_left_alone():
    for model_type, index in (("beam", 1), ("muse_glimmer_text", 2), ("granite_swa", 2)):
        with patch(_build(model_type), "rerope", window=6) as handle:
            assert handle.plan.left_alone[index] == "layer without positions"


def test_pairs_that_a_checkpoint_leaves_still_stay_so():
    model = _build("gemma4_text")
    tables = model.model.rotary_emb
    still = tables.full_attention_inv_freq == 0
    assert 0 < still.sum() < still.numel()
    for spec in ("yarn:factor=4", "ntk:factor=4", "resonance", "pi:factor=2"):
        with patch(model, spec):
            assert torch.equal(tables.full_attention_inv_freq == 0, still)
    with patch(model, "proportional:partial_rotary_factor=0.5"):
        assert (tables.full_attention_inv_freq == 0).sum() < still.sum()
    with pytest.raises(NotExpressible, match=r"rotates only 0\.25 of its pairs"):
        export_rope_parameters(get_scheme("yarn:factor=4"), model.config)


def test_the_config_names_every_layer_type_that_changes():
    model = from_config(config_of("gemma3", sliding_window=LENGTH))
    with patch(model, "pi:factor=4") as handle:
        assert set(handle.plan.rotary) == {"sliding_attention", "full_attention"}
        assert {entry["rope_type"] for entry in model.config.rope_parameters.values()} == {"linear"}


def test_a_prompt_that_a_cache_keeps_beyond_its_window():
    ocr = pytest.importorskip("transformers.models.unlimited_ocr.modeling_unlimited_ocr")
    values = {**_HEADS, "num_key_value_heads": 4, "sliding_window": 8}
    model = ocr.UnlimitedOcrTextModel(ocr.UnlimitedOcrTextConfig(**values)).eval()
    with pytest.raises(UnsupportedModel, match="ReferenceSlidingWindowLayer keeps keys in a form of its own"):
        patch(model, "rerope", window=6)
    with patch(model, "pi:factor=4") as handle:
        assert not handle.plan.left_alone


def test_cross_attention_that_could_rotate_but_gets_no_tables():
    sizes = {key: GENERIC[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")}
    heads = {f"decoder_num_{what}": size for what, size in {"hidden_layers": 2, "attention_heads": 4}.items()}
    config = AutoConfig.for_model("moonshine", **sizes, **heads, pad_token_id=0, bos_token_id=1, eos_token_id=None)
    model = MoonshineDecoder._from_config(config, attn_implementation="eager").eval()  # the truth reads its mask
    ids, heard = tokens(20), torch.randn(1, 9, GENERIC["hidden_size"])
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.q_proj.weight.mul_(20)  # weights as large as those of trained models

    @torch.no_grad()
    def states(ids, **inputs):
        return model(input_ids=ids, encoder_hidden_states=heard, **inputs)[0]

    plain = states(ids, use_cache=False)
    with truth.rerope([layer.self_attn for layer in model.layers], window=4):
        expected = states(ids, use_cache=False)
    assert (expected - plain).abs().max() > 1e-3
    with patch(model, "rerope", window=4):
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        assert_close(states(ids, use_cache=False), expected)
        assert_close(torch.cat([states(part, past_key_values=cache) for part in ids.split([12, 1, 7], 1)], 1), expected)
    assert torch.equal(states(ids, use_cache=False), plain)
