"""Calls whose tokens see later ones (bidirectional models, prefixes, blocks) mirror the distances of the definition."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, DynamicCache

from rope_patch import UnsupportedModel, UnsupportedPositions, get_scheme, patch
from tests.cases import CASES
from tests.definition import Definition, defined_logits, no_rotation
from tests.families import build, from_config
from tests.runs import assert_close, cached_logits, left_padded, logits, positions_of, tokens

LENGTH, CHUNK = 40, 24


def far(change):
    """The distance of a pair that is changed alike on both sides of the query."""
    return lambda m, n: np.sign(m - n) * change(np.abs(m - n))


SLOPES = [4.0 ** -(head + 1) for head in range(4)]
MIRRORED = {
    "rerope:window=6": Definition(far(lambda d: np.minimum(d, 6))),
    "leaky_rerope:window=6,factor=4": Definition(far(lambda d: np.where(d < 6, d, 6 + (d - 6) / 4))),
    "string:shift=8,window=3": Definition(far(lambda d: np.where(d < 8, d, d - 5))),
    "window:window=7": Definition(visible=lambda m, n: np.abs(m - n) < 7),
    "alibi:symmetric=true": Definition(no_rotation, bias=lambda head, m, n: -SLOPES[head] * np.abs(m - n)),
    "rope+alibi:symmetric=true": Definition(bias=lambda head, m, n: -SLOPES[head] * np.abs(m - n)),
    "rerope:window=6+logn:training_length=8": Definition(
        far(lambda d: np.minimum(d, 6)), query_scale=lambda m: np.maximum(1, np.log(m + 1) / np.log(8))
    ),
}
CAUSAL_ONLY = [spec for spec in CASES.values() if get_scheme(spec).causal_only]


def all_pairs():
    return np.ones((LENGTH, LENGTH), dtype=bool)


def triangle_and(start, stop):
    """Causal, but the tokens from `start` to below `stop` see each other."""
    seen = np.tril(all_pairs())
    seen[start:stop, start:stop] = True
    return seen


def as_mask(seen):
    return torch.from_numpy(seen)[None, None]


WAYS = {
    "config": (all_pairs(), {"is_causal": False}, {}),
    "argument": (all_pairs(), {}, {"is_causal": False}),
    "full mask": (all_pairs(), {}, {"attention_mask": as_mask(all_pairs())}),
    "prefix": (triangle_and(0, 17), {}, {"attention_mask": as_mask(triangle_and(0, 17))}),
    "block": (
        triangle_and(9, 30),
        {},
        {"attention_mask": torch.where(as_mask(triangle_and(9, 30)), 0.0, torch.finfo(torch.float32).min)},
    ),
}


@pytest.mark.parametrize("spec", MIRRORED)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("attention", ["auto", "oracle", "segmented"])
def test_later_tokens_are_seen_at_negative_distances(spec, way, attention):
    seen, config, inputs = WAYS[way]
    model, ids = build("llama", **config), tokens(LENGTH)
    expected = defined_logits(model, ids, MIRRORED[spec], seen=seen)
    with patch(model, spec, attention=attention):
        assert_close(logits(model, ids, **inputs).double(), expected)


@pytest.mark.parametrize("spec", MIRRORED)
@pytest.mark.parametrize("attention", ["auto", "oracle"])
def test_a_chunk_behind_a_cache_may_hold_a_block(llama, spec, attention):
    ids, seen = tokens(LENGTH), triangle_and(CHUNK, CHUNK + 9)
    expected = defined_logits(llama, ids, MIRRORED[spec], seen=seen)
    with patch(llama, spec, attention=attention), torch.no_grad():
        cache = DynamicCache(config=llama.config)
        first = llama(ids[:, :CHUNK], past_key_values=cache).logits
        second = llama(ids[:, CHUNK:], past_key_values=cache, attention_mask=as_mask(seen)[:, :, CHUNK:]).logits
    assert_close(torch.cat([first, second], dim=1).double(), expected)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("padded", ["left", "right"])
def test_rows_of_a_bidirectional_batch_are_the_rows_alone(implementation, padded):
    model = build("llama", is_causal=False, attn_implementation=implementation)
    rows = [tokens(size, seed=size) for size in (13, 40, 29)]
    ids, mask = left_padded([row.flip(1) for row in rows] if padded == "right" else rows)
    ids, mask = (ids.flip(1), mask.flip(1)) if padded == "right" else (ids, mask)
    with patch(model, "rerope:window=6"):
        found = logits(model, ids, attention_mask=mask, position_ids=positions_of(mask))
        for row, alone in enumerate(rows):
            assert_close(found[row][mask[row] > 0], logits(model, alone)[0])


def test_documents_of_a_bidirectional_row_see_each_other_as_in_the_plain_model():
    model, ids = build("llama", is_causal=False), tokens(20)
    positions = torch.cat([torch.arange(9), torch.arange(11)])[None]
    expected = logits(model, ids, position_ids=positions)
    with patch(model, "rerope:window=100"):
        assert_close(logits(model, ids, position_ids=positions), expected)


@pytest.mark.parametrize("spec", CAUSAL_ONLY)
def test_a_scheme_without_a_meaning_for_later_tokens_is_refused(llama, spec):
    bidirectional, ids = build("llama", is_causal=False), tokens(8)
    if spec != CASES["alibi"]:  # which becomes symmetric there
        with pytest.raises(UnsupportedModel, match=f"sees both directions, but {spec.partition(':')[0]}"):
            patch(bidirectional, spec)
    causal = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    with patch(llama, spec):
        expected = logits(llama, ids)
        for mask in (causal, torch.zeros(causal.shape).masked_fill(~causal, -1e4)):
            assert_close(logits(llama, ids, attention_mask=mask), expected)
        for inputs in ({"attention_mask": torch.ones_like(causal)}, {"is_causal": False}):
            with pytest.raises(UnsupportedPositions, match=f"{spec.partition(':')[0]}.* keys after the query"):
                logits(llama, ids, **inputs)
        assert_close(cached_logits(llama, ids, [5, 1, 1, 1]), expected)


def test_a_compiled_causal_model_notices_a_mask_of_later_tokens():
    llama = build(num_hidden_layers=1)
    ids = tokens(8)
    causal = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    with patch(llama, "rerope:window=4"):
        expected = logits(llama, ids)
        compiled = torch.compile(llama, backend="eager", fullgraph=True)
        assert_close(logits(compiled, ids, attention_mask=causal), expected)
        with pytest.raises(RuntimeError, match="keys after the query; run eagerly"):
            logits(compiled, ids, attention_mask=torch.ones_like(causal))


# --- images of Gemma 3, whose tokens see each other ----------------------------------------------------------------


@pytest.fixture(scope="module")
def gemma3():
    text = {
        **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32, "sliding_window": 16},
        **{"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16, "pad_token_id": 0},
    }
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 8, "patch_size": 4}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return from_config(config, AutoModelForImageTextToText)


@pytest.mark.parametrize("attention", ["auto", "oracle"])
@pytest.mark.parametrize("window", [4, 40])
def test_an_image_may_be_wider_than_the_window(gemma3, attention, window):
    ids = tokens(20) % 90 + 1
    image = torch.zeros(1, 20, dtype=torch.long)
    image[:, 4:14] = 1
    seen = as_mask(triangle_and(4, 14)[:20, :20])
    slots = torch.arange(20)
    masks = {"full_attention": seen, "sliding_attention": seen & ((slots[:, None] - slots) < 16)}
    plain = logits(gemma3, ids, token_type_ids=image)
    with patch(gemma3, "rerope", window=window, attention=attention):
        found = logits(gemma3, ids, token_type_ids=image)
        text = gemma3.model.language_model(ids, attention_mask=masks, use_cache=False)
    assert_close(found, gemma3.lm_head(text.last_hidden_state))
    assert ((found - plain).abs().max() < 1e-5) == (window == 40)


def test_a_scheme_without_a_meaning_inside_an_image_is_refused(gemma3):
    ids, image = tokens(12) % 90 + 1, torch.ones(1, 12, dtype=torch.long)
    with patch(gemma3, "fox"), pytest.raises(UnsupportedPositions, match=r"fox.* keys after the query"):
        logits(gemma3, ids, token_type_ids=image)
