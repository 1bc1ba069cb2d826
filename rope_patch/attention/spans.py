"""Runs of tokens at consecutive positions: a row without its pads, a packed document, or the part of either between two
skips of the positions; and the pads behind the tokens of a row.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass

import torch

MOST_SPANS_PER_ROW = 256  # a mask with more spans is not treated as documents


@dataclass(frozen=True)
class Span:
    """Queries at consecutive positions that see the keys from `keys.start`, or from their window, up to themselves.
    Queries behind a skip of the positions have one span for each run of keys at consecutive positions.

    Attributes:
        queries: index range of the queries.
        keys: slots of the keys; the last is `hidden` positions before the last query.
        first_position: position of the first key.
        window: of sliding-window attention in tokens; infinite without a window.
        causal: whether each query sees only the keys up to itself; otherwise all keys of the span.
        hidden: positions between the last key and the last query without keys of this span; 0 if the last query is the
            last key.
        before: slots of pads between the first query and the first key in bidirectional attention; else 0.
    """

    rows: slice
    queries: slice
    keys: slice
    first_position: int
    window: float = math.inf
    causal: bool = True
    hidden: int = 0
    before: int = 0

    def __hash__(self) -> int:
        """A hash that equal spans share; slices have none before Python 3.12."""
        queries, keys = self.queries, self.keys
        return hash((self.rows.start, queries.start, queries.stop, keys.start, keys.stop, self.first_position))

    @property
    def q_length(self) -> int:
        """Number of queries."""
        return self.queries.stop - self.queries.start

    @property
    def offset(self) -> int:
        """Distance from the first query to the first key."""
        return (self.keys.stop + self.hidden - self.keys.start + self.before) - self.q_length

    def skips(self, query_start: int) -> bool:
        """Whether the distance of a query and a key differs from the difference of their slots."""
        return self.hidden + self.keys.stop != query_start + self.queries.stop

    def within(self, reach: int) -> Span:
        """Drop the keys that are `reach` tokens or more before the last key that a query sees."""
        return dataclasses.replace(self, window=min(self.window, reach + self.hidden))


def spans_between(
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    mask: torch.Tensor | None,
    groups: torch.Tensor | None,
    query_start: int,
    batch_size: int,
    causal: bool,
) -> tuple[Span, ...] | None:
    """Like `find_spans`, but given the positions of all keys, `(batch or 1, kv_len)`, not only of cached ones."""
    past = key_positions[:, :query_start] if query_start else None
    return find_spans(query_positions, mask, groups, query_start, batch_size, causal, past)


def find_spans(
    position_ids: torch.Tensor,
    mask: torch.Tensor | None,
    groups: torch.Tensor | None,
    query_start: int,
    batch_size: int,
    causal: bool = True,
    past: torch.Tensor | None = None,
) -> tuple[Span, ...] | None:
    """The spans of a call of `batch_size` rows whose first query is in slot `query_start`; None if its mask or its
    positions do not consist of spans.

    Args:
        position_ids: `(batch or 1, q_len)`, of the queries.
        mask, groups: see `Visibility`.
        causal: whether a query sees only the keys up to itself; otherwise there are as many queries as keys.
        past: positions of the keys before the first query, `(batch or 1, query_start)`; by default they count down
            from it.
    """
    if mask is not None and not causal:
        return None
    q_length = position_ids.shape[-1]
    first_key: torch.Tensor | None
    if groups is not None:
        groups = groups.cpu()
        first_key = _starts_of_groups(groups, query_start, q_length)
    elif mask is None:
        first_key = torch.zeros(1, q_length, dtype=torch.long)
    elif mask.dtype != torch.bool or mask.shape[1] != 1:
        return None
    else:
        first_key = first_keys(mask[:, 0], query_start)
    if first_key is None:
        return None
    if query_start and past is None:
        past = position_ids[:, :1] + torch.arange(-query_start, 0, device=position_ids.device)
    if query_start and past is not None:  # joined on the device, so that the host waits once
        number = max(len(past), len(position_ids))
        position_ids = torch.cat([past.expand(number, -1), position_ids.expand(number, -1)], dim=-1)
    positions = position_ids.cpu()
    spans: list[Span] = []
    same_for_all = len(first_key) == len(positions) == 1
    for row in range(1 if same_for_all else batch_size):
        rows = slice(0, batch_size) if same_for_all else slice(row, row + 1)
        firsts, places = first_key[row % len(first_key)], positions[row % len(positions)]
        members = None if groups is None else groups[row % len(groups)]
        if members is not None and not causal and bool((members < 0).any()):
            in_row = _span_both_ways(rows, members, places)
        else:
            in_row = _spans_of_row(rows, firsts, places, query_start, may_slide=mask is not None)
            of_pads = [] if members is None else _spans_of_pads(rows, members, places, query_start)
            in_row = None if in_row is None or of_pads is None else in_row + of_pads
        if in_row is None or (not causal and any(span.skips(query_start) for span in in_row)):
            return None
        spans += [dataclasses.replace(span, causal=causal) for span in in_row]
    return _merge_equal_rows(spans, batch_size)


def _starts_of_groups(groups: torch.Tensor, query_start: int, q_length: int) -> torch.Tensor | None:
    """The first slot of each query's group, `(batch, q_len)`, -1 for pads; None if a group is in several pieces."""
    first_slots = []
    for row in groups:
        members, lengths = torch.unique_consecutive(row, return_counts=True)
        tokens = members[members >= 0]
        if len(tokens.unique()) < len(tokens):
            return None
        starts = torch.where(members >= 0, lengths.cumsum(0) - lengths, -1)
        first_slots.append(starts.repeat_interleave(lengths)[query_start : query_start + q_length])
    return torch.stack(first_slots)


