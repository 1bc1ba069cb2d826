"""Where a mask shows left pads and no `position_ids` are given, tokens are counted and pads are not."""

import itertools

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, DynamicCache, StaticCache

from rope_patch import get_scheme, patch
from tests.cases import CASES, COMPOSITIONS, REPRESENTATIVE, VARIANTS
from tests.families import FOLLOWING, LLAMA_AND_SCALED, RUN, build, config_of, from_config
from tests.runs import LENGTH, assert_close, generated, left_padded, logits, positions_of, tokens, usable_length

READING = [
    CASES[name]
    for name in (
        *("self_extend", "dca", "lm_infinite", "logn", "ssmax", "info_scale", "inkling"),
        *("dynamic_ntk", "dynamic_yarn", "fire", "sinusoidal", "rnn"),
    )
] + [*COMPOSITIONS[:1], "layers:[0=logn:training_length=8;rest=nope]"]
"""Schemes that read the position of a token, or the length of its row, and not distances alone."""

STATIC = [CASES[name] for name in ("yarn", "ntk", "clip")]

reading = pytest.mark.parametrize("spec", READING)


def rows_of(longest=LENGTH, *others):
    """Texts of several lengths, as one batch with pads on the left, and its mask."""
    rows = [tokens(longest, seed=1), *(tokens(length, seed=length) for length in others or (23, 9))]
    return rows, *left_padded(rows)


