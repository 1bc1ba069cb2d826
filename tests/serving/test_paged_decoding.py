"""Decoded tokens of a batch against a paged cache, and each request alone by the attention of Transformers' models."""

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
from rope_patch.serving import paged_decoding
from rope_patch.serving.paged_decoding import Step, anchor_of, attend, held, written

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


@pytest.mark.parametrize("piece", [1, 2**21])
@pytest.mark.parametrize(
    "spec",
    [
        *("rerope:window=24", "rerope:window=24+logn:training_length=32", "rerope:window=1", "rerope:window=500"),
        *("leaky_rerope:window=8,factor=4", "self_extend:group_size=4,window=16", "dca:chunk_size=24"),
        *(
            "string:shift=8",
            "lm_infinite:local_window=20",
            "alibi",
            "rope+alibi",
            "window:window=8",
            "yarn:factor=4+rerope:window=24",
        ),
        "dca:chunk_size=24,constants=paper",
    ],
)
def test_a_step_is_the_attention_of_each_request_alone(monkeypatch, spec, piece):
    monkeypatch.setattr(paged_decoding, "PIECE", piece)
    state, _model = layer_under(spec)
    assert anchor_of(state) is not None
    head_dim = 2 * state.layer.rotary.inv_freq.shape[-1]
    torch.manual_seed(0)
    counts = [-(-length // SIZE) for length in LENGTHS]
    order = torch.randperm(sum(counts) + 3)
    table = torch.full((len(LENGTHS), max(counts) + 1), int(order[-1]), dtype=torch.int32)
    for row, (own, count) in enumerate(zip(order.split([*counts, 3]), counts, strict=False)):
        table[row, :count] = own
    cache = torch.randn(len(order), KV_HEADS, 2, SIZE, head_dim)
    query = torch.randn(len(LENGTHS), HEADS, head_dim)
    plain = [torch.randn(2, length, KV_HEADS, head_dim) for length in LENGTHS]
    for row, (length, (keys, values)) in enumerate(zip(LENGTHS, plain, strict=True)):
        n = torch.arange(length)
        slots = table[row].long()[n // SIZE] * SIZE + n % SIZE
        written(cache, anchored(state, keys, n), values, slots)
        torch.testing.assert_close(held(cache, table[row, : counts[row]].long(), length)[1][0].transpose(0, 1), values)
    lengths = torch.tensor(LENGTHS)
    turned = torch.cat([anchored(state, one[None], m[None]) for one, m in zip(query, lengths - 1, strict=True)])
    step = Step(state, lengths, table, (KV_HEADS, SIZE, head_dim, 4))
    for softcap, sinks in ((0.0, None), (5.0, torch.randn(HEADS))):
        found = attend(state, turned, cache, step, head_dim**-0.5, softcap, sinks)
        for row, (length, (keys, values)) in enumerate(zip(LENGTHS, plain, strict=True)):
            states, positions = query[row][None, :, None], torch.tensor([[length - 1]])
            call = ForwardCall(state, ForwardCache(), states, positions, length - 1, kv_length=length, is_request=True)
            module = torch.nn.Module()
            module.is_causal = True
            arguments = {"softcap": softcap or None, "s_aux": sinks, "rope_patch": call}
            kv = (x.transpose(0, 1)[None] for x in (keys, values))
            expected = late_attention(module, states, *kv, None, **arguments)[0][0, 0]
            torch.testing.assert_close(found[row], expected, atol=2e-5, rtol=1e-4)


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
