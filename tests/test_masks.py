"""Masks of flash attention, which no model on a CPU hands out, mean what the others mean."""

from types import SimpleNamespace

import pytest
import torch

from rope_patch import UnsupportedPositions
from rope_patch.attention.masks import as_mask
from rope_patch.positions import key_positions

FLASH = SimpleNamespace(_attn_implementation="flash_attention_2")
SDPA = SimpleNamespace(_attn_implementation="sdpa")


def causal(length: int) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def test_packed_rows_are_causal_within_documents():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0]])
    expected = torch.block_diag(*(causal(length).int() for length in (3, 2, 1))).bool()
    assert torch.equal(as_mask(None, positions, 6, 6, 0, FLASH)[0, 0], expected)
    assert as_mask(None, positions, 6, 6, 0, SDPA) is None


def test_a_mask_of_pads_is_causal_too():
    pads = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    found = as_mask(pads, torch.arange(4)[None], 4, 4, 0, FLASH)
    assert torch.equal(found[0, 0], causal(4) & pads[0].bool())
    assert torch.equal(found[1, 0], causal(4))


def test_a_mask_of_pads_beside_a_cache_lets_the_queries_see_the_past():
    found = as_mask(torch.tensor([[0, 1, 1, 1, 1]]), torch.tensor([[2, 3]]), 2, 5, 3, FLASH)
    assert found[0, 0].tolist() == [[False, True, True, True, False], [False, True, True, True, True]]


@pytest.mark.parametrize("mask", [object(), torch.ones(1, 1, 3), torch.ones(3)])
def test_other_masks_are_refused(mask):
    with pytest.raises(UnsupportedPositions, match="set_attn_implementation"):
        as_mask(mask, torch.arange(3)[None], 3, 3, 0, SDPA)


@pytest.mark.parametrize(
    ("queries", "kv_length", "start", "expected"),
    [
        ([0, 1, 2], 3, None, [0, 1, 2]),
        ([0, 1, 0], 3, None, [0, 1, 0]),
        ([5], 6, 5, [0, 1, 2, 3, 4, 5]),
        # two left pads: their slots lie before position zero
        ([3, 4], 7, 5, [-2, -1, 0, 1, 2, 3, 4]),
        # pads share a position with the first token, so slots are not counted from them
        ([0, 0, 0, 1], 4, 0, [0, 0, 0, 1]),
        # the empty tail of a static cache
        ([0, 1], 5, 0, [0, 1, 2, 3, 4]),
        # a window of a cache: its first slot is not position zero
        ([9], 4, 3, [6, 7, 8, 9]),
    ],
)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_key_positions_follow_the_queries(queries, kv_length, start, expected, as_tensor):
    if as_tensor and start is not None:
        start = torch.tensor(start)
    assert key_positions(torch.tensor([queries]), kv_length, start).tolist() == [expected]
