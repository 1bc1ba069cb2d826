"""Linear attention with rotary positions against the quadratic form of RoFormer's equation 19, in float64."""

import pytest
import torch

from rope_patch.attention import linear
from rope_patch.attention.linear import rotary_linear_attention
from rope_patch.schemes.tools.rotary import RotaryLayout, half_split, inverse_frequencies, rotation_tables
from tests.schemes.pairs import random

INTERLEAVED = RotaryLayout((0, 2, 4), (1, 3, 5))


def tables(length, dim=6):
    positions = torch.arange(length)[None]
    return rotation_tables(positions, inverse_frequencies(dim, 100.0), 1.0, torch.float64)


def states(length, kv_length=None):
    kv_length = kv_length or length
    return [random(2, 3, n, d, seed=i) for i, (n, d) in enumerate([(length, 6), (kv_length, 6), (kv_length, 5)])]


def quadratic(query, key, value, layout, causal):
    """Each pair turned by its distance, its plane as complex numbers."""
    q, k = (torch.where(x > 0, x + 1, x.exp()) for x in (query, key))
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    angle = distance[..., None] * inverse_frequencies(6, 100.0).double()
    as_complex = [torch.complex(x[..., list(layout.first)], x[..., list(layout.second)]) for x in (q, k)]
    turned = torch.einsum("bhmp,bhnp,mnp->bhmn", as_complex[0], as_complex[1].conj(), torch.polar(angle * 0 + 1, angle))
    plain = torch.einsum("bhmd,bhnd->bhmn", q, k)
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return (turned.real * seen) @ value / (plain * seen).sum(dim=-1, keepdim=True)


@pytest.mark.parametrize("layout", [half_split(6), INTERLEAVED])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rows", [1, 4, 13, 128])
def test_it_is_the_quadratic_form_and_so_are_its_gradients(layout, causal, rows, monkeypatch):
    monkeypatch.setattr(linear, "ROWS", rows)
    inputs = [x.requires_grad_() for x in states(13)]
    found = rotary_linear_attention(*inputs, layout, *tables(13), causal=causal)
    expected = quadratic(*inputs, layout, causal)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)  # the angles are float32
    toward = random(*expected.shape, seed=9)
    slopes = [torch.autograd.grad((x * toward).sum(), inputs) for x in (found, expected)]
    for ours, theirs in zip(*slopes, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_without_rotation_the_weights_of_a_row_sum_to_one():
    query, key, value = states(9)
    cos, sin = (torch.full_like(x, number) for x, number in zip(tables(9), (1.0, 0.0), strict=True))
    found = rotary_linear_attention(query, key, torch.ones_like(value), half_split(6), cos, sin)
    torch.testing.assert_close(found, torch.ones_like(found))


def test_half_precision_is_summed_in_float32():
    inputs = states(300)
    expected = rotary_linear_attention(*inputs, half_split(6), *tables(300))
    halved = rotary_linear_attention(*(x.bfloat16() for x in inputs), half_split(6), *tables(300))
    assert halved.dtype == torch.bfloat16
    torch.testing.assert_close(halved.double(), expected, atol=0.1, rtol=0.1)
