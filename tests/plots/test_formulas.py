from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from rope_patch import InvalidField, ReRoPE, RoPE, get_scheme
from rope_patch.plots import (
    decay_bounds,
    mean_inner_products,
    plot_decay_bound,
    plot_inner_product,
    plot_sinusoidal,
    plot_wavelengths,
    save,
    wavelengths_of,
)
from rope_patch.plots.style import band_of, number, short_name
from rope_patch.schemes.tools.sinusoids import sinusoidal_rows
from rope_patch.typing import RotarySpec

from .look import check_look, words_of

SPEC = RotarySpec(16, 10000.0, 256)


def theta(i, dim, base):
    return base ** (-2 * i / dim)


@pytest.mark.parametrize(("dim", "base"), [(2, 10000.0), (8, 100.0), (64, 500000.0)])
def test_the_inner_product_is_the_mean_of_cosines_and_that_of_the_vectors(dim, base):
    distance = torch.tensor([0, 1, 7, 300])
    found = mean_inner_products(distance, dim, base)
    expected = [sum(math.cos(theta(i, dim, base) * s) for i in range(dim // 2)) / (dim // 2) for s in (0, 1, 7, 300)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=3e-5)
    rows = sinusoidal_rows(torch.tensor([5, 5 + 7]), dim, base)
    assert float(rows[0] @ rows[1]) / (dim / 2) == pytest.approx(float(found[2]), abs=1e-6)
    assert found[0] == 1


@pytest.mark.parametrize(("dim", "base"), [(2, 10000.0), (8, 100.0), (64, 500000.0)])
def test_the_decay_bound_is_that_of_the_paper(dim, base):
    for distance in (0, 1, 7, 300):
        sums, running = [], 0
        for i in range(dim // 2):
            running += complex(math.cos(distance * theta(i, dim, base)), math.sin(distance * theta(i, dim, base)))
            sums.append(abs(running))
        found = float(decay_bounds(torch.tensor(distance), dim, base))
        assert found == pytest.approx(sum(sums) / len(sums), rel=2e-5)
    assert float(decay_bounds(torch.tensor(0), dim, base)) == (dim / 2 + 1) / 2


def test_the_bound_bounds_what_rotation_makes_of_a_product():
    """Summation by parts: |sum_i h_i e^(i s theta_i)| <= max |h_(i+1) - h_i| sum_i |S_(i+1)|, with h_(d/2) = 0."""
    random = torch.Generator().manual_seed(0)
    h = torch.randn(8, 2, dtype=torch.float64, generator=random)
    h = torch.complex(h[:, 0], h[:, 1])
    steps = torch.cat([h[1:], torch.zeros(1, dtype=h.dtype)]) - h
    for distance in (0, 3, 50, 2000):
        turns = torch.tensor(
            [complex(math.cos(a), math.sin(a)) for a in (distance * theta(i, 16, 1e4) for i in range(8))]
        )
        bound = steps.abs().max() * 8 * decay_bounds(torch.tensor(distance), 16)
        assert (h * turns).sum().abs() <= bound * (1 + 1e-6)


def test_wavelengths_of_rope_and_of_schemes():
    plain = wavelengths_of(RoPE(), SPEC)
    expected = [2 * math.pi / theta(i, 16, 10000.0) for i in range(8)]
    torch.testing.assert_close(plain, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)
    torch.testing.assert_close(wavelengths_of(get_scheme("pi:factor=4"), SPEC), 4 * plain, rtol=1e-6, atol=0)
    raised = wavelengths_of(get_scheme("ntk:factor=4"), SPEC)
    assert float(raised[0]) == pytest.approx(float(plain[0]))
    assert float(raised[-1]) == pytest.approx(4 * float(plain[-1]), rel=1e-5)
    assert wavelengths_of(get_scheme("nope"), SPEC).isinf().all()


def test_a_scheme_that_follows_the_length_is_drawn_at_that_length():
    dynamic = get_scheme("dynamic_ntk")
    assert torch.equal(wavelengths_of(dynamic, SPEC), wavelengths_of(RoPE(), SPEC))
    torch.testing.assert_close(
        wavelengths_of(dynamic, SPEC, length=1024), wavelengths_of(get_scheme("ntk:factor=4"), SPEC), rtol=1e-5, atol=0
    )


def test_bins_hold_every_value_once():
    distance = torch.arange(1, 1001)
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    band = band_of(distance, values)
    assert band.least.min() == values.double().min()
    assert band.greatest.max() == values.double().max()
    assert (band.least <= band.mean).all()
    assert (band.mean <= band.greatest).all()
    assert torch.equal(band.mean[:5], values[:5].double())  # near distances stand alone
    assert (band.distance.diff() > 0).all()
    assert band.distance[0] == 1


def test_numbers_and_names_to_read():
    assert [number(x) for x in (10, 4096, 10000, 500000, 1e6, 1.5e6, 12.25)] == [
        "10",
        "4,096",
        "10,000",
        "500,000",
        "1M",
        "1.5M",
        "12.25",
    ]
    assert short_name(get_scheme("yarn:factor=8.0")) == "yarn factor=8"
    assert short_name(get_scheme("rerope:window=128+logn")) == "rerope window=128 + logn"


PICTURES = {
    "sinusoidal": lambda: plot_sinusoidal(32, 16),
    "sinusoidal, by turns": lambda: plot_sinusoidal(16, 6, layout="interleaved"),
    "sinusoidal, odd sizes": lambda: plot_sinusoidal(1, 130),
    "wavelengths of one pair": lambda: plot_wavelengths(RotarySpec(2, 10000.0, 256)),
    "inner product": lambda: plot_inner_product((8, 16), 512),
    "inner product, marked": lambda: plot_inner_product((8,), 2, training_length=256),
    "decay bound": lambda: plot_decay_bound((100, 10000, 500000), 512, 16, training_length=64),
    "wavelengths": lambda: plot_wavelengths(SPEC, schemes=[get_scheme("yarn:factor=8"), get_scheme("nope")]),
    "wavelengths of bases": lambda: plot_wavelengths(SPEC, bases=(100, 10000)),
    "wavelengths of schemes": lambda: plot_wavelengths(SPEC, (), [get_scheme("dynamic_ntk")], length=512),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_can_be_read(name):
    check_look(PICTURES[name]())


def test_the_training_length_is_marked():
    assert "training length" in words_of(plot_wavelengths(SPEC))
    assert "training length" in words_of(plot_inner_product((8,), 512, training_length=64))
    assert "training length" not in words_of(plot_inner_product((8,), 512))


def test_the_same_picture_is_the_same_file(tmp_path):
    one, other = (save(plot_inner_product((8,), 64), tmp_path / name) for name in ("one.png", "other.png"))
    assert one.read_bytes() == other.read_bytes()
    assert one.read_bytes()[:4] == b"\x89PNG"


WRONG = {
    "length=0 is not allowed; length must be a whole number of at least 1": lambda: plot_sinusoidal(length=0),
    "dim=7 is not allowed; dim must be a multiple of 2": lambda: plot_sinusoidal(dim=7),
    "layout='splitt': did you mean 'split'": lambda: plot_sinusoidal(layout="splitt"),
    "base=0 is not allowed; base must be a number above 0": lambda: plot_sinusoidal(base=0),
    "dim=3 is not allowed": lambda: mean_inner_products(torch.tensor([1]), 3),
    "base=nan is not allowed": lambda: decay_bounds(torch.tensor([1]), 8, math.nan),
    "length=True is not allowed": lambda: plot_decay_bound(length=True),
    "dims: 0 were given": lambda: plot_inner_product(()),
    "bases: 9 were given; one to 8": lambda: plot_decay_bound((10,) * 9, 8),
    "training_length=-1 is not allowed": lambda: plot_inner_product((8,), 8, training_length=-1),
    "base=-5 is not allowed": lambda: plot_wavelengths(SPEC, bases=(-5,)),
    "bases and schemes: 0 were given": lambda: plot_wavelengths(SPEC, ()),
    "rerope:window=4 fills segments and has no frequencies; allowed: rope, pi": lambda: wavelengths_of(ReRoPE(4), SPEC),
    "length=0.5 is not allowed": lambda: wavelengths_of(RoPE(), SPEC, length=0.5),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_input_is_named(message):
    with pytest.raises(InvalidField) as error:
        WRONG[message]()
    assert message in str(error.value)


def test_importing_the_package_imports_no_pictures():
    code = "import rope_patch, rope_patch.cli, sys; print({'matplotlib', 'rope_patch.plots'} & sys.modules.keys())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_the_pictures_do_without_pyplot():
    code = "import rope_patch.plots, sys; print('matplotlib.pyplot' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
