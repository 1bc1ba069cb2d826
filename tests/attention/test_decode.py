"""Few queries after a long cache: equal to the definition, and never by way of it."""

import math

import pytest
import torch
from transformers import DynamicCache

from rope_patch import patch
from rope_patch.attention.executors import joined, reference
from rope_patch.attention.executors.joined import SlotPlan, SlotRows, Term
from rope_patch.attention.pieces import Piece, Tile
from rope_patch.attention.problem import Problem
from rope_patch.attention.rotation import EVERY
from rope_patch.attention.terms import DistanceBias
from tests.attention.problems import whole
from tests.executors import executors_of
from tests.families import TRAINING_LENGTH, build
from tests.models import t5_families
from tests.runs import assert_close, cached_logits, left_padded, positions_of, tokens

SPECS = [
    "rerope:window=6",
    "leaky_rerope:window=6,factor=4",
    "self_extend:group_size=4,window=7",
    "dca:chunk_size=9,local_window=2",
    "lm_infinite:local_window=7,n_global=3",
    "string:shift=10,window=4",
    "yarn:factor=4+rerope:window=6",
    "xpos:scale_base=8",
    "xpos:scale_base=8+rerope:window=6",
    "alibi",
    "alibi+window:window=7",
    "t5:per_layer=true",
    "fox",
    "dca:chunk_size=9,local_window=2+alibi",
    "dca:chunk_size=9,local_window=2+fox:horizon=4,initial_std=0.3",
]
SEVERAL = [spec for spec in SPECS if "xpos" not in spec]
"""Those whose blocks of queries are scored like one."""


def steps(model, lengths, sizes, executors=None):
    """Logits of the last tokens, in steps of these sizes after a prefill, and those of a forward without a cache. Only
    these `executors` may score the steps; by default any.
    """
    batch, mask = left_padded([tokens(length, seed=length) for length in lengths])
    positions, start = positions_of(mask), batch.shape[1] - sum(sizes)
    expected = model(batch, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, start:]
    cache, found = DynamicCache(config=model.config), []
    for size in (start, *sizes):
        stop = cache.get_seq_length() + size
        part = slice(stop - size, stop)
        given = {"attention_mask": mask[:, :stop], "position_ids": positions[:, part]}
        with executors_of(model) as taken:
            found.append(model(batch[:, part], past_key_values=cache, **given).logits)
        assert executors is None or size == start or {*taken} <= executors
    return torch.cat(found[1:], dim=1), expected


@pytest.mark.parametrize("lengths", [(47,), (47, 47, 30), (33, 47, 40)], ids=str)
@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_one_query_after_rows_of_any_length(spec, lengths, monkeypatch):
    monkeypatch.setattr(joined, "BLOCK", 5 * 4 * 64)  # a few keys
    model = build("llama")
    patch(model, spec)
    assert_close(*steps(model, lengths, [1, 1, 1], {"joined", "masked"}))


@pytest.mark.parametrize(
    "spec", ["dynamic_ntk:factor=2", "dynamic_yarn:factor=2", "dynamic_yarn:factor=2+dca:chunk_size=9,local_window=2"]
)
@torch.no_grad()
def test_keys_that_turn_anew_at_every_length_do_so_a_few_at_a_time(spec, monkeypatch):
    monkeypatch.setattr(joined, "BLOCK", 5 * 4 * 64)
    found = []
    for attention in ("auto", "oracle"):
        model = build("llama")
        patch(model, spec, attention=attention)
        batch, mask = left_padded([tokens(47), tokens(40)])
        found.append(cached_logits(model, batch, [44, 1, 1, 1], mask)[mask.bool()])
    assert_close(*found)


@pytest.mark.parametrize("sizes", [[2, 1, 5], [31], [8, 3]], ids=str)
@pytest.mark.parametrize("lengths", [(83,), (83, 71, 83)], ids=str)
@pytest.mark.parametrize("spec", SEVERAL)
@torch.no_grad()
def test_some_queries_at_once_as_assisted_decoding_has_them(spec, lengths, sizes):
    model = build("llama")
    patch(model, spec)
    assert_close(*steps(model, lengths, sizes, {"joined", "masked"}))