def by_mask(model, ids, mask, sizes, cache=None):
    """Forwards of `sizes` tokens each that share a cache, with the mask of all tokens up to the last."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    found, start = [], 0
    with torch.no_grad():
        for stop in itertools.accumulate(sizes):
            part = model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache)
            found.append(part.logits)
            start = stop
    assert start == ids.shape[1]
    return torch.cat(found, dim=1)


def assert_rows(found, rows, expected, tolerance=2e-5, by=""):
    for index, (row, wanted) in enumerate(zip(rows, expected, strict=True)):
        assert_close(found[index : index + 1, -row.shape[1] :], wanted, tolerance, by)


def assert_pads_change_nothing(model, spec, mount="auto"):
    longest = usable_length(model, spec)
    with patch(model, spec, mount=mount) as handle:
        # rows have a length each, even where a cache cannot go on from one to the next
        rows, batch, mask = rows_of(LENGTH if handle.scheme.length_dependent else longest)
        expected = [logits(model, row) for row in rows]
        assert_rows(logits(model, batch, attention_mask=mask), rows, expected, by="one forward")
        rows, batch, mask = rows_of(longest)
        expected = [logits(model, row) for row in rows]
        # gates of CoPE add up rounding along a row
        by_cache = by_mask(model, batch, mask, [7, 12, 1, 1, longest - 21])
        assert_rows(by_cache, rows, expected, 4e-5, "dynamic cache")
        static = StaticCache(config=model.config, max_cache_len=longest + 5)
        assert_rows(by_mask(model, batch, mask, [longest - 2, 1, 1], static), rows, expected, by="static cache")


@pytest.mark.parametrize("spec", [spec for spec in CASES.values() if spec not in REPRESENTATIVE])
def test_under_every_other_scheme(llama, spec):
    assert_pads_change_nothing(llama, spec)


@pytest.mark.parametrize("family", RUN)
@pytest.mark.parametrize("spec", REPRESENTATIVE)
def test_on_every_family(model, spec):
    assert_pads_change_nothing(model, spec)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("spec", [*CASES.values(), *COMPOSITIONS, *VARIANTS])
def test_under_the_late_mount(llama, spec):
    assert_pads_change_nothing(llama, spec, mount="late")


@pytest.mark.parametrize("family", FOLLOWING)
@pytest.mark.parametrize("spec", ["logn:training_length=8", "rerope:window=6", "alibi", "window:window=7"])
def test_where_the_checkpoints_own_frequencies_follow_the_length(model, spec):
    assert_pads_change_nothing(model, spec)


@reading
def test_positions_are_those_of_generate_bit_for_bit(llama, spec):
    _, batch, mask = rows_of()
    with patch(llama, spec):
        found = logits(llama, batch, attention_mask=mask)
        assert torch.equal(found, logits(llama, batch, attention_mask=mask, position_ids=positions_of(mask)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("family", "spec"), LLAMA_AND_SCALED)
def test_without_left_pads_no_bit_changes(model, spec):
    _, batch, mask = rows_of()
    right, slots = mask.flip(-1), torch.arange(batch.shape[1])[None]
    with patch(model, spec):
        plain = logits(model, batch, position_ids=slots)
        assert torch.equal(logits(model, batch), plain)
        assert torch.equal(logits(model, batch, attention_mask=torch.ones_like(mask)), plain)
        expected = logits(model, batch, attention_mask=right, position_ids=slots)
        assert torch.equal(logits(model, batch, attention_mask=right), expected)


@reading
def test_embeddings_in_place_of_ids(llama, spec):
    _, batch, mask = rows_of()
    with patch(llama, spec):
        expected = logits(llama, batch, attention_mask=mask)
        embedded = llama.get_input_embeddings()(batch)
        assert torch.equal(logits(llama, None, inputs_embeds=embedded, attention_mask=mask), expected)


@reading
def test_a_mask_longer_than_the_tokens_of_a_static_cache(llama, spec):
    rows, batch, mask = rows_of(usable_length(llama, spec))
    whole = nn.functional.pad(mask, (0, 5))
    with patch(llama, spec), torch.no_grad():
        cache = StaticCache(config=llama.config, max_cache_len=whole.shape[1])
        parts = [llama(part, attention_mask=whole, past_key_values=cache).logits for part in batch.split(12, dim=1)]
        assert_rows(torch.cat(parts, dim=1), rows, [logits(llama, row) for row in rows])


@pytest.mark.parametrize("spec", [*READING, *STATIC])
def test_pads_on_both_sides_and_between(llama, spec):
    rows, batch, mask = rows_of()
    places = [torch.cat([torch.arange(3), torch.arange(5, 25)]), torch.arange(2, 11)]  # a gap; both sides
    for index, (row, place) in enumerate(zip(rows[1:], places, strict=True), start=1):
        batch[index], mask[index] = 0, 0
        batch[index, place], mask[index, place] = row[0], 1
    with patch(llama, spec):
        found = logits(llama, batch, attention_mask=mask)
        for row, seen, each in zip(rows, mask, found, strict=True):
            assert_close(each[None, seen > 0], logits(llama, row))


def gradients_of(model, ids, mask=None):
    """Gradients of the summed loss of the tokens after the first of each row, none of which a pad predicts."""
    model.zero_grad(set_to_none=True)
    mask = torch.ones_like(ids) if mask is None else mask
    labels = ids.masked_fill(mask.cumsum(dim=-1) * mask < 2, -100)
    model(ids, attention_mask=mask, labels=labels, num_items_in_batch=1, use_cache=False).loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@reading
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_through_checkpointing(llama, spec, reentrant):
    rows, batch, mask = rows_of()
    llama.train()
    with patch(llama, spec):
        alone = [gradients_of(llama, row) for row in rows]
        llama.gradient_checkpointing_enable({"use_reentrant": reentrant})
        llama.enable_input_require_grads()
        found = gradients_of(llama, batch, mask)
        for name, gradient in found.items():
            expected = sum(each[name] for each in alone)
            assert (gradient - expected).norm() < 1e-4 * expected.norm().clamp(min=1e-2), name


@pytest.mark.parametrize("spec", [spec for spec in READING if not get_scheme(spec).breaks_graph])
@pytest.mark.one_in(5)
def test_in_one_graph(spec):
    shallow = build(num_hidden_layers=1)
    rows, batch, mask = rows_of()
    with patch(shallow, spec):
        expected = [logits(shallow, row) for row in rows]
        compiled = torch.compile(shallow, fullgraph=True, backend="eager")
        assert_rows(logits(compiled, batch, attention_mask=mask), rows, expected)
        ones = torch.ones_like(mask)
        assert_close(logits(compiled, batch, attention_mask=ones), logits(shallow, batch))
        right = mask.flip(-1)
        found, wanted = (logits(each, batch, attention_mask=right) for each in (compiled, shallow))
        assert_close(found[right > 0], wanted[right > 0])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("spec", [CASES["logn"], CASES["self_extend"], CASES["rerope"], CASES["dca"]])
def test_compiled_steps_after_a_static_cache(spec):
    shallow = build(num_hidden_layers=1)
    rows, batch, mask = rows_of()
    with patch(shallow, spec), torch.no_grad():
        expected = [logits(shallow, row) for row in rows]
        cache = StaticCache(config=shallow.config, max_cache_len=batch.shape[1] + 3)
        compiled = torch.compile(shallow, fullgraph=True, backend="eager", dynamic=False)
        start = batch.shape[1] - 2
        parts = [shallow(batch[:, :start], attention_mask=mask[:, :start], past_key_values=cache).logits]
        for place in range(start, batch.shape[1]):
            given = {"attention_mask": mask[:, : place + 1], "past_key_values": cache}
            parts.append(compiled(batch[:, place : place + 1], **given).logits)
        assert_rows(torch.cat(parts, dim=1), rows, expected)


@reading
def test_heads_that_score_a_text(spec):
    config = config_of("llama", num_labels=1, pad_token_id=0)
    model = from_config(config, AutoModelForSequenceClassification)
    rows, batch, mask = rows_of()
    with patch(model, spec), torch.no_grad():
        alone = torch.cat([model(row, use_cache=False).logits for row in rows])
        assert_close(model(batch, attention_mask=mask, use_cache=False).logits, alone)
        states = model.base_model(batch, attention_mask=mask).last_hidden_state[:, -1]  # an embedding of a text
        assert_close(states, torch.cat([model.base_model(row).last_hidden_state[:, -1] for row in rows]))


@pytest.mark.parametrize("spec", [*READING, *STATIC])
def test_tokens_of_prompt_tuning_before_the_pads(llama, spec):
    rows, batch, mask = rows_of()
    with patch(llama, spec):
        prompted = peft.get_peft_model(llama, peft.PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=4)).eval()
        expected = [logits(prompted, row, attention_mask=torch.ones_like(row)) for row in rows]
        found = logits(prompted, batch, attention_mask=mask)
        for index, (row, wanted) in enumerate(zip(rows, expected, strict=True)):
            assert_close(found[index : index + 1, -row.shape[1] :], wanted[:, 4:])


@pytest.mark.parametrize("spec", [spec for spec in READING if not get_scheme(spec).length_dependent])
def test_the_probabilities_of_a_rollout(llama, spec):
    """`generate` token by token, and a padded forward that is given a mask alone, as trainers compute it."""
    _, batch, mask = rows_of(LENGTH, 20, 8)
    with patch(llama, spec), torch.no_grad():
        rollout = {"max_new_tokens": 6, "do_sample": True, "output_logits": True, "return_dict_in_generate": True}
        drawn = llama.generate(batch, attention_mask=mask, pad_token_id=0, **rollout)
        mask = torch.cat([mask, torch.ones_like(drawn.sequences[:, batch.shape[1] :])], dim=1)
        found = llama(drawn.sequences, attention_mask=mask, logits_to_keep=7, use_cache=False).logits[:, :-1]
        assert_close(found.log_softmax(-1), torch.stack(drawn.logits, dim=1).log_softmax(-1))


@reading
def test_assisted_decoding_of_a_padded_row(llama, spec):
    row = tokens(usable_length(llama, spec) - 8, seed=1)
    batch, mask = left_padded([tokens(row.shape[1] + 5), row])
    with patch(llama, spec):
        found = generated(llama, batch[1:], attention_mask=mask[1:], prompt_lookup_num_tokens=2)
        assert torch.equal(found, generated(llama, row))


@pytest.mark.parametrize("spec", [CASES["logn"], CASES["self_extend"], CASES["rerope"]])
def test_positions_of_yours_are_kept(llama, spec):
    _, batch, mask = rows_of()
    slots = torch.arange(batch.shape[1])[None]
    with patch(llama, spec):
        found = logits(llama, batch, attention_mask=mask, position_ids=slots)
        counted = logits(llama, batch, attention_mask=mask)
        assert (found[2, -9:] - counted[2, -9:]).abs().max() > (1e-4 if spec != CASES["rerope"] else -1)


@pytest.mark.parametrize("spec", [*READING, *STATIC])
def test_steps_with_positions_go_on_from_a_prompt_without(llama, spec):
    rows, batch, mask = rows_of(usable_length(llama, spec))
    positions = positions_of(mask)
    with patch(llama, spec), torch.no_grad():
        cache = llama(batch[:, :-1], attention_mask=mask[:, :-1]).past_key_values
        given = {"attention_mask": mask, "position_ids": positions[:, -1:], "past_key_values": cache}
        found = llama(batch[:, -1:], **given).logits
        assert_close(found, torch.cat([logits(llama, row)[:, -1:] for row in rows]))
