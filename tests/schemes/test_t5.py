"""Buckets by their definition and as Transformers sorts them; the bias looked up in them."""

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from rope_patch import InvalidField, T5Bias, UnsupportedModel, patch
from rope_patch.buckets import relative_buckets
from rope_patch.schemes.base import Checkpoint
from tests.models.t5_definition import bucket

CHECKPOINT = Checkpoint(training_length=512, num_heads=4, max_length=512, bidirectional=True, buckets=(32, 128))
RELATIVE = torch.arange(-3000, 3001)


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (32, 1024), (16, 24), (64, 100), (8, 512), (6, 7)])
def test_buckets_are_those_of_transformers_and_of_the_definition(both, buckets, farthest):
    found = relative_buckets(RELATIVE, both, buckets, farthest)
    expected = T5Attention._relative_position_bucket(RELATIVE, both, buckets, farthest)
    assert torch.equal(found, expected)
    assert found.tolist() == [bucket(relative, both, buckets, farthest) for relative in RELATIVE.tolist()]
    assert found.max() == buckets - 1


def test_the_bias_is_looked_up_by_head():
    table = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    scheme = T5Bias().resolve(CHECKPOINT)
    distance = torch.tensor([[0, 5, -5], [200, -200, 1]])
    found = scheme.bias(distance, 4, {"relative_attention_bias": table})
    assert found.shape == (4, 2, 3)
    for head in range(4):
        for place, d in enumerate(distance.flatten().tolist()):
            assert found[head].flatten()[place] == table[bucket(-d, True, 32, 128), head]


@pytest.mark.parametrize("factor", [1.5, 4])
def test_interpolation_reaches_as_far_times_its_factor(factor):
    scheme = T5Bias(interpolation=factor).resolve(CHECKPOINT)
    table = torch.arange(32.0)[:, None]
    plain = T5Bias().resolve(CHECKPOINT)
    for distance in range(-600, 600, 7):
        stretched = torch.tensor([round(distance * factor)])
        nearest = torch.tensor([int(round(distance * factor) / factor)])
        weights = {"relative_attention_bias": table}
        assert torch.equal(scheme.bias(stretched, 1, weights), plain.bias(nearest, 1, weights))


def test_defaults_are_those_of_the_checkpoint():
    found = T5Bias(interpolation=2).resolve(CHECKPOINT)
    assert found == T5Bias(num_buckets=32, max_distance=128, bidirectional=True, interpolation=2)


@pytest.mark.parametrize(
    "fields", [{"num_buckets": 3}, {"max_distance": 1}, {"bidirectional": 1}, {"interpolation": 0}]
)
def test_wrong_fields_are_named(fields):
    with pytest.raises(InvalidField, match=next(iter(fields))):
        T5Bias(**fields)


def test_a_model_without_a_table_is_refused(llama):
    with pytest.raises(UnsupportedModel, match="relative_attention_bias"):
        patch(llama, "t5")
