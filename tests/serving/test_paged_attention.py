"""New tokens and parts of prompts over a paged cache, and each request alone by the attention of Transformers."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import rope_patch
from rope_patch.attention.forward import Forward
from rope_patch.mounting.forward_call import ForwardCall
from rope_patch.mounting.scoring import late_attention
from rope_patch.saving.loading import default_checkpoint
from rope_patch.schemes.tools.positions import UNROTATED
from rope_patch.schemes.tools.rotary import rotation_tables
from rope_patch.serving import paged_attention
from rope_patch.serving.paged_attention import Attention, Batch, anchor_of, held, written

SIZE, HEADS, KV_HEADS = 16, 4, 2
LENGTHS = [5, 1, 130, 24, 25, 70, 16, 61]


def layer_under(spec, model=None):
    model = model or AutoModelForCausalLM.from_pretrained(default_checkpoint(), dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rope_patch.RopePatchWarning)
        return rope_patch.patch(model, spec, mount="late").layer_states[0], model


def anchored(state, x, positions):
    """States `(tokens, heads, head_dim)` as the cache holds them."""
    anchor = anchor_of(state)
    if anchor == UNROTATED:
        return x
    frequencies = state.source.of_scheme(None, x.device)
    cos, sin = rotation_tables(anchor(positions)[None], frequencies.inv_freq, 1.0, x.dtype)
    return state.layer.layout.rotate(x.transpose(0, 1)[None], cos, sin)[0].transpose(0, 1)


def cached(state, head_dim, dtype=torch.float32):
    """A cache with texts of these lengths in blocks at random places; its table, and keys and values of each text."""
    torch.manual_seed(0)
    counts = [-(-length // SIZE) for length in LENGTHS]
    order = torch.randperm(sum(counts) + 3)
    table = torch.full((len(LENGTHS), max(counts) + 1), int(order[-1]), dtype=torch.int32)
    for row, (own, count) in enumerate(zip(order.split([*counts, 3]), counts, strict=False)):
        table[row, :count] = own
    cache = torch.randn(len(order), KV_HEADS, 2, SIZE, head_dim, dtype=dtype)
    plain = [torch.randn(2, length, KV_HEADS, head_dim) for length in LENGTHS]
    for row, (length, (keys, values)) in enumerate(zip(LENGTHS, plain, strict=True)):
        n = torch.arange(length)
        slots = table[row].long()[n // SIZE] * SIZE + n % SIZE
        written(cache, anchored(state, keys, n), values, slots)
        found = held(cache, table[row, : counts[row]].long(), length)[1][0].transpose(0, 1)
        torch.testing.assert_close(found, values.to(dtype))
    return cache, table, plain


def alone(state, query, keys, values, softcap, sinks):
    """The attention of the last tokens of a text, query `(tokens, heads, head_dim)`."""
    length, start = len(keys), len(keys) - len(query)
    states, positions = query.transpose(0, 1)[None], torch.arange(start, length)[None]
    call = ForwardCall(state, Forward(), states, positions, start, kv_length=length, is_request=True)
    module = torch.nn.Module()
    module.is_causal = True
    arguments = {"softcap": softcap or None, "s_aux": sinks, "rope_patch": call}
    kv = (x.transpose(0, 1)[None] for x in (keys, values))
    return late_attention(module, states, *kv, None, **arguments)[0][0]


SEGMENTS = [
    *("rerope:window=24", "rerope:window=24+logn:training_length=32", "rerope:window=1", "rerope:window=500"),
    *("leaky_rerope:window=8,factor=4", "self_extend:group_size=4,window=16", "dca:chunk_size=24"),
    *("string:shift=8", "lm_infinite:local_window=20", "window:window=8", "yarn:factor=4+rerope:window=24"),
    "dca:chunk_size=24,constants=paper",
]
SCORES = ((0.0, False), (5.0, True))


def turned(state, query, positions):
    """Queries `(tokens, heads, head_dim)` as vLLM passes them: parts of a wider tensor."""
    wide = torch.cat([anchored(state, query, positions), torch.randn_like(query)], dim=1)
    return wide[:, : query.shape[1]]


MIXED = [1, 1, 130, 1, 7, 35, 1, 2]
"""New tokens of each text: parts of prompts, and next tokens."""
COUNTS = {"one token": [1] * 8, "half of the text": [-(-length // 2) for length in LENGTHS], "all of it": LENGTHS}


def check(state, head_dim, heads=HEADS, counts=MIXED, scores=SCORES):
    cache, table, plain = cached(state, head_dim)
    begins, query = torch.tensor([0, *counts]).cumsum(0), torch.randn(sum(counts), heads, head_dim)
    new = torch.cat([torch.arange(length)[length - count :] for length, count in zip(LENGTHS, counts, strict=True)])
    batch = Batch(begins, torch.tensor(LENGTHS), table)
    for softcap, has_sinks in scores:
        sinks, output = torch.randn(heads) if has_sinks else None, torch.empty_like(query)
        attention = Attention(state, heads, (KV_HEADS, SIZE, head_dim), head_dim**-0.5, softcap)
        attention.attend(batch, turned(state, query, new), cache, output, sinks)
        for row, (keys, values) in enumerate(plain):
            tokens = slice(begins[row], begins[row + 1])
            expected = alone(state, query[tokens], keys, values, softcap, sinks)
            torch.testing.assert_close(output[tokens], expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("counts", [*COUNTS.values(), MIXED], ids=[*COUNTS, "some of each"])
@pytest.mark.parametrize("spec", [*SEGMENTS, "alibi", "rope+alibi"])
def test_a_batch_is_the_attention_of_each_request_alone(spec, counts):
    state, _model = layer_under(spec)
    assert anchor_of(state) is not None
    check(state, 2 * state.layer.rotary.inv_freq.shape[-1], counts=counts)


@pytest.mark.parametrize("count", [1, 24], ids=["a new token", "a prompt"])
def test_sinks_may_be_far_above_and_below_all_scores(count):
    state, _model = layer_under("rerope:window=24")
    head_dim = 2 * state.layer.rotary.inv_freq.shape[-1]
    cache, table, plain = cached(state, head_dim)
    row = LENGTHS.index(24)
    sinks, query = torch.tensor([150.0, -150.0, 9.0, 0.7]), torch.randn(count, HEADS, head_dim)
    batch, output = Batch(torch.tensor([0, count]), torch.tensor([24]), table[row, None]), torch.empty_like(query)
    attention = Attention(state, HEADS, (KV_HEADS, SIZE, head_dim), head_dim**-0.5)
    attention.attend(batch, turned(state, query, torch.arange(24 - count, 24)), cache, output, sinks)
    expected = alone(state, query, *plain[row], 0.0, sinks)
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("heads", [2, 6, 10, 16])
@pytest.mark.parametrize("head_dim", [16, 80, 96, 128])
@pytest.mark.parametrize("spec", ["rerope:window=24", "alibi"])
def test_heads_of_any_number_and_width(spec, head_dim, heads):
    """Their loops take four heads and 64 numbers at once, then the rest; pairs of 80 numbers are no whole vectors."""
    shape = {"hidden_size": 8 * heads, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 8}
    config = LlamaConfig(**shape, num_attention_heads=heads, num_key_value_heads=KV_HEADS, head_dim=head_dim)
    state, _model = layer_under(spec, LlamaForCausalLM(config))
    check(state, head_dim, heads, scores=SCORES[:1])


@pytest.mark.parametrize("model_type", ["phi", "glm"])
def test_what_does_not_rotate_stays(model_type):
    """Half of a head, with its pairs apart (Phi) or side by side (GLM)."""
    shape = {"hidden_size": 64 * HEADS, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 8}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    config = AutoConfig.for_model(model_type, **shape, **heads, partial_rotary_factor=0.5, pad_token_id=0)
    state, _model = layer_under("rerope:window=24", AutoModelForCausalLM.from_config(config))
    check(state, 64, scores=SCORES[:1])


def test_requests_under_different_factors_are_scored_by_different_states():
    states = [layer_under(f"leaky_rerope:window=8,factor={factor}")[0] for factor in (2, 8)]
    head_dim = 2 * states[0].layer.rotary.inv_freq.shape[-1]
    cache, table, _plain = cached(states[0], head_dim)
    query, lengths = torch.randn(len(LENGTHS), HEADS, head_dim), torch.tensor(LENGTHS)
    factors, begins, sizes = torch.tensor([1, 0, 0, 1, 1, 0, 1, 0]), torch.arange(9), (KV_HEADS, SIZE, head_dim)
    mixed, output = Batch(begins, lengths, table, factors), torch.full_like(query, torch.nan)
    for index, state in enumerate(states):
        attention, alike = Attention(state, HEADS, sizes, 0.2), torch.empty_like(query)
        attention.attend(mixed, query, cache, output, factor=index)
        assert output[factors > index].isnan().all()
        attention.attend(Batch(begins, lengths, table), query, cache, alike)
        torch.testing.assert_close(output[factors == index], alike[factors == index], atol=0, rtol=0)


def test_tables_grow_with_the_longest_request():
    state, _model = layer_under("rerope:window=24+logn:training_length=8")
    head_dim = 2 * state.layer.rotary.inv_freq.shape[-1]
    cache, table, plain = cached(state, head_dim)
    attention = Attention(state, HEADS, (KV_HEADS, SIZE, head_dim), 0.2)
    for row in sorted(range(len(LENGTHS)), key=LENGTHS.__getitem__):
        m, (keys, values) = torch.tensor([LENGTHS[row] - 1]), plain[row]
        query, output = torch.randn(1, HEADS, head_dim), torch.empty(1, HEADS, head_dim)
        batch = Batch(torch.tensor([0, 1]), m + 1, table[row, None])
        attention.attend(batch, turned(state, query, m), cache, output)
        call = alone(state, query * 0.2 * head_dim**0.5, keys, values, 0.0, None)
        torch.testing.assert_close(output, call, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cache_in_half_precision_is_read_as_it_is(dtype):
    """The error is that of rounded queries, keys, values and outputs."""
    state, _model = layer_under("rerope:window=24")
    head_dim = 2 * state.layer.rotary.inv_freq.shape[-1]
    cache, table, _plain = cached(state, head_dim, dtype)
    row = LENGTHS.index(130)
    query = torch.randn(130, HEADS, head_dim).to(dtype)
    keys, values = (x[0].transpose(0, 1).float() for x in held(cache, table[row, :9].long(), 130))
    expected = alone(state, query.float(), keys, values, 0.0, None)
    attention = Attention(state, HEADS, (KV_HEADS, SIZE, head_dim), head_dim**-0.5)
    for count in (130, 1):
        batch, output = Batch(torch.tensor([0, count]), torch.tensor([130]), table[row, None]), query[-count:].clone()
        attention.attend(batch, query[-count:], cache, output)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(output.float(), expected[-count:], atol=eps, rtol=eps)


@pytest.mark.parametrize("count", [1, 2], ids=["a new token", "a prompt"])
@pytest.mark.parametrize("dtype", paged_attention.DTYPES, ids=str)
def test_outputs_are_rounded_to_the_nearest_number(dtype, count):
    """The mean of two values is exact in float32. Half of the pairs are neighbours, whose mean lies between them."""
    state, _model = layer_under("rerope:window=24")
    head_dim = 2 * state.layer.rotary.inv_freq.shape[-1]
    cache = torch.zeros(1, KV_HEADS, 2, SIZE, head_dim, dtype=dtype)
    first = torch.randn(KV_HEADS, head_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    other = torch.where(torch.arange(head_dim) % 2 == 0, first.nextafter(torch.full_like(first, 9)), first.flip(-1))
    cache[0, :, 1, 0], cache[0, :, 1, 1] = first, other
    query = torch.zeros(count, HEADS, head_dim, dtype=dtype)  # all scores are equal
    batch, output = Batch(torch.tensor([0, count]), torch.tensor([2]), torch.tensor([[0]])), torch.empty_like(query)
    Attention(state, HEADS, (KV_HEADS, SIZE, head_dim), 0.2).attend(batch, query, cache, output)
    mean = ((first.float() + other.float()) / 2).to(dtype).repeat_interleave(HEADS // KV_HEADS, dim=0)
    assert torch.equal(output[-1], mean)


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "without a compiler"])
def test_tokens_without_a_slot_are_not_written(compiled, monkeypatch):
    """Engines fill a batch up with tokens in slot -1."""
    if not compiled:
        monkeypatch.setattr(paged_attention, "kernel", lambda: None)
    around = torch.zeros(5, KV_HEADS, 2, SIZE, 32)
    keys, values = torch.randn(2, 6, KV_HEADS, 32)
    written(around[1:4], keys, values, torch.tensor([-1, 40, -1, 0, 5, -1]))
    expected = torch.zeros_like(around)
    for token, (block, offset) in {1: (3, 8), 3: (1, 0), 4: (1, 5)}.items():
        expected[block, :, 0, offset], expected[block, :, 1, offset] = keys[token], values[token]
    assert torch.equal(around, expected)


@pytest.mark.parametrize(
    "spec",
    [
        "dynamic_ntk",
        "fox",
        "rope+shaw",
        "ms_poe",
        "dpe:window=8,groups=[1,2,4,4],shift=floor",
        "yarn:factor=4+leaky_rerope:window=8,factor=2",
    ],
)
def test_other_schemes_are_scored_request_by_request(spec):
    state, _model = layer_under(spec)
    assert anchor_of(state) is None


def test_without_a_compiler_there_is_a_warning_and_the_same_cache(monkeypatch):
    def fails(*_arguments, **_flags):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(paged_attention.CppCodeCache, "load", fails)
    with pytest.warns(rope_patch.RopePatchWarning, match="scored one by one: no compiler"):
        assert paged_attention.kernel.__wrapped__() is None
    states, slots = torch.randn(2, 6, KV_HEADS, 32), torch.tensor([3, 40, 17, 0, 5, 47])
    caches = torch.zeros(2, 3, KV_HEADS, 2, SIZE, 32)
    written(caches[0], *states, slots)
    monkeypatch.setattr(paged_attention, "kernel", lambda: None)
    written(caches[1], *states, slots)
    torch.testing.assert_close(*caches)
