"""Errors against simulated texts whose truth is known, and against published quantiles."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rope_patch.evaluation.standard_errors import (
    TAIL,
    best_of_seeds,
    contrast,
    error_of_neighbours,
    is_below,
    loss_error,
    noise_of,
    paired_difference,
    standard_error,
    student,
)

from .rows import row

TEXTS = 2000  # simulated; the share of covered ones is then known to 0.5 %


def series(windows, correlation, seed=0, texts=TEXTS):
    """Losses of neighbouring windows, (texts, windows): autoregressive, with a mean of 0."""
    draws = np.random.default_rng(seed).standard_normal((texts, 40 + windows))
    for i in range(1, draws.shape[1]):
        draws[:, i] += correlation * draws[:, i - 1]
    return draws[:, 40:]


def covered(texts):
    """The share of texts whose mean is within two errors of the truth, 0."""
    return np.mean([abs(np.mean(losses)) < 2 * error_of_neighbours(losses) for losses in texts])


@pytest.mark.parametrize("windows", [4, 8, 16, 32])
@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_two_errors_of_neighbouring_windows_cover_the_truth(windows, correlation):
    texts = series(windows, correlation)
    assert 0.92 < covered(texts) < 0.98
    classical = abs(texts.mean(1)) < 2 * texts.std(1, ddof=1) / windows**0.5
    assert correlation < 0.5 or classical.mean() < 0.8  # what s / sqrt(n) makes of them


@pytest.mark.parametrize("windows", [8, 24])
def test_correlation_of_another_kind_is_covered_too(windows):
    draws = np.random.default_rng(1).standard_normal((TEXTS, windows + 2))
    assert 0.93 < covered(draws[:, 2:] + draws[:, 1:-1] + draws[:, :-2] / 2) < 0.975  # a moving average
    assert 0.93 < covered(np.random.default_rng(2).standard_t(5, (TEXTS, windows))) < 0.975  # heavy tails


def test_an_error_of_neighbours_is_its_definition_in_two_windows():
    seen = 0.67**2 / (1 + 0.33**2)  # cos(pi / 2) = 0
    assert error_of_neighbours([1.0, 1.2]) == pytest.approx(student(TAIL, 1) / 2 * (0.1**2 * 2 / seen / 2) ** 0.5)
    assert error_of_neighbours([3.0] * 9) == pytest.approx(0, abs=1e-12)
    for values in ([], [1.0], [1.0, math.nan, 2.0], [1.0, math.inf, 2.0]):
        assert error_of_neighbours(values) is None


@pytest.mark.parametrize(
    ("windows", "freedom"), [(2, 1), (3, 2), (4, 2), (7, 2), (8, 2), (11, 2), (12, 3), (16, 4), (40, 10)]
)
def test_an_error_of_neighbours_has_a_quarter_of_the_windows_as_degrees_of_freedom(windows, freedom):
    """Its definition as loops, and how many of its errors the best of several tries may be off."""
    x, squares, seen = series(windows, 0.3, texts=1)[0].tolist(), 0.0, 0.0
    for j in range(1, freedom + 1):
        b = (2 / windows) ** 0.5 * sum(x[i] * math.cos(math.pi * j * (i + 0.5) / windows) for i in range(windows))
        squares += b**2
        seen += 0.67**2 / (1 - 0.66 * math.cos(math.pi * j / windows) + 0.33**2)
    expected = student(TAIL, freedom) / 2 * (squares / (windows * seen)) ** 0.5
    assert error_of_neighbours(x) == pytest.approx(expected)
    of_one = row(documents=1, windows=windows + 1, nll_by_document=x)
    assert noise_of(of_one) == 2
    assert noise_of(of_one, 6) == pytest.approx(2 * student(TAIL / 6, freedom) / student(TAIL, freedom))


@pytest.mark.parametrize("tries", [1, 6])
@pytest.mark.parametrize("documents", [2, 3, 8, 12, 40])
def test_documents_have_one_degree_of_freedom_less_than_there_are(documents, tries):
    of_documents = row(documents=documents, nll_by_document=[2.0] * documents)
    assert noise_of(of_documents, tries) == pytest.approx(student(TAIL / tries, documents - 1))


def of_seeds(name, losses, length=512):
    return [{"encoding": name, "length": length, "seed": seed, "nll": nll} for seed, nll in enumerate(losses)]


@pytest.mark.parametrize(
    ("others", "errors", "best"), [(1, 4.4, {}), (1, 4.7, {512: "a"}), (2, 4.7, {}), (2, 6.6, {512: "a"})]
)
def test_the_best_of_three_seeds_is_so_by_two_degrees_of_freedom(others, errors, best):
    """Student's t beyond which 2.28 % lie is 4.53, and 6.50 for the better of two; with three degrees 3.31 and 4.31."""
    spread = 3**0.5 / errors  # the mean of the differences is 1, and their error 1 / errors
    better = of_seeds("a", [1.0, 1.0 + spread, 1.0 - spread])
    worse = [row for number in range(others) for row in of_seeds(f"b{number}", [2.0, 2.0, 2.0])]
    assert best_of_seeds(better + worse) == best
    failed = [{**row, "nll": nll} for row, nll in zip(of_seeds("c", [0.0, 0.0]), (None, math.nan), strict=True)]
    assert best_of_seeds(worse + failed + better) == best


