"""The two calls of flash attention by which a GPU serves ReRoPE, with a dense stand-in for the kernel."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.attention.forward import Forward
from rope_patch.mounting.forward_call import ForwardCall
from rope_patch.mounting.scoring import late_attention
from rope_patch.saving.loading import default_checkpoint
from rope_patch.serving.flash import Batch, applies, attend

BLOCK, HEADS, KV_HEADS = 16, 4, 2
WINDOW = 24


def dense_flash(
    q, k, v, *, max_seqlen_q, cu_seqlens_q, max_seqlen_k, softmax_scale, softcap, cu_seqlens_k=None, seqused_k=None,
    block_table=None, window_size=None, **flags
):  # fmt: skip
    """The causal mask ends in the last query and the last key. A query without keys gives 0, and inf beside it."""
    assert flags == {"causal": True, "return_softmax_lse": True}
    outputs, sums = [], []
    for row, (begin, end) in enumerate(itertools.pairwise(cu_seqlens_q)):
        if block_table is None:
            keys, values = (x[cu_seqlens_k[row] : cu_seqlens_k[row + 1]] for x in (k, v))
        else:
            keys, values = (x[block_table[row]].flatten(0, 1)[: seqused_k[row]] for x in (k, v))
        assert end - begin <= max_seqlen_q
        assert len(keys) <= max_seqlen_k
        keys, values = (x.double().repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].double(), keys) * softmax_scale
        scores = scores if not softcap else softcap * torch.tanh(scores / softcap)
        last = torch.arange(end - begin)[:, None] + len(keys) - (end - begin)
        distance = last - torch.arange(len(keys))
        seen = (distance >= 0) if window_size is None else (distance >= 0) & (distance <= window_size[0])
        scores = scores.masked_fill(~seen, -torch.inf)
        summed = scores.logsumexp(dim=-1)
        weights = scores.softmax(dim=-1).nan_to_num(0)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype))
        sums.append(torch.where(summed == -torch.inf, torch.inf, summed))
    return torch.cat(outputs), torch.cat(sums, dim=1).float()


def layer_under(spec, **fields):
    model = AutoModelForCausalLM.from_pretrained(default_checkpoint(), dtype=torch.float32, **fields)
    return rope_patch.patch(model, spec, mount="late").layer_states[0], model


@pytest.mark.parametrize(
    "spec", [f"rerope:window={WINDOW}", f"rerope:window={WINDOW}+logn:training_length=32", "rerope:window=1"]
)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_two_calls_are_the_attention_of_each_request_alone(spec, softcap):
    """Prefills, chunks and decoded tokens in one batch, shorter and longer than the window."""
    state, _model = layer_under(spec)
    assert applies(state)
    window, head_dim = int(state.regions[0].stop), 2 * state.layer.rotary.inv_freq.shape[-1]
    lengths, queries = [5, 24, 25, 70, 61, 130], [5, 24, 1, 70, 9, 1]
    torch.manual_seed(0)
    blocks = [-(-length // BLOCK) for length in lengths]
    order = torch.randperm(sum(blocks) + 3)
    table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    for row, (given, count) in enumerate(zip(order.split([*blocks, 3]), blocks, strict=False)):
        table[row, :count] = given
    cache = torch.randn(len(order), KV_HEADS, BLOCK, 2 * head_dim)
    query = torch.randn(sum(queries), HEADS, head_dim)
    metadata = SimpleNamespace(
        query_start_loc=torch.tensor([0, *queries]).cumsum(0).int(),
        seq_lens=torch.tensor(lengths).int(),
        block_table=table,
        max_query_len=max(queries),
        max_seq_len=max(lengths),
    )
    batch = Batch.of(metadata, window, BLOCK)
    found = attend(state, query, cache, metadata, batch, dense_flash, head_dim**-0.5, softcap)

    for row, (length, own) in enumerate(zip(lengths, query.split(queries), strict=True)):
        keys, values = cache[table[row].long()].transpose(0, 1).flatten(1, 2)[None, :, :length].chunk(2, dim=-1)
        positions = torch.arange(length - len(own), length)[None]
        states = own.transpose(0, 1)[None]
        call = ForwardCall(state, Forward(), states, positions, length - len(own), kv_length=length, is_request=True)
        module = torch.nn.Module()
        module.is_causal = True
        arguments = {"softcap": softcap or None, "rope_patch": call}
        expected = late_attention(module, states, keys, values, None, **arguments)[0][0]
        torch.testing.assert_close(found[metadata.query_start_loc[row] : metadata.query_start_loc[row + 1]], expected)


@pytest.mark.parametrize(
    "spec",
    [
        *("self_extend:group_size=4,window=16", "leaky_rerope:window=8,factor=4", "dca:chunk_size=24", "logn"),
        *(
            "window:window=8",
            "rerope:window=8+alibi",
            "rerope:window=8+shaw",
            "rerope:window=8+urpe:max_distance=12",
            "rerope:window=8+yarn:factor=4",
        ),
        "rerope:window=8+xpos:scale_base=8",
    ],
)
def test_other_schemes_are_scored_request_by_request(spec):
    state, _model = layer_under(spec)
    assert not applies(state)


def test_a_checkpoint_whose_rotation_has_a_factor_is_scored_request_by_request():
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}
    state, _model = layer_under("rerope:window=8", rope_parameters=yarn)
    assert state.layer.rotary.attention_scaling > 1.1
    assert not applies(state)
