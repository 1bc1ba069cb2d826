"""The arguments of a forward, whose cache has another name since Transformers 5.24."""

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

from rope_patch.models.arguments import cache_in, cached_length, counted_positions, slot_positions, tokens_seen

NAMES = "cache", "past_key_values"


def filled(length):
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, length, 2), torch.zeros(1, 1, length, 2), 0)
    return cache


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_is_found_by_either_name(name):
    cache = filled(5)
    kwargs = {"input_ids": torch.zeros(1, 3, dtype=torch.long), "attention_mask": None, name: cache}
    assert cache_in(kwargs) is cache
    assert cached_length(kwargs) == 5
    assert slot_positions(kwargs).tolist() == [[5, 6, 7]]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_behind_a_cache_have_the_last_slots_of_a_mask(name):
    mask = torch.ones(1, 1, 3, 8, dtype=torch.bool)
    mask[..., 6] = False  # a pad, which no query attends to
    kwargs = {"input_ids": torch.zeros(1, 3, dtype=torch.long), "attention_mask": mask, name: filled(5)}
    assert tokens_seen(kwargs).tolist() == [[True, False, True]]


def test_of_an_encoder_and_a_decoder_the_decoder_keeps_the_texts():
    own = filled(4)
    assert cache_in({"cache": EncoderDecoderCache(own, filled(9))}) is own


def test_without_a_cache_nothing_is_before_the_tokens():
    kwargs = {"input_ids": torch.zeros(2, 3, dtype=torch.long), "cache": None, "past_key_values": None}
    assert cache_in(kwargs) is None
    assert cached_length(kwargs) == 0
    assert slot_positions(kwargs).tolist() == [[0, 1, 2]]
