"""Caches, pads, packed rows and generation: all of them ways to the same logits."""

import copy
import itertools

import peft
import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from rope_patch import UnsupportedPositions, get_scheme, patch
from rope_patch.attention.executors import joined, masked, one_rotation, traced
from rope_patch.mounting import hooks
from tests.cases import ALL, REPRESENTATIVE, ROUTES
from tests.families import FAMILIES, FOLLOWING, LLAMA_AND_SCALED, PACKED_ROWS_MIX, RUN, SCALED, TRAINING_LENGTH, build
from tests.runs import (
    assert_close,
    cached_logits,
    generated,
    greedy,
    left_padded,
    logits,
    positions_of,
    tokens,
    usable_length,
)

families = pytest.mark.parametrize("family", RUN)
representative = pytest.mark.parametrize("spec", REPRESENTATIVE)
llama_and_scaled = pytest.mark.parametrize(("family", "spec"), LLAMA_AND_SCALED)

# of the checkpoint, where a scheme places keys anew and leaves the frequencies: they are then those of each row
LENGTH_DEPENDENT = [
    (family, spec)
    for family, spec in LLAMA_AND_SCALED
    if get_scheme(spec).length_dependent
    or (family in FOLLOWING and "segments" in get_scheme(spec).slots and "frequencies" not in get_scheme(spec).slots)
]
length_dependent = pytest.mark.parametrize(("family", "spec"), LENGTH_DEPENDENT)


def prompt_length(model, spec: str, new_tokens: int = 3) -> int:
    return usable_length(model, spec) - new_tokens


def chunks(ids):
    return [17, 1, 1, 9, ids.shape[1] - 28]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("spec", ALL)
@pytest.mark.parametrize(
    ("mount", "attention"),
    [("auto", "auto"), ("late", "oracle"), ("late", "auto"), ("late", "chunked"), ("late", "segmented")],
)
def test_chunked_prefill_equals_the_full_forward(llama, spec, mount, attention):
    ids = tokens(usable_length(llama, spec), rows=2)
    with patch(llama, spec, mount=mount, attention=attention):
        # gates of CoPE add up rounding along a row
        assert_close(cached_logits(llama, ids, chunks(ids)), logits(llama, ids), 4e-5)


@llama_and_scaled
def test_a_cache_that_the_model_makes_itself_is_read_on(model, spec):
    ids = tokens(usable_length(model, spec), rows=2)
    with patch(model, spec), torch.no_grad():
        start = model(ids[:, :20])
        rest = model(ids[:, 20:], past_key_values=start.past_key_values)
        assert_close(torch.cat([start.logits, rest.logits], dim=1), logits(model, ids))


@families
@representative
def test_every_cache_gives_the_logits_of_the_full_forward(model, spec):
    ids = tokens(usable_length(model, spec), rows=2)
    with patch(model, spec):
        expected = logits(model, ids)
        # 2.8e-5 under CoPE on one family
        assert_close(cached_logits(model, ids, chunks(ids)), expected, 4e-5, "dynamic")
        static = StaticCache(config=model.config, max_cache_len=ids.shape[1] + 5)
        assert_close(cached_logits(model, ids, [ids.shape[1] - 2, 1, 1], cache=static), expected, by="static")


@families
@representative
def test_generate_equals_decoding_without_a_cache(model, spec):
    ids = tokens(prompt_length(model, spec))
    with patch(model, spec):
        expected = greedy(model, ids)
        assert torch.equal(generated(model, ids), expected)
        assert torch.equal(generated(model, ids, use_cache=False), expected)
        assert torch.equal(generated(model, ids, cache_implementation="static"), expected)


