"""What measurements come to, on rows whose answer is plain."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rope_patch.cli import load
from rope_patch.cli.options import Measured, in_tokens, parse
from rope_patch.cli.report import conclude, next_command, spelled
from rope_patch.evaluation.scheme_specs import scheme_at
from rope_patch.evaluation.tables import Grid
from rope_patch.evaluation.verdict import compare, copies, of_answers, of_losses, of_training, reference_of
from tests.recipes import load_recipe

from . import retrieval_rows
from .rows import row

NOISE = np.random.default_rng(3).standard_normal((60, 12)) * 0.02


def measured(losses, seed=0, **changed):
    """Rows by line and length; each is off by noise of its own, about 0.006 nats over 12 documents."""
    return [
        row(line=line, length=length, nll=nll + noise.mean(), nll_by_document=(nll + noise).tolist(), **changed)
        for (line, by_length), place in zip(losses.items(), range(seed, 60), strict=False)
        for (length, nll), noise in zip(by_length.items(), NOISE[4 * place :], strict=False)
    ]


FREE = {"plain": {256: 2.1, 1024: 5.0}, "cut": {256: 2.1, 1024: 2.1}, "window": {256: 2.1, 1024: 2.05}}


MADE_UP = {"rerope", "plain"}
"""Lines of rows here, which are no schemes that `get_scheme` makes."""


def runs(verdict):
    """The next command is one that can be typed."""
    name, *words = shlex.split(verdict.command)
    if name != "list":
        options = parse(load_recipe(name).Options, words)
        assert all(scheme_at(spec, 1024) for spec in {*options.schemes} - MADE_UP)
    return verdict.kind


@pytest.mark.parametrize(
    ("nll", "kind", "words"),
    [
        (1.95, "better", "Reading farther pays: at 1024 tokens ReRoPE (`rerope`) is 0.1"),
        (2.05, "noise", "It is cheaper to truncate the text to L."),
        (2.2, "worse", "Nothing beats the sliding window (2.0"),
    ],
)
def test_the_best_scheme_is_compared_with_what_is_free(nll, kind, words):
    verdict = of_losses(measured({**FREE, "rerope": {256: 2.1, 1024: nll}, "pi:factor=4": {256: 2.1, 1024: 4.0}}))
    assert runs(verdict) == kind
    assert words in verdict.sentence


def test_what_is_free_is_the_lower_of_both_cuts():
    assert reference_of(measured(FREE), 1024).line == "window"
    lost = {**FREE, "window": {256: 2.1, 1024: 8.6}}  # TinyLlama, whose attention needs its first tokens
    assert reference_of(measured(lost), 1024).line == "cut"
    old = measured({line: losses for line, losses in lost.items() if line != "cut"})  # files without such a line
    assert (reference_of(old, 1024).line, reference_of(old, 1024).loss) == ("cut", old[0].loss)
    assert reference_of(measured({"rerope": {1024: 2.0}}), 1024) is None
    binned = measured({"plain": FREE["plain"], "rerope": {1024: 2.0}}, protocol="by_position")
    assert reference_of(binned, 1024) is None  # every length scores other tokens
    copied = {"near": {1024: 0.5}, "plain": {256: 0.5, 1024: 5.0}}
    assert reference_of(measured(copied, protocol="repeat"), 1024) is None  # at L the plain checkpoint has the passage
    assert reference_of(measured({**copied, "cut": {1024: 3.3}}, protocol="repeat"), 1024).line == "cut"


def test_a_gain_at_2l_counts_though_it_is_gone_at_4l():
    free = {line: {**by_length, 512: by_length[1024]} for line, by_length in FREE.items()}
    verdict = of_losses(measured({**free, "yarn:factor=2": {512: 1.9, 1024: 3.0}}))
    assert runs(verdict) == "better"
    assert "at 512 tokens" in verdict.sentence


def test_too_few_windows_and_missing_references_are_named():
    few = [replace(each, nll_by_document=each.nll_by_document[:3], windows=3) for each in measured(FREE)]
    few += [row(line="rerope", length=1024, nll=1.0, nll_by_document=[1.0, 1.1, 1.2], windows=3)]
    verdict = of_losses(few)
    assert runs(verdict) == "too few"
    assert "within noise (3 windows)" in verdict.sentence
    far = measured({**FREE, "rerope": {256: 2.1, 1024: 1.0}}, protocol="far", chosen_share=0.02, scored_tokens=99)
    assert "within noise (99 tokens)" in of_losses(far).sentence
    assert of_losses([replace(each, scored_tokens=100) for each in far]).kind == "better"
    for rows in (measured({"rerope": {1024: 2.0}}), measured({**FREE, "rerope": {256: 1.0}}), measured(FREE)):
        assert runs(of_losses(rows)) == "nothing"


def test_the_best_of_many_equals_is_seldom_called_better():
    """No scheme differs from the cut but by noise: of 8 schemes the best is below it by two errors in one of seven."""
    draws, texts = np.random.default_rng(0), 300
    found = naive = 0
    for _ in range(texts):
        losses = 2 + 0.02 * draws.standard_normal((9, 12))
        rows = [
            row(line=line, length=1024, nll=each.mean(), nll_by_document=each.tolist())
            for line, each in zip(["window", *(f"yarn:factor={k}" for k in range(2, 10))], losses, strict=True)
        ]
        found += of_losses(rows).kind == "better"
        best = min(rows[1:], key=lambda each: each.nll)
        naive += compare(best, rows[0]).kind == "better"
    assert found <= 0.05 * texts < naive


def test_of_repeated_passages_nothing_is_concluded_if_the_checkpoint_cannot_copy():
    can = {"near": {1024: 0.9}, "cut": {1024: 3.3}, "rerope": {1024: 1.0}}
    verdict = of_losses(measured(can, protocol="repeat"))
    assert runs(verdict) == "better"
    cannot = of_losses(measured({**can, "near": {1024: 3.28}, "rerope": {1024: 3.29}}, protocol="repeat"))
    assert runs(cannot) == "nothing"
    assert "does not copy the passage, not even inside L" in cannot.sentence
    near, cut = measured({"near": {1024: 3.0}, "cut": {1024: 3.3}})
    assert copies(near, cut, [])
    assert not copies(cut, near, [])


def test_a_far_passage_that_a_scheme_copies_counts_where_the_plain_checkpoint_misses_one_inside_l():
    losses = {"near": {1024: 3.28}, "cut": {1024: 3.3}, "yarn": {1024: 3.29}, "rerope": {1024: 1.0}}
    rows = measured(losses, protocol="repeat")
    assert runs(of_losses(rows)) == "better"
    near, cut, *tried = rows
    assert copies(near, cut, tried)
    assert not copies(near, cut, tried[:1])
    assert "means nothing" not in " ".join(Grid.from_rows(rows).notes())
    assert "means nothing" in " ".join(Grid.from_rows(rows[:3]).notes())


# --- a training -------------------------------------------------------------------------------------------------------


def trained(at_l, beyond, steps=100):
    """Rows before and after: plain and both cuts as above, and YaRN, which is 2.3 at 1024 tokens before."""
    before = {**FREE, "yarn:target=auto": {256: 2.1, 1024: 2.3}}
    after = {"yarn:target=auto": {256: at_l, 1024: beyond}}
    return [*measured(before, step=0), *measured(after, seed=9, step=steps)]


@pytest.mark.parametrize(
    ("at_l", "beyond", "kind", "words"),
    [
        (1.9, 1.85, "language", "it learned language, not length"),  # 0.2 at both
        (1.8, 1.85, "language", "it learned language, not length"),  # even more at L
        (2.1, 1.85, "length", "of the gain comes from length"),
        (1.9, 1.6, "length", "gains 0.45"),
        (2.1, 2.05, "noise", "Nothing beats the sliding window"),
        (2.1, 2.5, "worse", "It is cheaper to truncate the text to L."),
    ],
)
def test_a_gain_at_l_that_equals_that_beyond_is_language(at_l, beyond, kind, words):
    verdict = of_training(trained(at_l, beyond), Path)
    assert runs(verdict) == kind
    assert words in verdict.sentence
    assert "After 100 steps" in verdict.sentence


def test_the_last_step_counts_and_a_training_within_l_is_named():
    rows = [*trained(2.1, 1.6), *measured({"yarn:target=auto": {256: 2.1, 1024: 2.5}}, seed=12, step=300)]
    assert of_training(rows, Path).kind == "worse"
    assert runs(of_training([each for each in rows if each.length == 256], Path)) == "nothing"
    assert runs(of_training(measured(FREE, step=0), Path)) == "nothing"


# --- answers ----------------------------------------------------------------------------------------------------------


def answered(shares, trials=50):
    return [
        retrieval_rows.row(line=line, length=length, accuracy=share, trials=trials)
        for line, by_length in shares.items()
        for length, share in by_length.items()
    ]


@pytest.mark.parametrize(
    ("shares", "trials", "kind", "words"),
    [
        ({256: 1.0, 512: 1.0, 1024: 0.95}, 50, "better", "effective lengths: 1024 tokens against 256 tokens."),
        ({256: 1.0, 512: 0.9, 1024: 0.02}, 50, "better", "at 512 tokens ReRoPE (`rerope`) is 90% correct"),
        ({256: 1.0, 512: 0.32, 1024: 0.02}, 50, "noise", "It is cheaper to truncate the text to L."),
        ({256: 1.0, 512: 0.5, 1024: 0.25}, 4, "noise", "No gain beyond noise: at 1024 tokens"),
        ({256: 0.0, 512: 0.0, 1024: 0.0}, 50, "noise", "effective lengths: none against 256 tokens"),
        ({256: 1.0, 512: 0.3, 1024: 0.0}, 50, "noise", "no difference in effective length: both keep their score up"),
    ],
)
def test_answers_beyond_l_are_compared_with_the_best_reference(shares, trials, kind, words):
    plain = {256: 1.0, 512: 0.3, 1024: 0.0}
    verdict = of_answers(answered({"plain": plain, "window": plain, "rerope": shares}, trials))
    assert runs(verdict) == kind
    assert words in verdict.sentence


@pytest.mark.parametrize(
    ("known", "schemes", "kind"), [(0.34, 1, "better"), (0.35, 1, "noise"), (0.34, 2, "noise"), (0.32, 2, "better")]
)
def test_a_gain_in_answers_allows_for_both_errors_and_for_every_try(known, schemes, kind):
    """At two lengths the better of one scheme may be 2.28 errors above by chance, and that of two schemes 2.53. The
    error of 50 % of 96 answers and of about 34 % is 0.069.
    """
    reference = {256: 1.0, 512: known, 1024: 0.1}
    lines = {f"rerope:window={n + 1}": {256: 1.0, 512: 0.5, 1024: 0.1} for n in range(schemes)}
    assert runs(of_answers(answered({"plain": reference, "window": reference, **lines}, 96))) == kind


def test_answers_of_references_alone_or_within_l_compare_nothing():
    shares = {256: 1.0, 1024: 0.5}
    for rows in (answered({"plain": shares}), answered({"rerope": shares}), answered({"plain": {256: 1.0}})):
        assert runs(of_answers(rows)) == "nothing"


def test_a_checkpoint_that_answers_nothing_is_named():
    verdict = of_answers(answered({line: {256: 0.0, 1024: 0.0} for line in ("plain", "window", "rerope")}))
    assert runs(verdict) == "nothing"
    assert "no scheme answers at the shortest lengths" in verdict.sentence


# --- the next command -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ran", "scheme", "following"),
    [
        ("--lengths 1x,512", "pi", "perplexity --protocol repeat"),
        ("--lengths 256,512 --protocol last", "pi", "perplexity --protocol repeat"),
        ("--lengths 512", "pi", "perplexity --protocol last"),
        ("--lengths 1x,512 --targets 8", "pi", "perplexity --protocol last"),
        ("--lengths 1x,512", "yarn", "perplexity --protocol last"),
        ("--lengths 1x,512 --protocol repeat", "pi", "perplexity --protocol last"),
    ],
)
def test_the_next_command_is_not_the_one_just_run(ran, scheme, following):
    options = in_tokens(parse(load("perplexity").Options, [*ran.split(), "--scheme", "pi", "--device", "cpu"]))
    found = next_command(f"perplexity --protocol last --lengths 1x,512 --scheme {scheme}", options)
    assert found == f"rope-patch {following} --lengths 1x,512 --scheme {scheme} --device cpu"


def test_the_next_command_after_a_copy_hides_spans():
    words = "--protocol repeat --lengths 1x,512 --scheme pi"
    options = in_tokens(parse(load("perplexity").Options, words.split()))
    found = next_command(f"perplexity {words}", options)
    assert found == "rope-patch passkey --task spans --lengths 1x,512 --scheme pi"


def test_the_next_command_names_the_same_model_and_text(capsys):
    options = Measured(model="my models/x", text="book.txt", json=True)
    words = "rope-patch passkey --scheme 'rerope' --model 'my models/x' --text book.txt".replace("'rerope'", "rerope")
    assert spelled("passkey --scheme rerope", options) == words
    on_a_gpu = Measured(device="cuda", dtype="bfloat16", seed=3)
    assert spelled("passkey", on_a_gpu) == "rope-patch passkey --dtype bfloat16 --device cuda --seed 3"
    assert spelled("perplexity --model other", options) == "rope-patch perplexity --model other --text book.txt"
    verdict = of_losses(measured(FREE))
    conclude(verdict, options)
    out, err = capsys.readouterr()
    assert out == ""
    assert "rope-patch: Next: rope-patch perplexity" in err
    conclude(verdict, Measured())
    assert capsys.readouterr().out.splitlines()[0] == verdict.sentence
