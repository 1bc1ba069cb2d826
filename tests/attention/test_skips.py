"""Positions that skip (PoSE): each run of queries is scored against each run of keys before it, as by the oracle."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rope_patch import patch
from rope_patch.attention import decay
from rope_patch.attention.executors import merged, products, reference
from rope_patch.attention.spans import MOST_SPANS_PER_ROW, find_spans
from rope_patch.attention.tile_kernels import Dense, FlashCPU
from tests.attention.problems import in_spans, supports
from tests.attention.test_segmented import gradients_of, in_double, inputs_of, run_segmented
from tests.executors import executors_of
from tests.runs import assert_close, assert_same_gradients, logits, tokens

SPECS = [
    "",
    "rerope:window=6",
    "leaky_rerope:window=6,factor=4",
    "self_extend:group_size=4,window=7",
    "string:shift=11,window=3",
    "dca:chunk_size=9,local_window=2",
    "lm_infinite:local_window=7,n_global=3",
]
ROWS = {
    "rows alike": [[0] * 45] * 2,
    "left pads": [[-1] * 9 + [0] * 36, [0] * 45],
    "pads behind": [[0] * 33 + [-1] * 12, [0] * 45],
    "packed": [[0] * 20 + [1] * 25, [0] * 31 + [1] * 14],
}


def skipping(inputs, cuts, sizes):
    """The call with a skip of each size before the query of each cut, another one in each row; documents restart."""
    groups, start = inputs.groups, inputs.query_start
    positions = inputs.key_positions.expand(len(groups), -1).clone()
    for row, (cut, size) in itertools.product(range(len(groups)), zip(cuts, sizes, strict=True)):
        positions[row, min(start + 1 + cut + row, 45) :] += size + row
    restarts = torch.nn.functional.pad((groups.diff(dim=-1) > 0) & (groups[:, 1:] > 0), (1, 0))
    for row, slot in restarts.nonzero().tolist():
        positions[row, slot:] -= positions[row, slot].item()
    return dataclasses.replace(inputs, query_positions=positions[:, start:], key_positions=positions)


def small_tiles(monkeypatch):
    for kernel in (Dense, FlashCPU):
        monkeypatch.setattr(kernel, "band_rows", lambda self, width: 7)
    monkeypatch.setattr(merged, "LARGE", 1000)
    monkeypatch.setattr(Dense, "rows", 5)


def assert_equal(found, expected, tolerance):
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() / other.norm().clamp(min=1e-9) < tolerance


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(("q_length", "dtype"), [(45, torch.float64), (45, torch.float32), (20, torch.float64)])
def test_output_and_gradients_are_those_of_the_oracle(spec, rows, q_length, dtype, monkeypatch):
    if rows == ROWS["packed"] and q_length < 45:
        pytest.skip("packed rows have no cache")
    small_tiles(monkeypatch)
    inputs, _ = inputs_of(spec, rows, q_length, 45, dtype)
    every = torch.ones(2, q_length, dtype=torch.bool)  # also pads behind a text see all of it

    @settings(max_examples=6, deadline=None, derandomize=True)
    @given(st.lists(st.tuples(st.integers(0, q_length - 3), st.integers(1, 60)), min_size=1, max_size=3))
    def check(skips):
        call = skipping(inputs, *zip(*skips, strict=True))
        grad = torch.randn(call.branches[0].query.shape, generator=torch.Generator().manual_seed(1))
        expected, theirs = gradients_of(lambda x: reference.attend(x)[0], in_double(call), every, grad)
        found, ours = gradients_of(run_segmented, call, every, grad)
        assert_equal([found, *ours], [expected, *theirs], 1e-12 if dtype == torch.float64 else 1e-5)

    check()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_the_products_of_bfloat16_are_those_of_the_oracle(spec, rows):
    inputs, _ = inputs_of(spec, rows, 45, 45, torch.bfloat16)
    call = skipping(inputs, [9, 30], [5, 8_000])
    spans = find_spans(call.query_positions, None, call.groups, 0, 2)
    assert_equal([in_spans(products, call, spans)], [reference.attend(in_double(call))[0]], 2e-2)


@pytest.mark.parametrize("window", [4, 30])
def test_a_sliding_window_counts_slots_where_positions_skip(window):
    inputs, _ = inputs_of("rerope:window=6", [[0] * 45], 45, 45)
    mask = torch.ones(45, 45, dtype=torch.bool).tril().triu(1 - window)[None, None]
    call = dataclasses.replace(skipping(inputs, [9, 30], [3, 20]), mask=mask)
    spans = find_spans(call.query_positions, mask, None, 0, 1)
    assert len(spans) == 6
    torch.testing.assert_close(in_spans(merged, call, spans), reference.attend(call)[0])


def test_positions_that_go_down_or_skip_too_often_are_no_spans():
    assert find_spans(torch.tensor([[0, 1, 5, 4]]), None, None, 0, 1) is None
    assert find_spans(torch.tensor([[0, 1, 1, 2]]), None, None, 0, 1) is None
    assert len(find_spans(2 * torch.arange(20)[None], None, None, 0, 1)) < MOST_SPANS_PER_ROW
    assert find_spans(2 * torch.arange(30)[None], None, None, 0, 1) is None


def test_keys_of_both_directions_are_no_spans_where_positions_skip():
    positions = torch.tensor([[0, 1, 5, 6]])
    assert find_spans(positions, None, None, 0, 1, causal=False) is None
    assert find_spans(positions, None, torch.zeros(1, 4, dtype=torch.long), 0, 1, causal=False) is None


@pytest.mark.parametrize("spec", ["alibi", "sandwich:embedding_dim=16,base=100"])
def test_a_bias_is_scored_by_blocks_where_positions_skip(spec):
    inputs, _ = inputs_of(spec, [[0] * 45], 45, 45)
    call = skipping(inputs, [20], [9])
    assert not supports(merged, call, find_spans(call.query_positions, None, call.groups, 0, 1))


@pytest.mark.parametrize(
    "spec", [*SPECS[1:], "rerope:window=6+logn:training_length=8", "self_extend:group_size=4,window=7+yarn:factor=4"]
)
@pytest.mark.parametrize("pads", [0, 5])
def test_a_model_keeps_the_fast_path_in_training(llama, spec, pads):
    ids, mask = tokens(40, rows=2), torch.ones(2, 40, dtype=torch.long)
    mask[0, len(mask[0]) - pads :] = 0
    positions = torch.arange(40).repeat(2, 1)
    positions[0, 20:] += 13
    positions[1, 7:] += 300
    labels = torch.where(mask.bool(), ids, -100)
    given = {"position_ids": positions, "attention_mask": mask, "labels": labels, "use_cache": False}

    def trained():
        llama.zero_grad(set_to_none=True)
        result = llama(ids, **given)
        result.loss.backward()
        return result.logits.detach()[mask.bool()], {name: x.grad.clone() for name, x in llama.named_parameters()}

    with patch(llama, spec, attention="oracle"):
        expected, theirs = trained()
    with patch(llama, spec, attention="segmented"), executors_of(llama) as taken:
        found, ours = trained()
    assert "chunked" not in taken
    assert_close(found, expected)
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("spec", ["xpos+rerope:window=6", "xpos+self_extend:group_size=4,window=7"])
def test_a_block_under_a_decay_knows_the_skips_before_it(llama, spec, monkeypatch):
    monkeypatch.setattr(decay, "ROWS", 16)
    positions = torch.arange(40)[None] + 20 * (torch.arange(40) >= 14)
    given = {"position_ids": positions, "attention_mask": torch.ones(1, 40)}
    with patch(llama, spec, attention="oracle"):
        expected = logits(llama, tokens(40), **given)
    with patch(llama, spec, attention="segmented"):
        assert_close(logits(llama, tokens(40), **given), expected)
