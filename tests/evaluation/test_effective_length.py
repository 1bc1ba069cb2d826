"""Effective length against scores whose answer is plain, and its range against simulated answers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rope_patch.evaluation.effective_length import effective_length, variance_of

from .retrieval_rows import row


def measured(scores, trials=100, depths=(0.0, 1.0), **changed):
    """Rows of one line: scores by length, each the mean of two depths."""
    return [
        row(length=length, depth=depth, trials=trials, accuracy=score + side * min(score, 1 - score), **changed)
        for length, score in scores.items()
        for depth, side in zip(depths, (-1, 1), strict=True)
    ]


@pytest.mark.parametrize(
    ("scores", "length"),
    [
        ({256: 1.0, 512: 0.9, 1024: 0.1}, 512),
        ({256: 1.0, 512: 0.85, 1024: 0.849}, 512),
        ({256: 0.4, 512: 0.34, 1024: 0.33}, 512),  # of its own best score, 0.4
        ({128: 0.9, 256: 1.0, 512: 0.84}, 256),  # the best of those up to L
        ({128: 1.0, 256: 0.7, 512: 0.2}, 128),
        ({256: 1.0, 512: 0.2, 1024: 0.9}, 1024),  # the longest, whatever lies between
        ({512: 0.9, 1024: 0.9, 2048: 0.5}, 1024),  # nothing within L was measured: the shortest
        ({256: 0.5}, 256),
    ],
)
def test_the_longest_length_with_085_of_the_best_score_at_the_shortest(scores, length):
    found = effective_length(measured(scores))
    assert found.length == length
    assert found.low <= length <= found.high
    assert found.base == pytest.approx(max(score for n, score in scores.items() if n <= max(256, min(scores))))


def test_a_checkpoint_that_cannot_do_the_task_has_none():
    assert effective_length(measured({256: 0.05, 512: 0.06})) is None
    assert effective_length([row(accuracy=math.nan)]) is None


def test_few_questions_leave_a_range_and_many_do_not():
    scores = {256: 1.0, 512: 0.8, 1024: 0.3}
    assert effective_length(measured(scores, trials=5)) == effective_length(measured(scores, trials=5, span=None))
    few, many = (effective_length(measured(scores, trials=trials)) for trials in (5, 2000))
    assert (few.low, few.length, few.high) == (256, 256, 512)
    assert (many.low, many.length, many.high) == (256, 256, 256)
    assert str(few) == "256 tokens (256 to 512 within two errors)"
    assert str(many) == "256 tokens"


@pytest.mark.parametrize("shares", [[0.5], [0.9, 0.4], [1.0, 0.0, 0.25, 0.75]])
@pytest.mark.parametrize("trials", [4, 100])
def test_the_variance_of_a_mean_is_that_of_independent_cells(shares, trials):
    """Of shares with two right and two wrong answers more each; what is drawn varies so, but for those four."""
    variance = variance_of([row(trials=trials, accuracy=share) for share in shares])
    each = [(share * trials + 2) / (trials + 4) for share in shares]
    assert variance == pytest.approx(sum(p * (1 - p) for p in each) / (trials + 4) / len(shares) ** 2)
    drawn = np.random.default_rng(0).binomial(trials + 4, each, (4000, len(shares))) / (trials + 4)
    assert variance == pytest.approx(drawn.mean(axis=1).var(), rel=0.1)


@pytest.mark.parametrize(("score", "low"), [(0.634, 256), (0.64, 512)])
def test_a_range_allows_for_both_errors(score, low):
    """Of a score at 512 and of 0.85 of the 0.6 at 256: two errors are 0.128."""
    assert (
        effective_length([row(length=256, trials=96, accuracy=0.6), row(length=512, trials=96, accuracy=score)]).low
        == low
    )


def test_scores_of_several_tasks_are_their_mean():
    def of_task(task, length, score):
        return row(task=task, length=length, depth=None, trials=None, accuracy=None, score=score, scores=[score] * 50)

    rows = [of_task("vt", 256, 1.0), of_task("cwe", 256, 0.6), of_task("vt", 512, 1.0), of_task("cwe", 512, 0.4)]
    assert effective_length(rows).length == 512  # 0.7 of 0.8
    assert effective_length(rows).base == pytest.approx(0.8)


def test_the_range_holds_the_true_length_in_nearly_all_experiments():
    """512 tokens have 0.80 of the score at L, which is below 0.85: the truth is 256, and chance may find 512."""
    draws, held, truth = np.random.default_rng(0), 0, {256: 0.9, 512: 0.72, 1024: 0.2}
    for _ in range(300):
        rows = [
            row(length=n, trials=20, accuracy=draws.binomial(20, share) / 20)
            for n, share in truth.items()
            for _ in range(3)
        ]
        found = effective_length(rows)
        held += found.low <= 256 <= found.high
    assert held >= 0.95 * 300
