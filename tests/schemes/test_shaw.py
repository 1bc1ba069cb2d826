"""Shaw's two equations, written as loops over pairs with a vector for each."""

import numpy as np
import pytest

from rope_patch import InvalidField, ShawRelative
from tests.definition import Definition, no_rotation
from tests.schemes.pairs import at_start, make_pairs, random, trained

CASES = ["shaw:max_distance=6", "shaw:max_distance=6,shared_heads=false,per_layer=false"]


def row(m, n, k):
    return max(-k, min(k, n - m)) + k


def vectors(head, name, k=6):
    """A vector for each pair, `(length, length, d)`, from a table of all heads or from the head's own."""
    table = head.learned[name]
    own = table if table.ndim == 2 else table[head.index]
    return own[np.clip(head.n - head.m, -k, k) + k]


def beside_keys(head):
    return np.einsum("md,mnd->mn", head.q, vectors(head, "key_table")) / np.sqrt(head.q.shape[1])


def beside_values(head):
    return vectors(head, "value_table")


DEFINITIONS = {
    "shaw:max_distance=6": Definition(distance=no_rotation, content_bias=beside_keys, relative_values=beside_values),
    "shaw:max_distance=6,shared_heads=false,per_layer=false": Definition(
        distance=no_rotation, content_bias=beside_keys, relative_values=beside_values
    ),
    "rope+shaw:max_distance=6": Definition(content_bias=beside_keys, relative_values=beside_values),
    "rerope:window=6+shaw:max_distance=6": Definition(
        distance=lambda m, n: np.minimum(m - n, 6), content_bias=beside_keys, relative_values=beside_values
    ),
}


@pytest.mark.parametrize("shared_heads", [True, False])
@pytest.mark.parametrize(("m", "n"), [(range(9), range(9)), (range(5, 9), range(9)), (range(8, 9), range(9))])
def test_scores_and_values_are_those_of_the_paper(shared_heads, m, n):
    scheme = ShawRelative(max_distance=3, shared_heads=shared_heads)
    weights, pairs = trained(scheme), make_pairs(m, n)
    attention = random(2, 3, len(m), len(n), seed=7).softmax(dim=-1)
    bias = scheme.content_bias(pairs, weights)
    added = scheme.relative_values(attention, pairs.distance, weights)
    keys, values = (weights[name].detach().numpy() for name in ("key_table", "value_table"))
    for b, h, i in np.ndindex(2, 3, len(m)):
        key_rows, value_rows = (table if shared_heads else table[h] for table in (keys, values))
        for j, position in enumerate(n):
            expected = 0.7 * pairs.query[b, h, i].numpy() @ key_rows[row(m[i], position, 3)]
            np.testing.assert_allclose(bias[b, h, i, j].item(), expected, atol=1e-12)
        total = sum(float(attention[b, h, i, j]) * value_rows[row(m[i], n[j], 3)] for j in range(len(n)))
        np.testing.assert_allclose(added[b, h, i].detach().numpy(), total, atol=1e-12)


def test_at_the_start_nothing_is_added():
    scheme, pairs = ShawRelative(), make_pairs(range(9), range(9))
    weights = at_start(scheme)
    assert not scheme.content_bias(pairs, weights).any()
    assert not scheme.relative_values(pairs.scores.softmax(dim=-1), pairs.distance, weights).any()


def test_tables_have_the_shapes_that_the_fields_say():
    assert {name: tuple(w.shape) for name, w in at_start(ShawRelative(8)).items()} == {
        "key_table": (17, 4),
        "value_table": (17, 5),
    }
    alone = ShawRelative(values=False, shared_heads=False, per_layer=False)
    assert alone.methods == {"content_bias"}
    assert alone.slots == {"bias"}
    assert {name: tuple(w.shape) for name, w in at_start(alone).items()} == {"key_table": (3, 33, 4)}
    assert "key_table" in alone.shared
    assert ShawRelative().shared == ()
    assert ShawRelative().slots == {"bias", "values"}


@pytest.mark.parametrize("fields", [{"max_distance": 0}, {"max_distance": 2.5}, {"values": 1}, {"shared_heads": None}])
def test_wrong_fields_are_named(fields):
    with pytest.raises(InvalidField, match=next(iter(fields))):
        ShawRelative(**fields)
