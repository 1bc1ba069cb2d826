"""Disentangled scores by the paper's equation 4 and by both DeBERTa modules of Transformers, in float64."""

import numpy as np
import pytest
import torch
from transformers import DebertaConfig, DebertaV2Config
from transformers.models.deberta import modeling_deberta as v1
from transformers.models.deberta_v2 import modeling_deberta_v2 as v2

from rope_patch import Disentangled, InvalidField, UnsupportedPositions, get_scheme
from rope_patch.schemes.slots import Checkpoint, ModelShape, Tokens
from rope_patch.schemes.tools.buckets import signed_log_buckets
from tests.definition import Definition, no_rotation
from tests.schemes.pairs import SHAPE, at_start, make_pairs, random, trained

CASES = ["deberta:max_distance=12", "deberta:max_distance=12,terms=[c2p],absolute_layers=1,num_positions=700"]

CONFIG = {
    "hidden_size": 12,
    "num_attention_heads": 3,
    "relative_attention": True,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def delta(m, n, k):
    return 0 if m - n <= -k else 2 * k - 1 if m - n >= k else m - n + k


def disentangled(*terms, k=12):
    """The terms beside the content's; both read row delta(m, n), as the released code does."""

    def bias(head):
        d, table = head.q.shape[1], head.learned["relative_embeddings"]
        own = slice(head.index * d, (head.index + 1) * d)
        rows = np.array([[delta(m, n, k) for n in head.n[0]] for m in head.m[:, 0]])
        total = 0.0
        if "c2p" in terms:
            keys = table @ head.learned["position_key"][own].T
            total = total + np.einsum("md,mnd->mn", head.q, keys[rows])
        if "p2c" in terms:
            queries = table @ head.learned["position_query"][own].T + head.learned["position_query_offset"][own]
            total = total + np.einsum("nd,mnd->mn", head.k, queries[rows])
        return total / np.sqrt((1 + len(terms)) * d)

    return bias


def absolute_in_the_last_block(block, text):
    return text.x + text.learned["absolute_positions"][text.m] if block == 1 else text.x


DEFINITIONS = {
    "deberta:max_distance=12": Definition(
        distance=no_rotation, query_scale=lambda m: np.sqrt(1 / 3), content_bias=disentangled("c2p", "p2c")
    ),
    "deberta:max_distance=12,terms=[c2p],absolute_layers=1,num_positions=700": Definition(
        distance=no_rotation,
        query_scale=lambda m: np.sqrt(1 / 2),
        content_bias=disentangled("c2p"),
        block_embedding=absolute_in_the_last_block,
    ),
}


@pytest.mark.parametrize("terms", [("c2p",), ("p2c",), ("c2p", "p2c")])
@pytest.mark.parametrize("released", [True, False])
@pytest.mark.parametrize(("m", "n"), [(range(9), range(9)), (range(5, 9), range(9)), (range(4, 5), range(9))])
def test_every_pair_gets_the_terms_of_the_paper(terms, released, m, n):
    k = 3
    scheme, pairs = Disentangled(k, terms, released=released), make_pairs(m, n)
    weights = trained(scheme)
    plain = {name: weight.detach().numpy() for name, weight in weights.items()}
    table, found = plain["relative_embeddings"], scheme.content_bias(pairs, weights).detach()
    for b, h, i, j in np.ndindex(*found.shape):
        expected, own = 0.0, slice(4 * h, 4 * h + 4)
        if "c2p" in terms:
            expected += pairs.query[b, h, i].numpy() @ (plain["position_key"] @ table[delta(m[i], n[j], k)])[own]
        if "p2c" in terms:
            row = delta(m[i], n[j], k) if released else delta(n[j], m[i], k)
            position = plain["position_query"] @ table[row] + plain["position_query_offset"]
            expected += pairs.key[b, h, j].numpy() @ position[own]
        expected *= 0.7 / np.sqrt(1 + len(terms))
        np.testing.assert_allclose(found[b, h, i, j], expected, atol=1e-12)


def probabilities(scheme, pairs, weights, scaling=0.5):
    """Of a model whose own scaling is 1 / sqrt(4)."""
    scale = scheme.query_scale(pairs.m[:, :, 0], 1)[0].double()[:, None, :, None]
    scores = scale * pairs.query @ pairs.key.transpose(-1, -2) * scaling
    return (scores + scheme.content_bias(pairs, weights) * scaling / pairs.scaling).softmax(dim=-1)


def share_a_module(module, projection, query, weights):
    """Give one of theirs our queries, keys and learned tensors."""
    with torch.no_grad():
        projection.weight.copy_(weights["position_key"])
        query.weight.copy_(weights["position_query"])
        query.bias.copy_(weights["position_query_offset"])
    return module.double().eval()


@pytest.mark.parametrize("length", [5, 8, 20])
def test_scores_are_those_of_the_first_deberta_of_transformers(length):
    k = 8
    config = DebertaConfig(**CONFIG, max_relative_positions=k, pos_att_type=["c2p", "p2c"])
    theirs = v1.DisentangledSelfAttention(config)
    scheme, pairs = Disentangled(k), make_pairs(range(length), range(length))
    weights = trained(scheme)
    share_a_module(theirs, theirs.pos_proj, theirs.pos_q_proj, weights)
    distance = v1.build_relative_position(pairs.query, pairs.key)
    with torch.no_grad():
        query = pairs.query / 12**0.5
        bias = theirs.disentangled_att_bias(query, pairs.key, distance, weights["relative_embeddings"], 3)
        expected = (query @ pairs.key.transpose(-1, -2) + bias).softmax(dim=-1)
    torch.testing.assert_close(probabilities(scheme, pairs, weights), expected, atol=1e-6, rtol=0)  # scale is float32


@pytest.mark.parametrize(("buckets", "k", "length"), [(None, 8, 20), (8, 32, 20), (8, 16, 30), (6, 12, 40)])
def test_scores_are_those_of_the_second_deberta_of_transformers(buckets, k, length):
    config = DebertaV2Config(
        **CONFIG, max_relative_positions=k, pos_att_type=["c2p", "p2c"], position_buckets=buckets or -1
    )
    theirs = v2.DisentangledSelfAttention(config)
    scheme, pairs = Disentangled(k, buckets=buckets, clamped=False), make_pairs(range(length), range(length))
    weights = trained(scheme)
    share_a_module(theirs, theirs.pos_key_proj, theirs.pos_query_proj, weights)
    flat_query, flat_key = (x.flatten(0, 1) for x in (pairs.query, pairs.key))
    distance = v2.build_relative_position(flat_query, flat_key, buckets or -1, k)
    with torch.no_grad():
        bias = theirs.disentangled_attention_bias(flat_query, flat_key, distance, weights["relative_embeddings"], 3)
        expected = (flat_query @ flat_key.transpose(-1, -2) / 12**0.5 + bias).softmax(dim=-1)
    found = probabilities(scheme, pairs, weights).flatten(0, 1)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("buckets", "k"), [(256, 512), (128, 512), (8, 32), (6, 12), (9, 40)])
