"""Linear attention with rotations against the quadratic form of RoFormer's equation 19, in float64."""

import pytest
import torch

from rope_patch.attention import linear
from rope_patch.attention.linear import rotary_linear_attention
from rope_patch.errors import UnsupportedPositions
from rope_patch.schemes.tools.rotary import RotaryLayout, half_split, inverse_frequencies, rotation_tables
from tests.schemes.pairs import random

LAYOUTS = {
    "halves": half_split(6),
    "neighbours": RotaryLayout((0, 2, 4), (1, 3, 5)),
    "partial": RotaryLayout((1, 2), (4, 3)),
}


def tables(layout, length, dtype=torch.float64):
    frequencies = inverse_frequencies(2 * len(layout.first), 100.0)
    return rotation_tables(torch.arange(length)[None], frequencies, 1.0, dtype)


def states(length, heads=4, kv_heads=2):
    shapes = ((heads, 6), (kv_heads, 6), (kv_heads, 5))
    return [random(2, n, length, dim, seed=i).requires_grad_() for i, (n, dim) in enumerate(shapes)]


def quadratic(query, key, value, layout, causal):
    """Each pair rotated by its distance, each plane as complex numbers."""
    q, k = (torch.nn.functional.elu(x) + 1 for x in (query, key))
    k, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (k, value))
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    angle = (distance[..., None] * inverse_frequencies(2 * len(layout.first), 100.0)).double()
    planes = [torch.complex(x[..., list(layout.first)], x[..., list(layout.second)]) for x in (q, k)]
    turned = torch.einsum("bhmp,bhnp,mnp->bhmn", planes[0], planes[1].conj(), torch.polar(angle * 0 + 1, angle)).real
    still = [i for i in range(6) if i not in layout.first + layout.second]
    turned = turned + q[..., still] @ k[..., still].mT
    seen = (distance >= 0) | (not causal)
    return (turned * seen) @ value / (q @ k.mT * seen).sum(dim=-1, keepdim=True)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rows", [1, 8, 73, 128])
def test_it_is_the_quadratic_form_and_so_are_its_gradients(layout, causal, rows, monkeypatch):
    monkeypatch.setattr(linear, "ROWS", rows)
    inputs = states(73)
    found = rotary_linear_attention(*inputs, layout, *tables(layout, 73), causal=causal)
    expected = quadratic(*inputs, layout, causal)
    # the angles are float32
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    toward = random(*expected.shape, seed=9)
    gradients = [torch.autograd.grad(x, inputs, toward) for x in (found, expected)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_second_derivatives(causal, monkeypatch):
    monkeypatch.setattr(linear, "ROWS", 2)
    layout, inputs = half_split(6), [x[:1].detach().requires_grad_() for x in states(3, heads=2, kv_heads=1)]

    def attend(*inputs):
        return rotary_linear_attention(*inputs, layout, *tables(layout, 3), causal=causal)

    assert torch.autograd.gradgradcheck(attend, inputs)


@pytest.mark.parametrize("causal", [True, False])
def test_without_rotation_the_weights_of_a_row_sum_to_one(causal):
    query, key, value = states(9)
    cos, sin = torch.ones(1, 1, 9, 3), torch.zeros(1, 1, 9, 3)
    found = rotary_linear_attention(query, key, torch.ones_like(value), half_split(6), cos, sin, causal)
    torch.testing.assert_close(found, torch.ones_like(found))


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_summed_in_float32(autocast):
    layout, inputs = half_split(6), states(3000)
    halved = [x.bfloat16() for x in inputs]
    expected = rotary_linear_attention(*(x.double() for x in halved), layout, *tables(layout, 3000))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = rotary_linear_attention(*halved, layout, *tables(layout, 3000, torch.bfloat16))
        wide = rotary_linear_attention(*(x.float() for x in halved), layout, *tables(layout, 3000, torch.float32))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, atol=0.02, rtol=0.02)  # tables in bfloat16
    torch.testing.assert_close(wide.double(), expected, atol=1e-5, rtol=1e-5)


def test_very_negative_states_keep_their_proportions():
    """Where elu(x) + 1 rounds to zero in float32."""
    layout, (query, key, value) = half_split(6), states(7)
    inputs = query, key - 25, value
    expected = rotary_linear_attention(*inputs, layout, *tables(layout, 7))
    found = rotary_linear_attention(*(x.float() for x in inputs), layout, *tables(layout, 7, torch.float32))
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)


def test_a_cache_is_refused_by_name():
    query, key, value = states(7)
    with pytest.raises(UnsupportedPositions, match="1 queries and 7 keys"):
        rotary_linear_attention(query[:, :, -1:], key, value, half_split(6), *tables(half_split(6), 7))
