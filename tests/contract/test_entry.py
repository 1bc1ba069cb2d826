"""Positions that join the tokens where they enter: whatever way the tokens come in, the positions are right."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from rope_patch import InvalidField, UnsupportedPositions, describe, get_scheme, patch
from rope_patch.mounting.entry import StateHistory
from tests.cases import ALL
from tests.families import build
from tests.runs import (
    assert_close,
    assert_same_gradients,
    cached_logits,
    generated,
    gradients,
    greedy,
    left_padded,
    logits,
    tokens,
)

ENTERING = [spec for spec in ALL if "embedding" in get_scheme(spec).slots]
entering = pytest.mark.parametrize("spec", ENTERING)


def test_all_kinds_are_among_them():
    assert any(get_scheme(spec).stateful for spec in ENTERING)
    assert any(get_scheme(spec).every_block for spec in ENTERING)


@entering
def test_pads_are_not_counted_where_nobody_says_positions(llama, spec):
    rows = [tokens(length, seed=length) for length in (33, 20, 7)]
    batch, mask = left_padded(rows)
    with patch(llama, spec):
        on_the_left = logits(llama, batch, attention_mask=mask)
        on_the_right = logits(llama, batch.flip(1), attention_mask=mask.flip(1))
        for index, row in enumerate(rows):
            length = row.shape[1]
            assert_close(on_the_left[index : index + 1, -length:], logits(llama, row))
            assert_close(on_the_right[index : index + 1, :length], logits(llama, row.flip(1)))


@entering
def test_packed_documents_begin_anew(llama, spec):
    documents = [tokens(length, seed=length) for length in (9, 14, 5)]
    positions = torch.cat([torch.arange(document.shape[1]) for document in documents])[None]
    with patch(llama, spec):
        found = logits(llama, torch.cat(documents, dim=1), position_ids=positions)
        alone = torch.cat([logits(llama, document) for document in documents], dim=1)
    assert_close(found, alone)


@entering
def test_vectors_are_placed_as_tokens_are(llama, spec):
    vectors = llama.get_input_embeddings()(tokens()).detach()
    with patch(llama, spec):
        if get_scheme(spec).reads_ids:
            with pytest.raises(UnsupportedPositions, match="inputs_embeds"):
                llama(inputs_embeds=vectors)
            return
        with torch.no_grad():
            found = llama(inputs_embeds=vectors, use_cache=False).logits
        assert torch.equal(found, logits(llama, tokens()))
    assert torch.equal(vectors, llama.get_input_embeddings()(tokens()))


@entering
@pytest.mark.parametrize(
    "options",
    [{}, {"use_cache": False}, {"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 3}],
    ids=["dynamic", "none", "static", "assisted"],
)
def test_generation_equals_full_forwards(llama, spec, options):
    ids = torch.cat([tokens(11), tokens(11)], dim=1)  # repeats itself, so that a look-up proposes something
    with patch(llama, spec):
        assert torch.equal(generated(llama, ids, 6, **options), greedy(llama, ids, 6))


@entering
def test_beams_keep_what_belongs_to_them(llama, spec):
    rows = [tokens(length, seed=length) for length in (19, 12)]
    batch, mask = left_padded(rows)
    options = {"attention_mask": mask, "num_beams": 3, "new_tokens": 8}
    with patch(llama, spec):
        cached = generated(llama, batch, **options)
        assert torch.equal(cached, generated(llama, batch, use_cache=False, **options))


@entering
def test_several_sequences_for_one_prompt(llama, spec):
    with patch(llama, spec):
        torch.manual_seed(0)
        sampled = llama.generate(tokens(9), max_new_tokens=5, do_sample=True, num_return_sequences=3)
        assert sampled.shape == (3, 14)


@entering
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(llama, spec, use_reentrant):
    llama.train()
    texts = tokens(rows=2), tokens(27, seed=1)
    with patch(llama, spec):
        expected = gradients(llama, *texts)
        llama.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        assert_same_gradients(gradients(llama, *texts), expected)


@pytest.mark.parametrize("make", [DynamicCache, lambda config: StaticCache(config, max_cache_len=60)])
def test_what_a_recurrent_layer_remembers_travels_in_the_cache(llama, make):
    patch(llama, "rnn", width=16)
    cache = make(config=llama.config)
    cached_logits(llama, tokens(rows=2), [30, 10], cache=cache)
    (history,) = [layer for layer in cache.layers if isinstance(layer, StateHistory)]
    assert len(cache.layers) == llama.config.num_hidden_layers + 1
    assert history.keys.shape == (2, 1, 40, 16)
    assert int(cache.get_seq_length()) == 40
    with torch.no_grad():
        created = llama(tokens(), use_cache=True).past_key_values
    assert [type(layer) for layer in created.layers].count(StateHistory) == 1


def test_a_cache_that_makes_its_layers_as_they_come(llama):
    patch(llama, "rnn", width=16)
    expected = logits(llama, tokens())
    assert_close(cached_logits(llama, tokens(), [20, 1, 19], cache=DynamicCache()), expected)


@pytest.mark.parametrize("spec", ["learned", "hierarchical:num_positions=40", "multiplicative"])
def test_positions_past_the_last_row_are_refused_by_number(llama, spec):
    rows = 40 if "40" in spec else 32
    with patch(llama, spec):
        logits(llama, tokens(rows))
        with pytest.raises(UnsupportedPositions, match=f"position {rows} has no vector; there are {rows}"):
            logits(llama, tokens(rows + 1))


def test_rows_are_not_kept_where_there_are_none():
    model = build()
    with pytest.raises(InvalidField, match="extend"):
        patch(model, "learned", extend=64)
    assert torch.equal(logits(model, tokens()), logits(build(), tokens()))


def test_describe_says_what_stands_in_place_of_the_rotation(llama):
    with patch(llama, "sinusoidal"):
        table = describe(llama)
    assert "mounted rotary + embedding" in table
    assert "replaced by positions added at the input" in table
    with patch(llama, "rope+sinusoidal"):
        assert "replaced" not in describe(llama)
