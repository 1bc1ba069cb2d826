"""Masks of flash attention, which no model on a CPU hands out, mean what the others mean."""

import pytest
import torch

from rope_patch import UnsupportedPositions
from rope_patch.attention.masks import groups_as_mask, groups_of_pads, keys_seen, read_mask
from rope_patch.attention.problem import Problem
from rope_patch.attention.spans import find_spans
from rope_patch.schemes.tools.positions import key_positions

FLASH = "flash_attention_2"
SDPA = "sdpa"


def causal(length: int) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def seen(groups, q_length, query_start=0):
    """What queries see, as the oracle reads it, `(rows, q_length, kv_length)`."""
    kv_length = groups.shape[-1]
    positions = torch.zeros(1, q_length, dtype=torch.long)
    value = torch.zeros(1, 1, kv_length, 4)
    inputs = Problem((), value, positions, groups, None, True, query_start, 1.0, groups=groups)
    return inputs.visible()[:, 0]


def test_packed_rows_are_causal_within_documents():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0]])
    mask, groups = read_mask(None, positions, 6, 6, 0, FLASH)
    assert mask is None
    assert torch.equal(seen(groups, 6)[0], torch.block_diag(*map(causal, (3, 2, 1))).bool())
    assert read_mask(None, positions, 6, 6, 0, SDPA) == (None, None)


def test_a_mask_of_pads_is_causal_too():
    pads = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    mask, groups = read_mask(pads, torch.arange(4)[None], 4, 4, 0, FLASH)
    assert mask is None
    found = seen(groups, 4)
    assert torch.equal(found[0, 2:], causal(4)[2:] & pads[0].bool())
    assert not found[0, :2].any()  # pads see nothing
    assert torch.equal(found[1], causal(4))


@pytest.mark.parametrize("as_argument", [lambda mask: mask, lambda mask: groups_as_mask(groups_of_pads(mask))])
def test_a_mask_of_pads_beside_a_cache_lets_the_queries_see_the_past(as_argument):
    pads = as_argument(torch.tensor([[0, 1, 1, 1, 1]]))
    _, groups = read_mask(pads, torch.tensor([[2, 3]]), 2, 6, 3, FLASH)
    expected = [[False, True, True, True, False, False], [False, True, True, True, True, False]]
    assert seen(groups, 2, 3)[0].tolist() == expected
    mask, groups = read_mask(pads, torch.tensor([[3]]), 1, 6, 4, FLASH)
    assert groups is None
    assert mask.tolist() == [[[[False, True, True, True, True, False]]]]


def test_keys_of_an_additive_mask_are_seen_unless_it_holds_the_lowest_number():
    mask = torch.tensor([[0.0, -3.0, torch.finfo(torch.float32).min], [0.0, -torch.inf, -9.5]])
    assert keys_seen(mask[None, None], None).tolist() == [[True, True, True]]
    assert keys_seen(mask[None, None, :1], None).tolist() == [[True, True, False]]
    assert keys_seen(mask[None, None, 1:], None).tolist() == [[True, False, True]]


def test_a_row_of_nothing_but_pads_has_no_span():
    groups = torch.tensor([[0] * 5, [-1] * 5, [0] * 5])
    found = find_spans(torch.arange(5)[None], None, groups, 0, 3)
    assert [(span.rows, span.queries) for span in found] == [(slice(row, row + 1), slice(0, 5)) for row in (0, 2)]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_integers_are_neither_groups_nor_a_mask_of_all_pairs(dtype):
    mask = torch.ones(1, 1, 3, 3).tril().to(dtype)
    with pytest.raises(UnsupportedPositions, match=r"dtype torch\.\w+ and shape \(1, 1, 3, 3\)"):
        read_mask(mask, torch.arange(3)[None], 3, 3, 0, SDPA)


@pytest.mark.parametrize("mask", [object(), torch.ones(1, 1, 3), torch.ones(3)])
def test_other_masks_are_refused(mask):
    with pytest.raises(UnsupportedPositions, match="set_attn_implementation"):
        read_mask(mask, torch.arange(3)[None], 3, 3, 0, SDPA)


def by_mask(groups, query_start=0, window=None):
    """The spans that the materialised mask of the same groups gives."""
    q_length = groups.shape[-1] - query_start
    mask = seen(groups, q_length, query_start)[:, None]
    if window:
        mask = mask & ~torch.ones(mask.shape[-2:], dtype=torch.bool).tril(query_start - window)
    positions = torch.arange(q_length)[None]
    return find_spans(positions, mask, None, query_start, len(groups))


@pytest.mark.parametrize("query_start", [0, 3])
@pytest.mark.parametrize("rows", [[[0] * 8], [[-1, -1, 0, 0, 0, 0, 0, 0], [0] * 8]])
def test_groups_make_the_spans_that_their_mask_makes(rows, query_start):
    groups = torch.tensor(rows)
    positions = torch.arange(8 - query_start)[None]
    found = find_spans(positions, None, groups, query_start, len(groups))
    assert found == by_mask(groups, query_start)
    assert found


def test_documents_are_spans_of_their_own_and_a_group_in_pieces_is_none():
    groups, positions = torch.tensor([[0, 0, 0, 1, 1, 2]]), torch.tensor([[0, 1, 2, 0, 1, 0]])
    found = find_spans(positions, None, groups, 0, 1)
    assert [(span.queries.start, span.queries.stop, span.first_position) for span in found] == [
        (0, 3, 0),
        (3, 5, 0),
        (5, 6, 0),
    ]
    assert find_spans(torch.arange(4)[None], None, torch.tensor([[0, -1, 0, 0]]), 0, 1) is None


@pytest.mark.parametrize("query_start", [0, 3, 6, 7])
def test_pads_behind_a_text_are_a_span_that_sees_all_of_it(query_start):
    groups, positions = torch.tensor([[-1, 0, 0, 0, 0, 0, -1, -1]]), torch.arange(-1, 7)[None, query_start:]
    of_pads = find_spans(positions, None, groups, query_start, 1)[-1]
    first = max(6 - query_start, 0)
    expected = (slice(first, 8 - query_start), slice(1, 6), 0, 2)
    assert (of_pads.queries, of_pads.keys, of_pads.first_position, of_pads.hidden) == expected
    if positions.shape[1] > 1:
        assert find_spans(torch.zeros_like(positions), None, groups, query_start, 1) is None


@pytest.mark.parametrize("query_start", [0, 3, 6])
@pytest.mark.parametrize("pads", [0, 2])
def test_a_sliding_window_is_one_span(pads, query_start):
    groups = torch.tensor([[-1] * pads + [0] * (12 - pads)])
    (span,) = by_mask(groups, query_start, window=4)
    assert span.window == 4
    assert span.queries.stop == 12 - query_start
    assert span.keys.stop == 12


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


@pytest.mark.parametrize("shift", [0, 3], ids=["from zero", "shifted"])
def test_queries_after_a_cache_know_the_position_of_their_first_key(shift):
    """Four keys are cached. With a mask, with groups or with neither, the first key is at `shift`."""
    positions, visible = torch.arange(4, 9)[None] + shift, torch.ones(5, 9, dtype=torch.bool).tril(4)
    groups = torch.zeros(1, 9, dtype=torch.long)
    for mask, given in ((None, None), (visible[None, None], None), (None, groups)):
        (span,) = find_spans(positions, mask, given, query_start=4, batch_size=1)
        assert (span.queries, span.keys, span.first_position) == (slice(0, 5), slice(0, 9), shift)
