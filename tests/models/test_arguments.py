"""The arguments of a forward, whose cache has another name since Transformers 5.24."""

import pytest
import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache

from rope_patch.doctor.versions import older
from rope_patch.models.arguments import (
    NAMES_OF_CACHE,
    cache_in,
    cached_length,
    counted_positions,
    name_of_cache,
    slot_positions,
    tokens_seen,
)
from tests.families import build


def filled(length):
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, length, 2), torch.zeros(1, 1, length, 2), 0)
    return cache


@pytest.mark.parametrize("name", NAMES_OF_CACHE)
def test_a_cache_is_found_by_either_name(name):
    cache = filled(5)
    kwargs = {"input_ids": torch.zeros(1, 3, dtype=torch.long), "attention_mask": None, name: cache}
    assert cache_in(kwargs) is cache
    assert cached_length(kwargs) == 5
    assert slot_positions(kwargs).tolist() == [[5, 6, 7]]


@pytest.mark.parametrize("name", NAMES_OF_CACHE)
def test_tokens_behind_a_cache_have_the_last_slots_of_a_mask(name):
    mask = torch.ones(1, 1, 3, 8, dtype=torch.bool)
    mask[..., 6] = False  # a pad, which no query attends to
    kwargs = {"input_ids": torch.zeros(1, 3, dtype=torch.long), "attention_mask": mask, name: filled(5)}
    assert tokens_seen(kwargs).tolist() == [[True, False, True]]


@pytest.mark.parametrize("name", NAMES_OF_CACHE)
def test_tokens_behind_a_cache_have_the_last_columns_of_a_mask(name):
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0, 1, 1]])  # pads before, behind and between
    kwargs = {"input_ids": torch.zeros(2, 3, dtype=torch.long), "attention_mask": mask, name: filled(5)}
    assert tokens_seen(kwargs).tolist() == [[True, True, False], [False, True, True]]


@pytest.mark.filterwarnings("error::FutureWarning")
@torch.no_grad()
def test_a_model_takes_a_cache_by_the_name_that_it_has():
    model, cache = build("llama"), DynamicCache()
    found = name_of_cache(model)
    model(torch.ones(1, 3, dtype=torch.long), **{found: cache})
    assert cache.get_seq_length() == 3
    assert (found == "cache") != older(transformers.__version__, "5.24")


def test_of_an_encoder_and_a_decoder_the_decoder_keeps_the_texts():
    own = filled(4)
    assert cache_in({"cache": EncoderDecoderCache(own, filled(9))}) is own


def test_without_a_cache_nothing_is_before_the_tokens():
    kwargs = {"input_ids": torch.zeros(2, 3, dtype=torch.long), "cache": None, "past_key_values": None}
    assert cache_in(kwargs) is None
    assert cached_length(kwargs) == 0
    assert slot_positions(kwargs).tolist() == [[0, 1, 2]]


COUNTED = {
    "pads on the left": ([0, 0, 1, 1, 1], [-2, -1, 0, 1, 2]),
    "on the right": ([1, 1, 1, 0, 0], [0, 1, 2, 3, 4]),
    "on both sides": ([0, 1, 1, 0, 0], [-1, 0, 1, 2, 3]),
    "between": ([1, 1, 0, 0, 1], [0, 1, 1, 1, 2]),
    "everywhere": ([0, 0, 0, 0, 0], [0, 1, 2, 3, 4]),
    "nowhere": ([1, 1, 1, 1, 1], [0, 1, 2, 3, 4]),
}
"""A row of a mask, and the positions of its slots."""


@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32])
def test_tokens_are_counted_in_each_row(dtype):
    mask = torch.tensor([row for row, _ in COUNTED.values()]).to(dtype)
    expected = [positions for _, positions in COUNTED.values()]
    kwargs = {"input_ids": torch.zeros(mask.shape, dtype=torch.long), "attention_mask": mask}
    assert counted_positions(kwargs).tolist() == expected
    for start in (1, 3, 4):
        kwargs = {"input_ids": torch.zeros(len(mask), 5 - start, dtype=torch.long), "attention_mask": mask}
        assert counted_positions({**kwargs, "cache": filled(start)}).tolist() == [row[start:] for row in expected]
        longer = torch.nn.functional.pad(mask, (0, 4))  # of a static cache
        found = counted_positions({**kwargs, "attention_mask": longer, "cache": filled(start)}).tolist()
        assert found == [row[start:] for row in expected]


def test_a_mask_that_shows_no_pad_before_a_token_counts_nothing():
    ids = torch.zeros(2, 3, dtype=torch.long)
    pads = torch.tensor([[0, 1, 1], [1, 1, 1]])
    pairs = (pads[:, None, None] > 0) & torch.ones(3, 3, dtype=torch.bool).tril()
    hidden = {"a mask of your own": pairs, "no mask": None, "right pads": pads.flip(-1), "too short": pads[:, 1:]}
    for name, mask in hidden.items():
        assert counted_positions({"input_ids": ids, "attention_mask": mask}) is None, name
    by_layer_type = {"sliding_attention": None, "full_attention": pairs}
    assert counted_positions({"input_ids": ids, "attention_mask": by_layer_type}).tolist() == [[-1, 0, 1], [0, 1, 2]]
    assert counted_positions({"input_ids": None, "attention_mask": pads}) is None