@families
@representative
def test_left_pads_are_invisible(model, spec):
    rows = [tokens(length, seed=length) for length in (usable_length(model, spec), 23, 9)]
    batch, mask = left_padded(rows)
    with patch(model, spec):
        found = logits(model, batch, attention_mask=mask, position_ids=positions_of(mask))
        by_cache = cached_logits(model, batch, [7, 12, 1, batch.shape[1] - 20], mask)
        for index, row in enumerate(rows):
            length = row.shape[1]
            expected = logits(model, row)
            assert_close(found[index : index + 1, -length:], expected)
            assert_close(by_cache[index : index + 1, -length:], expected)


@families
@representative
def test_generate_on_a_left_padded_batch_equals_its_rows(model, spec):
    rows = [tokens(length, seed=length) for length in (prompt_length(model, spec), 20, 8)]
    batch, mask = left_padded(rows)
    with patch(model, spec):
        expected = torch.cat([generated(model, row) for row in rows])
        assert torch.equal(generated(model, batch, attention_mask=mask), expected)
        assert torch.equal(generated(model, batch, attention_mask=mask, cache_implementation="static"), expected)


@pytest.mark.parametrize(
    ("architecture", "scheme"), [("cwm", "xpos:scale_base=8+rerope:window=6"), ("mistral", "rnn:width=16")]
)
def test_a_static_cache_that_slides_has_slots_of_its_own(architecture, scheme):
    model = build(architecture)
    batch, mask = left_padded([tokens(40), tokens(20)])
    with patch(model, scheme):
        found = generated(model, batch, attention_mask=mask, cache_implementation="static")
        assert torch.equal(found, generated(model, batch, attention_mask=mask))


@llama_and_scaled
def test_beam_search_with_a_cache_equals_beam_search_without(model, spec):
    rows = [tokens(length, seed=length) for length in (prompt_length(model, spec), 13)]
    batch, mask = left_padded(rows)
    with patch(model, spec):
        found = generated(model, batch, attention_mask=mask, num_beams=3)
        assert torch.equal(found, generated(model, batch, attention_mask=mask, num_beams=3, use_cache=False))


def packed_and_separate(model):
    documents = [tokens(length, seed=length) for length in (13, 19, 8)]
    positions = torch.cat([torch.arange(document.shape[1]) for document in documents])[None]
    separate = torch.cat([logits(model, document) for document in documents], dim=1)
    return logits(model, torch.cat(documents, dim=1), position_ids=positions), separate


@pytest.mark.parametrize("family", [family for family in RUN if family not in PACKED_ROWS_MIX])
@representative
def test_packed_rows_equal_separate_forwards(model, spec):
    with patch(model, spec):
        assert_close(*packed_and_separate(model))


@pytest.mark.parametrize("family", sorted(PACKED_ROWS_MIX))
def test_where_packed_rows_mix_they_do_so_unpatched(model):
    packed, separate = packed_and_separate(model)
    assert (packed - separate).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["llama", "qwen3", "smollm3", *SCALED])
@pytest.mark.parametrize("spec", ROUTES)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_every_attention_implementation_gives_the_same(model, spec, implementation):
    batch, mask = left_padded([tokens(), tokens(21)])
    inputs = {"attention_mask": mask, "position_ids": positions_of(mask)}
    with patch(model, spec):
        expected = logits(model, batch, **inputs)[mask.bool()]
        model.set_attn_implementation(implementation)
        assert_close(logits(model, batch, **inputs)[mask.bool()], expected)


@length_dependent
def test_decoding_under_frequencies_that_follow_the_length_equals_recomputation_in_one_layer(family, spec):
    # in deeper models old hidden states were made under the frequencies of their time
    kinds = {"layer_types": ["full_attention"]} if "layer_types" in FAMILIES[family] else {}
    model, ids = build(family, num_hidden_layers=1, **kinds), tokens()
    with patch(model, spec):
        steps = cached_logits(model, ids, [1] * ids.shape[1])
        for stop in (TRAINING_LENGTH, TRAINING_LENGTH + 1, ids.shape[1]):
            assert_close(steps[:, stop - 1], logits(model, ids[:, :stop])[:, -1])
        cache, sizes = (
            StaticCache(config=model.config, max_cache_len=ids.shape[1] + 5),
            [20, 10, 5, 1, ids.shape[1] - 36],
        )
        chunks = cached_logits(model, ids, sizes, cache=cache)
        for size, stop in zip(sizes, itertools.accumulate(sizes), strict=True):
            assert_close(chunks[:, stop - size : stop], logits(model, ids[:, :stop])[:, -size:])


