import math

import numpy as np
import pytest
import torch
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

from rope_patch import InvalidField, Sinusoidal
from rope_patch.schemes.tools.sinusoids import sinusoidal_rows
from tests.definition import Definition, no_rotation
from tests.schemes.entering import some_tokens

CASES = ["sinusoidal"]


def encoded(pos, dim, base=10000.0):
    """PE of one position, the paper's section 3.5 one dimension at a time."""
    row = np.empty(dim)
    for i in range(dim // 2):
        row[2 * i] = math.sin(pos / base ** (2 * i / dim))
        row[2 * i + 1] = math.cos(pos / base ** (2 * i / dim))
    return row


def with_sinusoids(text):
    return text.x + np.stack([encoded(pos, text.x.shape[1]) for pos in text.m])


DEFINITIONS = {"sinusoidal": Definition(distance=no_rotation, embedding=with_sinusoids)}


def native(n=5, dim=12):
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("base", [10000.0, 100])
def test_every_row_is_the_published_one(base):
    found = Sinusoidal(base=base, num_positions=400).rows(native())
    expected = np.stack([encoded(pos, 12, base) for pos in range(400)])
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-12)


def test_split_is_the_layout_of_transformers():
    theirs = MarianSinusoidalPositionalEmbedding(400, 12).create_weight()
    found = Sinusoidal(num_positions=400, layout="split").rows(native())
    torch.testing.assert_close(found.float(), theirs, atol=1e-6, rtol=0)


def test_the_layouts_are_permutations_of_each_other():
    rows, split = (sinusoidal_rows(torch.arange(50), 12, layout=layout) for layout in ("interleaved", "split"))
    assert torch.equal(rows[:, 0::2], split[:, :6])
    assert torch.equal(rows[:, 1::2], split[:, 6:])


@pytest.mark.parametrize("shift", [1, 17, 1000])
def test_a_shift_is_one_rotation_wherever_it_happens(shift):
    rows = sinusoidal_rows(torch.arange(5000), 16)
    sine, cosine = rows[shift, 0::2], rows[shift, 1::2]
    before, after = rows[: 5000 - shift], rows[shift:]
    turned = torch.empty_like(before)
    turned[:, 0::2] = before[:, 0::2] * cosine + before[:, 1::2] * sine
    turned[:, 1::2] = before[:, 1::2] * cosine - before[:, 0::2] * sine
    torch.testing.assert_close(turned, after, atol=1e-10, rtol=0)


def test_angles_keep_their_digits_at_a_million_positions():
    found = sinusoidal_rows(torch.tensor([1_000_003]), 8)[0]
    np.testing.assert_allclose(found.numpy(), encoded(1_000_003, 8), rtol=0, atol=1e-9)


def test_the_default_table_is_32_times_as_long():
    assert Sinusoidal().rows(native(5)).shape == (160, 12)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (3, 5), (7, 2)])
@pytest.mark.parametrize("layout", ["interleaved", "split"])
def test_the_grid_says_its_row_in_one_half_and_its_column_in_the_other(height, width, layout):
    scheme = Sinusoidal(base=50.0, num_positions=height * width, layout=layout, grid_width=width)
    found = scheme.rows(native(dim=16)).numpy()
    order = slice(None) if layout == "interleaved" else [0, 2, 4, 6, 1, 3, 5, 7]
    for y in range(height):
        for x in range(width):
            expected = np.concatenate([encoded(y, 8, 50.0)[order], encoded(x, 8, 50.0)[order]])
            np.testing.assert_allclose(found[y * width + x], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("layout", ["interleaved", "split"])
def test_the_sinusoids_of_the_positions_are_added_to_the_tokens(layout):
    tokens = some_tokens([[0, 0, 1, 2], [70_000, 70_001, 0, 31]], hidden=12)
    found = Sinusoidal(base=100, layout=layout, amplitude=0.25).embedding(tokens) - tokens.states
    order = slice(None) if layout == "interleaved" else [0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11]
    expected = [[0.25 * encoded(pos, 12, 100)[order] for pos in row] for row in tokens.positions.tolist()]
    np.testing.assert_allclose(found.numpy(), np.array(expected), rtol=0, atol=1e-12)


def test_patches_of_an_image_are_placed_by_row_and_column():
    tokens = some_tokens([[0, 4, 5, 6, 1234]], hidden=16)
    found = Sinusoidal(grid_width=5).embedding(tokens) - tokens.states
    places = [(0, 0), (0, 4), (1, 0), (1, 1), (246, 4)]
    expected = [np.concatenate([encoded(y, 8), encoded(x, 8)]) for y, x in places]
    np.testing.assert_allclose(found[0].numpy(), np.array(expected), rtol=0, atol=1e-12)


def test_dimensions_that_do_not_pair_are_refused():
    with pytest.raises(InvalidField, match="7 dimensions cannot be paired"):
        Sinusoidal().rows(native(dim=7))
    with pytest.raises(InvalidField, match="6 dimensions cannot be paired on two axes"):
        Sinusoidal(grid_width=2).rows(native(dim=6))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("base", 0), ("base", -1.0), ("base", "10"), ("num_positions", 0), ("num_positions", 1.5)],
        *[("layout", "halves"), ("amplitude", 0), ("grid_width", 0), ("grid_width", 2.5)],
    ],
)
def test_fields_are_named(field, value):
    with pytest.raises(InvalidField, match=f"sinusoidal: {field}="):
        Sinusoidal(**{field: value})
