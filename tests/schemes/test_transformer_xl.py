"""The scores of Transformers' XLNet layer, and the four terms of the paper as loops."""

import numpy as np
import pytest
import torch
from transformers import XLNetConfig
from transformers.models.xlnet.modeling_xlnet import XLNetModel, XLNetRelativeAttention

from rope_patch import InvalidField, TransformerXL
from rope_patch.schemes.slots import ModelShape
from rope_patch.schemes.tools.sinusoids import sinusoidal_rows
from tests.definition import Definition, no_rotation
from tests.schemes.pairs import SHAPE, make_pairs, random, trained

CASES = ["xl:initial_std=0.02", "xl:initial_std=0.02,clamp_len=5"]


def sinusoid(distance, dim):
    angles = distance / 10000 ** (np.arange(0, dim, 2) / dim)
    return np.concatenate([np.sin(angles), np.cos(angles)])


def three_terms(head, clamp_len=np.inf):
    """All terms of the paper but the first, which is the score of queries and keys itself."""
    d = head.q.shape[1]
    u, v = (head.learned[name][head.index] for name in ("content_offset", "distance_offset"))
    projection = head.learned["distance_projection"][head.index * d : (head.index + 1) * d]
    length, hidden = len(head.q), projection.shape[1]
    by_distance = np.stack([projection @ sinusoid(min(distance, clamp_len), hidden) for distance in range(length)])
    positions = by_distance[np.abs(head.m - head.n)]  # of later keys, too, but they are hidden
    return (head.k @ u + np.einsum("md,mnd->mn", head.q + v, positions)) / np.sqrt(d)


DEFINITIONS = {
    "xl:initial_std=0.02": Definition(distance=no_rotation, content_bias=three_terms),
    "xl:initial_std=0.02,clamp_len=5": Definition(
        distance=no_rotation, content_bias=lambda head: three_terms(head, clamp_len=5)
    ),
    "rope+xl:initial_std=0.02+logn:training_length=8": Definition(
        content_bias=three_terms, query_scale=lambda m: np.maximum(1, np.log(m + 1) / np.log(8))
    ),
}


@pytest.mark.parametrize(
    ("m", "n"), [(range(7), range(7)), (range(4, 7), range(7)), (range(3), range(0, 60, 9)), (range(9, 10), range(12))]
)
@pytest.mark.parametrize("clamp_len", [None, 1, 3])
def test_every_pair_gets_the_terms_of_the_paper(m, n, clamp_len):
    scheme, pairs = TransformerXL(clamp_len=clamp_len), make_pairs(m, n)
    most = clamp_len or 100
    weights = trained(scheme)
    found = scheme.content_bias(pairs, weights).detach()
    u, v, projection = (weights[name].detach().numpy() for name in weights)
    q, k = pairs.query.numpy(), pairs.key.numpy()
    for b, h, i, j in np.ndindex(*found.shape):
        distance = projection.reshape(3, 4, 12)[h] @ sinusoid(np.clip(m[i] - n[j], -most, most), 12)
        expected = 0.7 * (u[h] @ k[b, h, j] + (q[b, h, i] + v[h]) @ distance)
        np.testing.assert_allclose(found[b, h, i, j], expected, atol=1e-12)


@pytest.mark.parametrize("memory", [0, 3])
@pytest.mark.parametrize("clamp_len", [-1, 2, 4])
def test_scores_are_those_of_xlnet(memory, clamp_len):
    length = 6
    sizes = {"vocab_size": 20, "d_model": 12, "n_layer": 1, "n_head": 3, "d_inner": 8, "dropout": 0.0}
    config = XLNetConfig(**sizes, clamp_len=clamp_len)
    layer, shape = XLNetRelativeAttention(config).double().eval(), ModelShape(3, 4, 12, 1, 20, 16, 4)
    scheme = TransformerXL(untied=True, clamp_len=None if clamp_len < 0 else clamp_len)
    weights = trained(scheme, shape)
    pairs = make_pairs(range(memory, memory + length), range(memory + length), shape=shape)
    with torch.no_grad():
        layer.r_w_bias.copy_(weights["content_offset"])
        layer.r_r_bias.copy_(weights["distance_offset"])
        kv_length = memory + length
        r = XLNetModel(config).relative_positional_encoding(length, kv_length, bsz=2).double()
        k_head_r = torch.einsum("ibh,dh->ibd", r, weights["distance_projection"]).unflatten(-1, (3, 4))
        query, key = (x.permute(2, 0, 1, 3) for x in (pairs.query, pairs.key))
        values = random(kv_length, 2, 3, 4, seed=9)
        _, probabilities = layer.rel_attn_core(query, key, values, k_head_r, output_attentions=True)
        ours = pairs.query @ pairs.key.transpose(-1, -2) * layer.scale
        ours = ours + scheme.content_bias(pairs, weights) * (layer.scale / pairs.scaling)
    # their sinusoids are float32
    torch.testing.assert_close(ours.softmax(dim=-1), probabilities.permute(2, 3, 0, 1), atol=1e-6, rtol=0)


def test_a_shift_of_all_positions_changes_nothing():
    weights = trained(TransformerXL())
    here, there = (make_pairs(range(s, s + 7), range(s, s + 7)) for s in (0, 100_000))
    found = [TransformerXL().content_bias(pairs, weights) for pairs in (here, there)]
    torch.testing.assert_close(*found, atol=1e-9, rtol=0)


def test_offsets_are_shared_unless_they_are_untied():
    assert TransformerXL().shared == ("content_offset", "distance_offset")
    assert TransformerXL(untied=True).shared == ()


def test_sinusoids_of_any_shape_of_positions():
    rows = sinusoidal_rows(torch.tensor([[0, 1], [-2, 3]]), SHAPE.hidden_size, layout="split")
    np.testing.assert_allclose(rows[1, 0], sinusoid(-2, SHAPE.hidden_size), atol=1e-12)
    with pytest.raises(InvalidField, match="7 dimensions cannot be paired"):
        sinusoidal_rows(torch.arange(3), 7)


def test_a_wrong_field_is_named():
    with pytest.raises(InvalidField, match="untied"):
        TransformerXL(untied=1)
    with pytest.raises(InvalidField, match="clamp_len=0 is not allowed; clamp_len must be an integer of at least 1"):
        TransformerXL(clamp_len=0)