@llama_and_scaled
def test_a_call_does_not_depend_on_the_calls_before(model, spec):
    with patch(model, spec):
        expected = logits(model, tokens(20))
        logits(model, tokens(100, rows=3))
        generated(model, tokens(40), 3)
        assert torch.equal(logits(model, tokens(20)), expected)


@pytest.mark.parametrize("spec", ALL)
def test_positions_changed_in_place_are_read_again(llama, spec):
    positions = torch.arange(tokens().shape[1])[None]
    # without a mask, positions that skip would be read as packed rows of one token each
    mask = torch.ones_like(positions)
    with patch(llama, spec):
        expected = logits(llama, tokens(), position_ids=2 * positions, attention_mask=mask)
        logits(llama, tokens(), position_ids=positions, attention_mask=mask)
        positions.mul_(2)
        assert torch.equal(logits(llama, tokens(), position_ids=positions, attention_mask=mask), expected)


@pytest.mark.parametrize("spec", ["rerope:window=6", "logn:training_length=8", "alibi"])
def test_a_cache_that_was_filled_without_the_patch_or_under_another_is_refused(llama, spec):
    before, other = DynamicCache(), DynamicCache()
    cached_logits(llama, tokens(8), [8], cache=before)
    with patch(llama, "dca", chunk_size=9):
        cached_logits(llama, tokens(8), [8], cache=other)
    with patch(llama, spec):
        with pytest.raises(UnsupportedPositions, match="8 tokens with keys written without a patch or by prefix"):
            cached_logits(llama, tokens(4), [4], cache=before)
        with pytest.raises(UnsupportedPositions, match="written under dca:chunk_size=9"):
            cached_logits(llama, tokens(4), [4], cache=other)
        own = DynamicCache()
        cached_logits(llama, tokens(8), [8], cache=own)
        expected = cached_logits(llama, tokens(4, seed=1), [4], cache=copy.deepcopy(own))
        assert torch.equal(cached_logits(llama, tokens(4, seed=1), [4], cache=own), expected)


