"""New tokens and parts of prompts over a paged cache, and each request alone by the attention of Transformers."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.attention.forward_cache import ForwardCache
from rope_patch.mounting.forward_call import ForwardCall
from rope_patch.mounting.layer_state import UNROTATED
from rope_patch.mounting.scoring import late_attention
from rope_patch.saving.loading import default_checkpoint
from rope_patch.schemes.tools.rotary import rotation_tables
from rope_patch.serving import paged_attention
from rope_patch.serving.paged_attention import Part, Step, anchor_of, held, written

SIZE, HEADS, KV_HEADS = 16, 4, 2
LENGTHS = [5, 1, 130, 24, 25, 70, 16, 61]


def layer_under(spec):
    model = AutoModelForCausalLM.from_pretrained(default_checkpoint(), dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rope_patch.RopePatchWarning)
        return rope_patch.patch(model, spec, mount="late").layer_states[0], model


def anchored(state, x, positions):
    """States `(tokens, heads, head_dim)` as the cache holds them."""
    anchor = anchor_of(state)
    if anchor == UNROTATED:
        return x
    frequencies = state.own_frequencies(None, {}, x.device)
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
    call = ForwardCall(state, ForwardCache(), states, positions, start, kv_length=length, is_request=True)
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


@pytest.mark.parametrize("spec", [*SEGMENTS, "alibi", "rope+alibi"])
def test_a_step_is_the_attention_of_each_request_alone(spec):
    state, _model = layer_under(spec)
    assert anchor_of(state) is not None
    head_dim = 2 * state.layer.rotary.inv_freq.shape[-1]
    cache, table, plain = cached(state, head_dim)
    query, lengths = torch.randn(len(LENGTHS), HEADS, head_dim), torch.tensor(LENGTHS)
    turned = torch.cat([anchored(state, one[None], m[None]) for one, m in zip(query, lengths - 1, strict=True)])
    step = Step(state, lengths, table, (KV_HEADS, SIZE, head_dim))
    for softcap, has_sinks in SCORES:
        sinks = torch.randn(HEADS) if has_sinks else None
        found = step.attend(turned, cache, head_dim**-0.5, softcap, sinks)
        for row, (keys, values) in enumerate(plain):
            expected = alone(state, query[row][None], keys, values, softcap, sinks)[0]
            torch.testing.assert_close(found[row], expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("spec", SEGMENTS)
def test_a_part_of_a_prompt_is_the_attention_of_its_text(spec):
    """All of it, and the last tokens of it, against blocks that hold what came before."""
    state, _model = layer_under(spec)
    head_dim = 2 * state.layer.rotary.inv_freq.shape[-1]
    cache, table, plain = cached(state, head_dim)
    for row, (keys, values) in enumerate(plain):
        for start in {0, len(keys) // 2}:
            m, blocks = torch.arange(start, len(keys)), table[row, : -(-len(keys) // SIZE)]
            query = torch.randn(len(m), HEADS, head_dim)
            part = Part(state, start, len(keys), blocks, (KV_HEADS, SIZE, head_dim))
            for softcap, has_sinks in SCORES:
                sinks = torch.randn(HEADS) if has_sinks else None
                found = part.attend(anchored(state, query, m), cache, head_dim**-0.5, softcap, sinks)
                expected = alone(state, query, keys, values, softcap, sinks)
                torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cache_in_half_precision_is_read_as_it_is(dtype):
    """The error is that of rounded queries, keys, values and outputs."""
    state, _model = layer_under("rerope:window=24")
    head_dim = 2 * state.layer.rotary.inv_freq.shape[-1]
    cache, table, _plain = cached(state, head_dim, dtype)
    sizes, row = (KV_HEADS, SIZE, head_dim), LENGTHS.index(130)
    query = torch.randn(130, HEADS, head_dim).to(dtype)
    keys, values = (x[0].transpose(0, 1).float() for x in held(cache, table[row, :9].long(), 130))
    expected = alone(state, query.float(), keys, values, 0.0, None)
    found = Part(state, 0, 130, table[row, :9], sizes).attend(query, cache, head_dim**-0.5)
    new = Step(state, torch.tensor([130]), table[row, None], sizes).attend(query[-1:], cache, head_dim**-0.5)
    for some, others in ((found, expected), (new, expected[-1:])):
        assert some.dtype == dtype
        torch.testing.assert_close(some.float(), others, atol=torch.finfo(dtype).eps, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    "spec",
    [
        "dynamic_ntk",
        "fox",
        "rope+shaw",
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