def _spans_of_pads(rows: slice, groups: torch.Tensor, positions: torch.Tensor, query_start: int) -> list[Span] | None:
    """Spans of pads as queries of causal attention: pads behind the tokens of a row see all of them, as in
    Transformers, and pads before them see nothing. None if the pads' positions do not go up from the tokens', or if
    they see several runs.
    """
    run, end = _only_run(groups), len(positions)
    if not bool((groups >= 0).any()) or bool((groups[query_start:end] >= 0).all()) or groups[end - 1] >= 0:
        return []
    if run is None:
        return None
    first, last = run
    return _pairs_of_runs(rows, positions, query_start, slice(max(last + 1, query_start), end), slice(first, last + 1))


def _span_both_ways(rows: slice, groups: torch.Tensor, positions: torch.Tensor) -> list[Span] | None:
    """The span of a padded row of bidirectional attention, whose pads see all tokens; None if the tokens are several
    runs, or their positions skip.
    """
    run = _only_run(groups)
    if not bool((groups >= 0).any()):
        return []
    if run is None or not bool((positions.diff() == 1).all()):
        return None
    first, last = run
    hidden, queries, keys = len(groups) - 1 - last, slice(0, len(groups)), slice(first, last + 1)
    return [Span(rows, queries, keys, int(positions[first]), hidden=hidden, before=first)]


def _only_run(groups: torch.Tensor) -> tuple[int, int] | None:
    """The first and the last slot of a row's tokens; None unless the tokens are one group in one piece."""
    tokens = (groups >= 0).nonzero().flatten()
    if not len(tokens) or int(tokens[-1] - tokens[0]) != len(tokens) - 1 or len(groups[tokens].unique()) > 1:
        return None
    return int(tokens[0]), int(tokens[-1])


def first_keys(mask: torch.Tensor, query_start: int) -> torch.Tensor | None:
    """The first visible slot of each query, `(batch, q_len)`, -1 if it sees nothing; None unless every query sees an
    interval.
    """
    count, numbers = mask.sum(dim=-1, dtype=torch.int32), mask.view(torch.uint8)
    first, last = numbers.argmax(dim=-1), mask.shape[-1] - 1 - numbers.flip(-1).argmax(dim=-1)
    own = torch.arange(mask.shape[1], device=mask.device) + query_start
    blind = count == 0
    # every slot from the first visible one to the query's own is visible, and none after it
    interval = (last == own) & (count == own - first + 1)
    return torch.where(blind, -1, first).cpu() if bool((interval | blind).all()) else None


def _spans_of_row(
    rows: slice, first_key: torch.Tensor, positions: torch.Tensor, query_start: int, may_slide: bool
) -> list[Span] | None:
    steps = first_key.diff()
    sliding_from = len(first_key)
    if may_slide:  # from the first query on whose followers each see one old key less
        others = (steps != 1).nonzero()
        sliding_from = int(others[-1]) + 2 if len(others) else 1
    cuts = (steps[: max(sliding_from - 1, 0)] != 0).nonzero().flatten() + 1
    spans: list[Span] = []
    for start, stop in itertools.pairwise([0, *cuts.tolist(), len(first_key)]):
        key = int(first_key[start])
        if key < 0:
            continue
        window = math.inf
        if sliding_from < stop:
            window = query_start + sliding_from - int(first_key[sliding_from]) + 1
        queries = slice(query_start + start, query_start + stop)
        pairs = _pairs_of_runs(rows, positions, query_start, queries, slice(key, queries.stop), window)
        if pairs is None or len(spans) + len(pairs) > MOST_SPANS_PER_ROW:
            return None
        spans += pairs
    return spans


def _pairs_of_runs(
    rows: slice, positions: torch.Tensor, query_start: int, queries: slice, keys: slice, window: float = math.inf
) -> list[Span] | None:
    """A span for each run of the `queries` and each run of the `keys` up to it, of the same row; both are slots, and
    `window` counts slots. A run is where positions go up by one. None if they do not go up, or skip too often.
    """
    steps = positions[keys.start : queries.stop].diff()
    cuts = (steps != 1).nonzero().flatten() + keys.start + 1
    if bool((steps < 1).any()) or len(cuts) * (len(cuts) + 3) // 2 >= MOST_SPANS_PER_ROW:
        return None
    runs = list(itertools.pairwise([keys.start, *cuts.tolist(), queries.stop]))
    spans = []
    for number, (start, stop) in enumerate(runs):
        own = slice(max(start, queries.start) - query_start, stop - query_start)
        for first, end in runs[: number + 1] if own.start < own.stop else ():
            seen = slice(first, min(end, keys.stop))
            if seen.start >= seen.stop:
                continue
            hidden = int(positions[stop - 1] - positions[seen.stop - 1])
            skipped = hidden - (stop - seen.stop)
            spans.append(Span(rows, own, seen, int(positions[first]), window + skipped, hidden=hidden))
    return spans


def _merge_equal_rows(spans: list[Span], batch_size: int) -> tuple[Span, ...]:
    """Replace the spans of equal rows by spans of all rows."""
    every_row = slice(0, batch_size)
    by_row: dict[int, list[Span]] = {}
    for span in spans:
        by_row.setdefault(span.rows.start, []).append(dataclasses.replace(span, rows=every_row))
    shapes = list(by_row.values())
    if len(shapes) == batch_size > 1 and all(shape == shapes[0] for shape in shapes):
        return tuple(shapes[0])
    return tuple(spans)