@pytest.mark.parametrize("first", ["prefix", "patch"])
def test_prefix_tuning_is_refused_and_prompt_tuning_is_not(llama, first):
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    if first == "patch":
        patch(llama, "rerope", window=6)
    model = peft.get_peft_model(llama, prefix)
    if first == "prefix":
        patch(model, "rerope", window=6)
    with pytest.raises(UnsupportedPositions, match="4 tokens with keys written without a patch or by prefix"):
        model(tokens(8))
    prompt = peft.get_peft_model(build(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with patch(prompt, "rerope", window=6):
        assert prompt(tokens(8)).logits.shape == (1, 12, 97)


def by_one_rotation(problem):
    """Compute a call by `one_rotation` if it takes the call in a compiled model, and by `traced` if not."""
    compiled = problem.replaced(compiling=True)
    return traced.attend(problem) if one_rotation.supports(compiled) else one_rotation.attend(problem)


# products as on a CPU, sums as on a GPU
@pytest.mark.parametrize("by", ["products", "sums", "one rotation"])
@pytest.mark.parametrize("spec", [spec for spec in ALL if not get_scheme(spec).decays])
def test_a_decoding_step_in_one_graph_equals_one_by_slices(llama, spec, by, monkeypatch):
    rows = [tokens(length, seed=length) for length in (usable_length(llama, spec), 23)]
    batch, mask = left_padded(rows)
    sizes = [batch.shape[1] - 2, 1, 1]
    with patch(llama, spec):
        expected = cached_logits(llama, batch, sizes, mask)
        for executor in (joined.EXECUTOR, masked.EXECUTOR):
            monkeypatch.setitem(vars(executor), "attend", by_one_rotation if by == "one rotation" else traced.attend)
        monkeypatch.setattr(joined, "is_block", lambda *_: False)
        monkeypatch.setattr(traced, "_compiles_sums", lambda _: by == "sums")
        found = cached_logits(llama, batch, sizes, mask)
        static = StaticCache(config=llama.config, max_cache_len=batch.shape[1] + 5)
        in_static = cached_logits(llama, batch, sizes, mask, static)
    assert_close(found[mask.bool()], expected[mask.bool()])
    assert_close(in_static[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("by", ["products", "sums", "one rotation"])
def test_regions_of_a_whole_cache_share_one_softmax_in_a_graph(llama, by, monkeypatch):
    test_a_decoding_step_in_one_graph_equals_one_by_slices(llama, "dca:chunk_size=9,local_window=2", by, monkeypatch)


@pytest.mark.parametrize("kind", ["left pads", "right pads", "packed"])
@pytest.mark.parametrize("spec", ["rerope:window=6", "dca:chunk_size=9,local_window=2", "alibi", "xpos:scale_base=8"])
def test_no_mask_of_all_pairs_is_made_for_pads_and_documents(llama, spec, kind, monkeypatch):
    ids = tokens(rows=2)
    positions = torch.cat([torch.arange(25), torch.arange(15)]).expand(2, -1)
    inputs = {"position_ids": positions}
    if kind != "packed":
        mask = torch.ones_like(ids)
        mask[1, slice(0, 9) if kind == "left pads" else slice(-9, None)] = 0
        inputs = {"attention_mask": mask, "position_ids": positions_of(mask)}
    kept = inputs.get("attention_mask", torch.ones_like(ids)).bool()
    materialised = patch(llama, spec)
    monkeypatch.setattr(hooks, "groups_of_row", lambda *_: None)
    expected = logits(llama, ids, **inputs)
    monkeypatch.undo()

    def no_mask(*_, **__):
        raise AssertionError("a mask was made")

    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa", no_mask)
    for attention in ("auto", "segmented", "oracle"):
        materialised.remove()
        materialised = patch(llama, spec, attention=attention)
        assert_close(logits(llama, ids, **inputs)[kept], expected[kept])


@length_dependent
@pytest.mark.parametrize("attention", ["auto", "oracle"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_rows_of_a_batch_do_not_lengthen_each_other(model, spec, attention, implementation):
    model.set_attn_implementation(implementation)
    rows = [tokens(length, seed=length) for length in (3 * TRAINING_LENGTH, TRAINING_LENGTH + 9, 7)]
    with patch(model, spec, attention=attention):
        expected = [logits(model, row) for row in rows]
        # pads on the right, and no positions given: every row counts to the end of the longest
        batch = torch.zeros(3, 3 * TRAINING_LENGTH, dtype=torch.long)
        for place, row in zip(batch, rows, strict=True):
            place[: row.shape[1]] = row[0]
        found = logits(model, batch, attention_mask=(batch != 0).long())
        for one, other in zip(found, expected, strict=True):
            assert_close(one[None, : other.shape[1]], other)


@length_dependent
def test_rows_are_continued_as_they_are_alone_beyond_the_training_length(model, spec):
    rows = [tokens(length, seed=length) for length in (TRAINING_LENGTH + 8, TRAINING_LENGTH - 3, 8)]
    batch, mask = left_padded(rows)
    with patch(model, spec):
        found = generated(model, batch, 6, attention_mask=mask)
        for index, row in enumerate(rows):
            assert torch.equal(found[index : index + 1], generated(model, row, 6))