def test_buckets_are_those_of_transformers(buckets, k):
    distance = torch.arange(-4 * k, 4 * k + 1)
    assert torch.equal(
        signed_log_buckets(distance, buckets, k), v2.make_log_bucket_position(distance, buckets, k).long()
    )


def test_clamping_first_takes_a_row_from_far_keys_after_the_query():
    pairs = make_pairs(range(1), range(0, 400, 19))
    rows = [Disentangled(32, buckets=8, clamped=clamped)._rows(pairs.distance, 16) for clamped in (True, False)]
    assert rows[0].min() == 1
    assert rows[1].min() == 0
    assert torch.equal(rows[0], rows[1].clamp(min=1))


def test_scores_of_content_share_the_scale_unless_told_otherwise():
    positions = torch.arange(3)
    torch.testing.assert_close(Disentangled().query_scale(positions, 4), torch.full((1, 3), 3**-0.5))
    assert Disentangled().slots == {"bias", "query_scale"}
    assert Disentangled(scaled=False).slots == {"bias"}
    weights, pairs = trained(Disentangled(4)), make_pairs(range(6), range(6))
    plain, scaled = (Disentangled(4, scaled=scaled).content_bias(pairs, weights) for scaled in (False, True))
    torch.testing.assert_close(plain, scaled * 3**0.5)


def test_absolute_positions_join_the_last_layers_alone():
    scheme = Disentangled(absolute_layers=2).resolve(Checkpoint(16, 3, 16))
    assert scheme.slots == {"bias", "query_scale", "embedding"}
    assert scheme.every_block
    assert scheme.absolute
    assert not at_start(scheme)["absolute_positions"].any()
    weights, states, positions = trained(scheme), random(1, 4, 12), torch.tensor([[0, 1, 2, 15]])
    for remaining in range(5, 0, -1):
        found = scheme.embedding(Tokens(states, positions, remaining=remaining), weights)
        expected = states + weights["absolute_positions"][positions] if remaining <= 2 else states
        assert torch.equal(found, expected)
    with pytest.raises(UnsupportedPositions, match="position 16"):
        scheme.embedding(Tokens(states, positions + 1), weights)


def test_more_absolute_layers_than_layers_are_refused():
    with pytest.raises(InvalidField, match=r"absolute_layers=20; the stack has [0-9]+ layers"):
        at_start(Disentangled(absolute_layers=20))


def test_without_absolute_layers_it_is_relative():
    assert not Disentangled().absolute
    assert not Disentangled().every_block
    assert "absolute_positions" not in at_start(Disentangled())


def test_the_table_is_as_long_as_the_paper_has_it_or_the_training_length():
    long = ModelShape(**{**SHAPE.__dict__, "training_length": 4096})
    for shape, rows in ((SHAPE, 32), (long, 1024)):
        resolved = Disentangled().resolve(Checkpoint(shape.training_length, 3, shape.training_length))
        for scheme in (resolved, Disentangled()):
            assert at_start(scheme, shape)["relative_embeddings"].shape == (rows, 12)
    assert at_start(Disentangled(512, buckets=256), long)["relative_embeddings"].shape == (512, 12)


def test_terms_survive_text_and_dict():
    scheme = Disentangled(8, terms=["p2c"])
    assert get_scheme(str(scheme)) == scheme
    assert scheme.to_dict()["terms"] == ["p2c"]


@pytest.mark.parametrize(
    "fields",
    [
        {"terms": ()},
        {"terms": ("p2p",)},
        {"terms": ("c2p", "c2p")},
        {"terms": "c2p"},
        {"max_distance": 0},
        {"buckets": 2},
        {"max_distance": 129, "buckets": 256},
        {"absolute_layers": -1},
        {"scaled": 1},
    ],
)
def test_wrong_fields_are_named(fields):
    with pytest.raises(InvalidField, match=next(iter(fields))):
        Disentangled(**fields)
