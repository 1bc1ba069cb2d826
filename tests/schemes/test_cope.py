"""The listing of the paper's appendix, written as loops over single pairs."""

import math

import numpy as np
import pytest
import torch

from rope_patch import CoPE, InvalidField
from rope_patch.schemes.slots import Checkpoint
from tests.definition import Definition, no_rotation
from tests.schemes.pairs import at_start, make_pairs, trained

CASES = ["cope:max_positions=12"]


def listing(query, scores, seen, table):
    """b of one query, `(kv_len,)`."""
    last = len(table) - 1
    gates = [1 / (1 + math.exp(-s)) if visible else 0.0 for s, visible in zip(scores, seen, strict=True)]
    found = []
    for j in range(len(gates)):
        position = min(sum(gates[j:]), last)
        low, high = math.floor(position), math.ceil(position)
        share = position - low
        found.append((1 - share) * query @ table[low] + share * query @ table[high])
    return found


def counted(head):
    seen, table = head.m >= head.n, head.learned["position_table"]
    return np.array([listing(q, scores, row, table) for q, scores, row in zip(head.q, head.scores, seen, strict=True)])


DEFINITIONS = {"cope:max_positions=12": Definition(distance=no_rotation, content_bias=counted)}


@pytest.mark.parametrize("positions", [2, 3, 5, 40])
@pytest.mark.parametrize(("m", "n"), [(range(9), range(9)), (range(5, 9), range(12)), (range(8, 9), range(9))])
def test_every_query_gets_what_the_listing_gives(positions, m, n):
    scheme, pairs = CoPE(positions), make_pairs(m, n)
    weights = trained(scheme)
    table = weights["position_table"].detach().numpy()
    found = scheme.content_bias(pairs, weights).detach().numpy()
    for b, h, i in np.ndindex(*found.shape[:3]):
        seen = pairs.seen[0, 0, i].tolist()
        expected = listing(pairs.query[b, h, i].numpy(), pairs.scores[b, h, i].tolist(), seen, table)
        np.testing.assert_allclose(found[b, h, i], expected, atol=1e-12)


def test_hidden_keys_do_not_count():
    weights, pairs = trained(CoPE(20)), make_pairs(range(4), range(4))
    padded = make_pairs(range(4), range(4), seen=pairs.seen & (torch.arange(4) != 1))
    padded.scores[..., 1] = 1e4
    removed = make_pairs(range(4), range(4))
    removed.scores[..., 1] = -1e4
    found = [CoPE(20).content_bias(p, weights) for p in (padded, removed)]
    torch.testing.assert_close(*found)


def test_gradients_flow_through_the_gates():
    weights, pairs = trained(CoPE(20)), make_pairs(range(6), range(6))
    pairs.scores.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda scores, table: CoPE(20).content_bias(
            type(pairs)(pairs.query, pairs.key, pairs.m, pairs.n, scores, pairs.seen, pairs.scaling),
            {"position_table": table},
        ),
        (pairs.scores, weights["position_table"]),
    )


def test_at_the_start_nothing_is_added_and_the_table_has_a_row_per_position():
    scheme = CoPE().resolve(Checkpoint(training_length=16, num_heads=3, max_length=16))
    assert scheme == CoPE(16)
    weights = at_start(scheme)
    assert weights["position_table"].shape == (16, 4)
    assert not scheme.content_bias(make_pairs(range(9), range(9)), weights).any()


@pytest.mark.parametrize("positions", [1, 2.5, True])
def test_wrong_fields_are_named(positions):
    with pytest.raises(InvalidField, match="max_positions"):
        CoPE(positions)
