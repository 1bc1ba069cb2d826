"""A scheme that only hides pairs of tokens leaves the checkpoint's positions: it equals the same attention mask."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

from rope_patch import ALiBi, Compose, LogN, NoPE, RoPE, Scheme, describe, patch
from rope_patch.description import rotated_distance
from rope_patch.schemes.base import Source
from tests.models import t5_families
from tests.runs import assert_close, cached_logits, left_padded, logits, positions_of, tokens

WIDTHS = (2, 5, 11, 40)
"""Of the window of each head, in tokens."""


@dataclass(frozen=True)
class HeadWindows(Scheme):
    """Every head sees a window of its own."""

    name = "head_windows"
    equation = "m - n < w_h"
    source = Source("a scheme of this test", 2026, "")
    only_masks = True

    def bias(self, distance, num_heads, weights=None):
        widths = torch.tensor(WIDTHS).view(-1, *[1] * distance.ndim)
        return torch.where(distance < widths, 0.0, -torch.inf)


@dataclass(frozen=True)
class HeadWindowsByContent(HeadWindows):
    """The same, where the mask could also depend on queries and keys."""

    name = "head_windows_by_content"
    bias = Scheme.bias

    def content_bias(self, pairs, weights=None):
        widths = torch.tensor(WIDTHS)[:, None, None]
        return torch.where(pairs.distance[:, None] < widths, 0.0, -torch.inf)


SCHEMES = [HeadWindows(), HeadWindowsByContent()]


def masks(positions, seen, causal=True):
    """What an unpatched model is given instead: 0 and -inf, `(rows, heads, length, length)`."""
    m, n = positions[:, None, :, None], positions[:, None, None, :]
    slots = torch.arange(positions.shape[-1])
    visible = (m - n < torch.tensor(WIDTHS)[:, None, None]) & seen[:, None, None].bool()
    if causal:
        visible = visible & (slots[:, None] >= slots)
    visible = visible | (slots[:, None] == slots)  # no row of a pad is empty
    return torch.where(visible, 0.0, -torch.inf)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_llama_under_a_mask(llama, scheme):
    ids, seen = left_padded([tokens(), tokens(29, seed=1)])
    positions = positions_of(seen)
    expected = logits(llama, ids, attention_mask=masks(positions, seen), position_ids=positions)
    assert (expected - logits(llama, ids, attention_mask=seen, position_ids=positions))[seen.bool()].abs().max() > 0.1
    with patch(llama, scheme) as handle:
        assert all(not isinstance(part, NoPE) for part in handle.mounted[0][1].scheme.parts())
        full = logits(llama, ids, attention_mask=seen, position_ids=positions)
        cached = cached_logits(llama, ids, [17, 1, 1, 4, *[1] * (ids.shape[1] - 23)], seen)
        text = describe(llama)
    for found in (full, cached):
        assert_close(found[seen.bool()], expected[seen.bool()])
    assert "replaced" not in text


@pytest.mark.parametrize("scheme", SCHEMES)
def test_t5_under_a_mask(scheme):
    model = t5_families.build()
    source, seen = left_padded([tokens(), tokens(29, seed=1)])
    places = torch.arange(source.shape[1]).expand_as(source)
    target = tokens(20, rows=2, seed=2)
    steps, all_seen = torch.arange(20).expand(2, -1), torch.ones(2, 20)
    with torch.no_grad():
        states = model.encoder(source, attention_mask=masks(places, seen, causal=False))[0]
        expected = model(
            encoder_outputs=(states,),
            attention_mask=seen,
            decoder_input_ids=target,
            decoder_attention_mask=masks(steps, all_seen),
        ).logits
        plain = model(source, attention_mask=seen, decoder_input_ids=target).logits
        assert (plain - expected).abs().max() > 0.1
        with patch(model, scheme):
            assert_close(model(source, attention_mask=seen, decoder_input_ids=target).logits, expected)
            own = model.encoder(source, attention_mask=seen)[0]
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
            cached = [
                model(
                    encoder_outputs=(own,),
                    attention_mask=seen,
                    decoder_input_ids=target[:, start:stop],
                    past_key_values=cache,
                ).logits
                for start, stop in ((0, 9), *((i, i + 1) for i in range(9, 20)))
            ]
            assert_close(torch.cat(cached, dim=1), expected)
            text = describe(model)
    assert text.count("the checkpoint's own, stays") == 2
    assert "replaced" not in text


def test_beside_other_schemes(llama):
    """A bias with positions still replaces the rotation, and a scheme that masks does not."""
    windows, logn = HeadWindows(), LogN(training_length=8)
    assert Compose(windows, logn).only_masks
    assert not Compose(windows, ALiBi()).only_masks
    assert not Compose(RoPE(), logn).only_masks
    ids = tokens()
    with patch(llama, windows, logn):
        kept = logits(llama, ids)
    with patch(llama, RoPE(), windows, logn):
        assert_close(kept, logits(llama, ids))
    with patch(llama, windows, ALiBi()) as handle:
        assert NoPE() in handle.mounted[0][1].scheme.parts()


def test_pairs_that_no_head_sees_are_described_as_hidden():
    assert [rotated_distance(HeadWindows(), 100, n) for n in (99, 61, 60, 0)] == ["1", "39", "hidden", "hidden"]
