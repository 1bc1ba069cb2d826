"""Buckets by their definition and as Transformers sorts them; the bias looked up in them."""

import numpy as np
import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from rope_patch import InvalidField, T5Bias, patch
from rope_patch.schemes.slots import Checkpoint
from rope_patch.schemes.tools.buckets import relative_buckets
from tests.definition import Definition, no_rotation
from tests.models.t5_definition import bucket
from tests.runs import assert_close, logits, tokens
from tests.schemes.pairs import at_start

CASES = ["t5:interpolation=2", "t5:per_layer=true"]

CHECKPOINT = Checkpoint(training_length=512, num_heads=4, max_length=512, bidirectional=True, buckets=(32, 128))
RELATIVE = torch.arange(-3000, 3001)


def looked_up(interpolation):
    """The number of each pair's bucket: 32 of them, the last one from distance 128 on, and none for later keys."""

    def bias(head):
        distances = range(len(head.q))
        rows = np.array([bucket(-int(distance / interpolation), False, 32, 128) for distance in distances])
        return head.learned["relative_attention_bias"][rows[np.abs(head.m - head.n)], head.index]

    return bias


DEFINITIONS = {
    "t5:interpolation=2": Definition(distance=no_rotation, content_bias=looked_up(2)),
    "self_extend:group_size=4,window=7+t5": Definition(
        distance=lambda m, n: np.where(m - n < 7, m - n, m // 4 + 6 - n // 4), content_bias=looked_up(1)
    ),
    "t5:per_layer=true": Definition(distance=no_rotation, content_bias=looked_up(1)),
}


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


@pytest.mark.parametrize("buckets", [None, 16])
def test_a_model_without_a_table_gets_one_that_adds_nothing(buckets):
    scheme = T5Bias(num_buckets=buckets)
    weights = at_start(scheme)
    assert weights["relative_attention_bias"].shape == (buckets or 32, 3)
    assert not scheme.bias(torch.arange(-9, 9), 3, weights).any()


def test_layers_share_the_table_as_in_t5_or_have_their_own_as_in_umt5():
    assert T5Bias().shared == ("relative_attention_bias",)
    assert T5Bias(per_layer=True).shared == ()


@pytest.mark.parametrize(
    "fields", [{"num_buckets": 3}, {"max_distance": 1}, {"bidirectional": 1}, {"interpolation": 0}, {"per_layer": 1}]
)
def test_wrong_fields_are_named(fields):
    with pytest.raises(InvalidField, match=next(iter(fields))):
        T5Bias(**fields)


def test_on_a_model_without_a_table_it_starts_as_no_position_at_all(llama):
    with patch(llama, "nope"):
        expected = logits(llama, tokens())
    with patch(llama, "t5"):
        assert_close(logits(llama, tokens()), expected)
