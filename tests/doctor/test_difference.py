"""The first position at which two rotations part, against a look at every position."""

import random

import pytest

from rope_patch.doctor import Rotation, difference_of
from rope_patch.doctor.diagnosis import EXACT, SEEN, reach

WIDTH = 8
LONGEST = 96


def entry(draw):
    """A random rotation, near enough to others that some pairs of them part late."""
    kind = draw.choice(["default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"])
    values = {
        "theta": draw.choice([100.0, 100.0, 100.001, 100.5, 500.0]),
        "longest": draw.choice([LONGEST, 2 * LONGEST]),
        "factor": draw.choice([1.0, 1.00001, 1.001, 2.0, 4.0]),
    }
    if kind in ("yarn", "llama3", "longrope"):
        values["original"] = draw.choice([LONGEST // 2, LONGEST])
        values["attention_factor"] = draw.choice([1.0, 1.0, 1.1])
    if kind == "longrope":
        short = draw.choice([1.0, 1.0001])
        values |= {"short_factor": (short,) * 4, "long_factor": (1.0, draw.choice([1.0, 1.0002, 2.0]), 1.0, 1.0)}
    return Rotation(kind, head_dim=WIDTH, **values)


def angle(one, other, length):
    pairs = list(zip(one.frequencies(length), other.frequencies(length), strict=True))
    return length * max(abs(a - b) if abs(a - b) > EXACT * max(abs(a), abs(b)) else 0.0 for a, b in pairs)


def test_the_first_position_is_that_of_a_search_through_all():
    draw, late, silent = random.Random(0), 0, 0
    for _ in range(400):
        one, other = entry(draw), entry(draw)
        last = 16 * max(reach(one), reach(other))
        expected = next((length for length in range(1, last + 1) if angle(one, other, length) >= SEEN), None)
        found = difference_of(one, other)
        if one.temperature() != other.temperature():
            assert found.first == 0
            assert found.temperature == pytest.approx(other.temperature() / one.temperature())
        elif expected is None:
            assert found is None
            silent += 1
        else:
            assert found.first == expected, (one, other)
            late += expected > 1
            assert all(found.angles[length] == pytest.approx(angle(one, other, length)) for length in found.angles)
    assert late > 60
    assert silent > 20


@pytest.mark.parametrize("factor", [1.5, 2.0, 3.0, 8.0])
@pytest.mark.parametrize("theta", [100.0, 130.0, 200.0, 400.0])
def test_a_base_that_grows_is_followed(factor, theta):
    one = Rotation("dynamic", 100.0, WIDTH, longest=LONGEST, factor=factor)
    for other in (
        Rotation("default", theta, WIDTH, longest=LONGEST),
        Rotation("dynamic", theta, WIDTH, longest=2 * LONGEST, factor=2.0),
    ):
        expected = next((length for length in range(1, 40 * LONGEST) if angle(one, other, length) >= SEEN), None)
        assert (difference_of(one, other).first if expected else difference_of(one, other)) == expected


@pytest.mark.parametrize(
    ("theta", "width", "longest", "factor", "other"),
    [
        (3.0, 4, 16, 0.0005, 3.006),
        (20.0, 6, 4, 0.0005, 20.2),
        (1000.0, 4, 4, 0.01, 1100.0),
        (1000.0, 6, 16, 0.001, 1010.0),
        (20.0, 8, 16, 0.0005, 20.1),
    ],
)
def test_a_difference_that_sinks_for_a_while_is_seen_before(theta, width, longest, factor, other):
    """A base that grows slowly meets the other one, after the angles have parted and before they part again."""
    one = Rotation("dynamic", theta, width, longest=longest, factor=factor)
    plain = Rotation("default", other, width, longest=longest)
    expected = next(length for length in range(1, 16 * longest) if angle(one, plain, length) >= SEEN)
    assert difference_of(one, plain).first == expected


def test_the_lists_part_beyond_l():
    one = Rotation("longrope", 1e4, WIDTH, longest=512, original=128, short_factor=(1.0,) * 4, long_factor=(2.0,) * 4)
    other = Rotation("default", 1e4, WIDTH, longest=512)
    assert difference_of(one, other).first == 129
    assert difference_of(one, other).angles[128] == 0


def test_a_factor_alone_is_seen_at_every_position():
    one = Rotation("yarn", 1e4, WIDTH, longest=512, original=128, factor=4.0)
    other = Rotation("yarn", 1e4, WIDTH, longest=512, original=128, factor=4.0, attention_factor=1.0)
    found = difference_of(one, other)
    assert (found.first, found.words) == (0, "multiplies cos and sin by 1 instead of 1.139")
    assert set(found.angles.values()) == {0.0}


def test_axes_alone_concern_images():
    one = Rotation("default", 1e4, 128, longest=512, sections=(16, 24, 24))
    other = Rotation("default", 1e4, 128, longest=512, sections=(16, 24, 24), interleaved=True)
    assert difference_of(one, other).words == "gives the axes of an image to other pairs, so images differ"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"theta": 2e4}, "theta = 20000 instead of 10000"),
        ({"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.0}, "rope_type = yarn instead of default, factor"),
        ({"partial": 0.5}, "turns 4 of 8 dimensions instead of 8 of 8"),
    ],
)
def test_what_differs_is_named(changes, words):
    values = {"rope_type": "default", "theta": 1e4, "head_dim": WIDTH, "longest": 512}
    assert words in difference_of(Rotation(**values), Rotation(**values | changes)).words


def test_the_ends_of_other_ramps_are_named():
    values = {"rope_type": "llama3", "theta": 1e4, "head_dim": 64, "longest": 4096, "original": 512, "factor": 8.0}
    found = difference_of(Rotation(**values), Rotation(**values, high_freq_factor=8.0))
    assert found.words == "turns with high_freq_factor = 8 instead of 4"