@pytest.mark.parametrize("family", ["mistral", "gemma2", "cohere", "phi", "gpt_neox"])
@pytest.mark.parametrize("sizes", [[1, 1], [7]], ids=str)
@torch.no_grad()
def test_families_with_windows_of_their_own_and_other_layouts(family, sizes):
    model = build(family)
    patch(model, "rerope", window=6)
    assert_close(*steps(model, (TRAINING_LENGTH + 9, 30), sizes))


@pytest.mark.parametrize("sizes", [[1, 1], [6]], ids=str)
@pytest.mark.parametrize("spec", ["rerope:window=6", "dca:chunk_size=9,local_window=2", "alibi", "xpos:scale_base=8"])
@torch.no_grad()
def test_half_precision_keeps_scores_in_float32(spec, sizes):
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        model = build("llama")
        for parameter in model.parameters():  # and not the frequencies
            parameter.data = parameter.bfloat16().to(dtype)
        patch(model, spec)
        found.append(steps(model, (47, 40), sizes)[0].float())
    assert_close(*found, tolerance=0.03 * float(found[1].abs().max()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_that_half_precision_does_not_hold_are_kept_in_float32(dtype):
    """Differences of 1/8 between scores of 200,000, which float16 has no number for. All states are exact."""
    query, key = torch.full((1, 2, 1, 16), 256.0), torch.full((1, 1, 6, 16), 200.0)
    query[..., 0], key[..., 0] = 1, torch.arange(6)
    value = torch.randn(1, 1, 6, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    slots, tile = (slice(0, 4), slice(4, 6)), Tile(0, 1, 0, 1)
    terms = tuple(Term(Piece(EVERY, 0, slice(0, 1), some, tile), None, None) for some in slots)
    plan = SlotPlan(lambda queries: (queries[:, :, 0].mT,), (SlotRows(EVERY, terms),), 0.125)
    found = plan.attend(query.to(dtype), key.to(dtype), value)
    expected = (query.double() @ key.double().mT * 0.125).softmax(-1) @ value.double()
    assert found.dtype == dtype
    assert_close(found.double(), expected, 4 * torch.finfo(dtype).eps)


@torch.no_grad()
def test_queries_that_skip_positions_are_scored_by_positions():
    model = build("llama")
    patch(model, "rerope", window=6)
    ids, positions = tokens(40), torch.cat([torch.arange(36), torch.tensor([36, 37, 50, 51])])[None]
    one_text = torch.ones_like(ids)  # and no packed documents
    expected = model(ids, attention_mask=one_text, position_ids=positions, use_cache=False).logits[:, 36:]
    cache = DynamicCache(config=model.config)
    model(ids[:, :36], position_ids=positions[:, :36], past_key_values=cache)
    given = {"attention_mask": one_text, "position_ids": positions[:, 36:]}
    with executors_of(model) as taken:
        found = model(ids[:, 36:], past_key_values=cache, **given).logits
    assert set(taken) == {"chunked"}
    assert_close(found, expected)


@pytest.mark.parametrize("length", [1, 2, 7])
@torch.no_grad()
def test_a_text_that_is_too_short_for_the_regions_after_each_token(length):
    found = []
    for attention in ("auto", "oracle"):
        model = t5_families.build("t5")
        patch(model, "string:shift=9,window=3", attention=attention)
        ids = tokens(length)
        found.append(model(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits)
    assert_close(*found)


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", ["", "left pads"])
def test_a_token_from_which_a_bias_hides_all_keys_gets_zeros(queries, dtype, rows):
    hidden, length = DistanceBias(lambda distance: torch.where(distance > 4, -1.0, -math.inf)[None]), 6
    positions = torch.arange(length).expand(2, -1)
    query, key, value = (torch.randn(2, heads, n, 8).to(dtype) for heads, n in ((4, queries), (2, length), (2, length)))
    groups = torch.tensor([[0] * length, [-1, *[0] * (length - 1)]]) if rows else None
    problem = Problem((), value, positions[:, -queries:], positions, None, queries > 1, length - queries, 0.3, hidden)
    problem = whole(problem, query, key, groups=groups)
    assert not joined.supports(problem)
    found = joined.attend(problem)[0]
    torch.testing.assert_close(found, reference.attend(problem)[0], atol=1e-2, rtol=1e-2)
    sees = [row for row in range(2) if not (row and rows)]
    assert found[sees, :, -1].abs().amin() > 0  # the last query sees the first key, where it is no pad
    found[sees, :, -1] = 0
    assert not found.any()