@pytest.mark.parametrize(
    ("tail", "freedom", "t"),
    [(0.025, 1, 12.706), (0.025, 2, 4.303), (0.025, 3, 3.182), (0.05, 7, 1.895), (0.01, 10, 2.764), (0.005, 30, 2.750)],
)
def test_students_quantiles_are_the_published_ones(tail, freedom, t):
    assert student(tail, freedom) == pytest.approx(t, abs=5e-4)


def test_documents_are_independent_and_windows_of_few_documents_are_not():
    losses = series(16, 0.5, texts=1)[0].tolist()
    assert loss_error(row(documents=16, nll_by_document=losses)) == standard_error(losses)
    assert loss_error(row(documents=1, windows=16, nll_by_document=losses)) == error_of_neighbours(losses)
    assert loss_error(row(documents=3, windows=99, nll_by_document=losses)) == error_of_neighbours(losses)
    assert loss_error(row(documents=3, windows=3, nll_by_document=losses[:3])) == standard_error(losses[:3])
    assert loss_error(row(nll_by_document=[])) is None


def test_a_contrast_is_paired_term_by_term():
    losses = series(8, 0, texts=4)
    rows = [row(documents=8, nll=float(each.mean()), nll_by_document=each.tolist()) for each in losses]
    difference, error = contrast((1, rows[0]), (-1, rows[1]), (-1, rows[2]), (1, rows[3]))
    sums = losses[0] - losses[1] - losses[2] + losses[3]
    assert difference == pytest.approx(sums.mean())
    assert error == pytest.approx(standard_error(sums))
    assert contrast((1, rows[0]), (-1, rows[1])) == paired_difference(rows[0], rows[1])


@pytest.mark.parametrize("documents", [1, 12])
@pytest.mark.parametrize("tries", [1, 6])
def test_the_best_of_many_is_seldom_below_by_chance(documents, tries):
    """Under a true null: no line differs from the reference but by noise."""
    found, texts = 0, 1200 // tries
    for losses in series(12, 0.25 * (documents == 1), texts=texts * tries).reshape(texts, tries, 12):
        best = min(losses, key=np.mean)
        measured = {"documents": documents, "windows": 12}
        reference = row(nll=2.0, nll_by_document=[2.0] * 12, **measured)
        candidate = row(nll=2.0 + best.mean(), nll_by_document=(2.0 + best).tolist(), **measured)
        found += is_below(candidate, reference, tries)
        assert not is_below(reference, reference, tries)
    assert found / texts < 0.05
