"""Sweeps: what is tried follows from what was measured, and the recommendation from the rows."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import pytest

from rope_patch.cli import sweep as command
from rope_patch.errors import EvaluationError
from rope_patch.evaluation import sweep as sweeping
from rope_patch.evaluation.candidates import FAMILIES, Candidate, Family, candidates_of_round, chosen_families
from rope_patch.evaluation.results import ResultFile
from rope_patch.evaluation.sweep import Outcome, Plan, Sweep, make_plan, plan_of, run, target_length
from rope_patch.evaluation.sweep_report import recommendation, show_plan, to_dict, verdict
from rope_patch.schemes import get_scheme
from tests.evaluation.conftest import documents
from tests.evaluation.rows import row

CONFIGS = Path(__file__).parents[2] / "recipes" / "configs"
RERE, YARN, PI = (next(family for family in FAMILIES if family.scheme == name) for name in ("rerope", "yarn", "pi"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep") / "texts"
    folder.mkdir()
    for document in documents(90, 100, 110):
        (folder / f"{document['name']}.txt").write_text(document["text"])
    return folder


@pytest.fixture
def small(checkpoint, texts, tmp_path):
    return described(checkpoint, texts, tmp_path / "out")


@pytest.fixture(scope="module")
def found_and_said(checkpoint, texts, tmp_path_factory):
    said = []
    return run(described(checkpoint, texts, tmp_path_factory.mktemp("out")), said.append), said


def described(checkpoint, texts, output):
    schemes = ("rerope", "yarn")
    return Sweep("4x", model=str(checkpoint), text=str(texts), schemes=schemes, output=str(output), targets=8)


def outcome(nlls, *, difference=0.0, error=None, count=12, best=None):
    """What a sweep found whose lines have these NLL at 256 and 1024 tokens."""
    rows = [
        row(line=line, scheme={"name": line}, length=length, nll=nll)
        for line, pair in nlls.items()
        for length, nll in zip((256, 1024), pair, strict=True)
    ]
    plan = Plan(256, (256, 1024), (RERE,))
    return Outcome(plan, rows, {}, best, difference, error, count, "the end", Path("a.jsonl"), Path("a.png"))


def test_the_tiny_description_parses():
    assert make_plan(Sweep.from_yaml(CONFIGS / "sweep_tiny.yaml"), 256).lengths == (256, 512, 1024)


@pytest.mark.parametrize(("target", "length"), [("4x", 1024), ("1.5x", 384), (1000, 1000), ("1000", 1000)])
def test_a_target_is_tokens_or_multiples_of_the_training_length(target, length):
    assert target_length(target, 256) == length


@pytest.mark.parametrize("target", ["x", "4 x", "-1", 0, "four", "0x"])
def test_another_target_is_refused(target):
    with pytest.raises(EvaluationError, match="is not allowed; a number of tokens is"):
        Sweep(target)


@pytest.mark.parametrize(("target", "lengths"), [("4x", (16, 32, 64)), (40, (16, 32, 40)), (20, (16, 20))])
def test_lengths_double_from_the_training_length_to_the_target(target, lengths):
    assert make_plan(Sweep(target), 16).lengths == lengths


def test_a_target_within_the_training_length_is_refused():
    with pytest.raises(EvaluationError, match="has to be beyond L = 256"):
        make_plan(Sweep("1x"), 256)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regime": "from-scratch"}, "regime 'from-scratch': allowed: fine-tune, training-free"),
        ({"schemes": ["reropes"]}, "does not try 'reropes'; did you mean 'rerope'"),
        ({"schemes": ["pi"]}, "ask for it with regime 'fine-tune'"),
        ({"budget_measurements": 0}, "budget_measurements must be at least 1"),
        ({"text": "a", "dataset": "b"}, "give one of them"),
    ],
)
def test_a_wrong_description_says_what_is_wrong(fields, message):
    with pytest.raises(EvaluationError) as raised:
        Sweep("4x", **fields)
    assert message in str(raised.value)


@pytest.mark.parametrize(("length", "target"), [(256, 1024), (4096, 131072), (16, 24)])
def test_every_candidate_is_a_scheme_that_can_be_spelled(length, target):
    for family in FAMILIES:
        for value in family.values:
            for logn in (False, True):
                scheme = get_scheme(Candidate(family, value, logn).line(length, target))
                assert (scheme.name == "compose") == logn


def test_values_follow_the_training_length_and_the_target():
    def line(scheme, value):
        family = next(family for family in FAMILIES if family.scheme == scheme)
        return Candidate(family, value).line(256, 1024)

    assert line("rerope", 3 / 8) == "rerope:window=96"
    assert line("yarn", 1.5) == "yarn:factor=6"
    assert line("self_extend", 1) == "self_extend:group_size=7,window=128"  # (1024 - 128) / (256 - 128)
    assert line("dynamic_ntk", 1) == "dynamic_ntk:factor=1"
    assert line("dynamic_yarn", 1) == "dynamic_yarn"


def test_schemes_made_to_be_fine_tuned_wait_to_be_asked_for():
    assert PI not in chosen_families("training-free")
    assert PI in chosen_families("fine-tune")
    assert chosen_families("training-free", ["yarn"]) == (YARN,)


def test_the_first_round_is_one_best_guess_for_each_scheme():
    assert candidates_of_round(0, (RERE, YARN), {}) == (Candidate(RERE, 1 / 2), Candidate(YARN, 1))


def test_later_rounds_refine_what_was_best():
    half, yarn = Candidate(RERE, 1 / 2), Candidate(YARN, 1)
    measured = {yarn: 1.4, half: 1.2}
    second = candidates_of_round(1, (RERE, YARN), measured)
    assert second == (Candidate(RERE, 1 / 2, logn=True), Candidate(YARN, 1, logn=True))
    measured |= {second[0]: 1.1, second[1]: 1.5}
    third = candidates_of_round(2, (RERE, YARN), measured)
    assert third == (
        *(Candidate(RERE, value, logn=True) for value in (3 / 8, 5 / 8, 1 / 4)),
        *(Candidate(YARN, value) for value in (1.5, 2)),
    )
    measured |= {third[0]: 1.0, third[1]: 1.3, third[2]: 1.3}
    last = candidates_of_round(3, (RERE, YARN), measured)
    assert last == (Candidate(RERE, 5 / 16, logn=True), Candidate(RERE, 7 / 16, logn=True))


def test_a_scheme_with_several_lines_takes_one_place_among_the_best():
    extends = [family for family in FAMILIES if family.scheme == "self_extend"]
    lines = [Candidate(family, 1) for family in extends]
    measured = {lines[0]: 1.0, lines[1]: 1.1, Candidate(RERE, 1 / 2): 1.2, Candidate(YARN, 1): 1.3}
    assert candidates_of_round(1, FAMILIES, measured) == (
        Candidate(extends[0], 1, logn=True),
        Candidate(RERE, 1 / 2, logn=True),
        Candidate(YARN, 1, logn=True),
    )


def test_a_round_after_nothing_could_be_measured_is_empty():
    assert [candidates_of_round(number, (RERE,), {}) for number in (1, 2, 3)] == [(), (), ()]


def test_a_sweep_measures_references_and_rounds_and_recommends_the_best(found_and_said):
    found, said = found_and_said
    at_target = {row.line: row.nll for row in found.rows if row.length == 64}
    assert list(at_target)[:2] == ["plain", "window"]
    assert {"rerope:window=8", "yarn:factor=4"} <= set(at_target)
    others = {line: nll for line, nll in at_target.items() if line not in ("plain", "window")}
    assert any(line.endswith("+logn") for line in others)
    assert others[found.recommended] <= min(others.values()) + sweeping.TIE
    assert found.difference == pytest.approx(others[found.recommended] - at_target["window"], abs=1e-12)
    assert {row.length for row in found.rows} == {16, 32, 64}
    assert {row.targets for row in found.rows} == {8}
    assert "the plan was carried out to its end" in found.stopped
    assert found.picture.is_file()
    assert sum("round" in sentence for sentence in said) == 4
    assert set(to_dict(found)["lines"][0]["nll"]) == {"16", "32", "64"}


def test_the_error_is_that_of_the_paired_differences_by_document(found_and_said):
    found, _ = found_and_said
    alone = [row for row in ResultFile(found.results).rows if row.documents == 1 and row.length == 64]
    by_text = {text: {row.line: row.nll for row in alone if row.texts == text} for text in {row.texts for row in alone}}
    differences = [lines[found.recommended] - lines["window"] for lines in by_text.values()]
    mean = sum(differences) / 3
    assert len(differences) == found.documents == 3
    assert mean == pytest.approx(found.difference, abs=1e-6)
    assert found.error == pytest.approx((sum((d - mean) ** 2 for d in differences) / 2 / 3) ** 0.5)


def test_a_budget_of_measurements_ends_the_sweep_and_earlier_rows_cost_nothing(small):
    first = run(dataclasses.replace(small, budget_measurements=4))
    assert first.stopped == "the budget of 4 measurements was used up in round 1 of 4"
    assert len({row.line for row in first.rows}) == 3
    again = run(dataclasses.replace(small, budget_measurements=4))
    assert len({row.line for row in again.rows}) == 4
    assert {row.to_json() for row in first.rows} < {row.to_json() for row in again.rows}


def test_a_budget_of_no_minutes_measures_the_references_alone(small):
    found = run(dataclasses.replace(small, budget_minutes=0))
    assert {row.line for row in found.rows} == {"plain", "window"}
    assert found.recommended is None
    assert verdict(found) == "nothing"


def test_what_the_model_refuses_is_listed_and_not_fatal(small, monkeypatch):
    impossible = Family("self_extend", "group_size", "needed", (-1.0,), window=1 / 2)
    monkeypatch.setattr(sweeping, "chosen_families", lambda *_: (impossible, YARN))
    found = run(dataclasses.replace(small, budget_measurements=3))
    (line,) = found.refused
    assert line.startswith("self_extend:group_size=-")
    assert "group_size" in found.refused[line]
    assert found.recommended.startswith("yarn")


def test_what_is_better_beyond_noise_is_recommended_with_its_price():
    nlls = {"plain": (2.0, 5.0), "window": (2.0, 2.08), "rerope:window=96+logn": (2.001, 2.05)}
    found = outcome(nlls, difference=-0.03, error=0.004, best="rerope:window=96+logn")
    assert verdict(found) == "better"
    assert recommendation(found) == (
        "rerope:window=96+logn: 2.050 at 1024 tokens, 0.030 below attention cut at L (standard error 0.004 over 12 "
        "documents). It costs 0.001 at 256."
    )
    assert to_dict(found)["recommended"] == "rerope:window=96+logn"


@pytest.mark.parametrize(
    ("difference", "error", "kind", "words"),
    [
        (-0.006, 0.004, "noise", "beyond noise: the best, x, is 0.006 below it"),
        (-0.004, None, "noise", "too few documents for a standard error; within 0.005 counts as equal"),
        (0.3, 0.004, "worse", "the best of the others, x, is 0.300 above it"),
    ],
)
def test_nothing_is_recommended_that_does_not_beat_the_cut(difference, error, kind, words):
    nlls = {"plain": (2.0, 5.0), "window": (2.0, 2.0), "x": (2.0, 2.0 + difference)}
    found = outcome(nlls, difference=difference, error=error, best="x")
    assert verdict(found) == kind
    assert recommendation(found).startswith("Nothing beats attention cut at L (`window`, 2.000 at 1024 tokens)")
    assert words in recommendation(found)
    assert to_dict(found)["recommended"] is None


def test_the_plan_is_printed_without_measuring(checkpoint):
    plan = plan_of(Sweep("4x", model=str(checkpoint)))
    assert plan.lengths == (16, 32, 64)
    shown = show_plan(plan)
    assert "rerope:window=8" in shown
    assert "round 4" in shown


def test_the_command_prints_what_it_found(checkpoint, texts, tmp_path, capsys):
    parser = argparse.ArgumentParser()
    command.add(parser.add_subparsers())
    words = ["sweep", "--target", "2x", "--model", str(checkpoint), "--text", str(texts), "--schemes", "rerope"]
    words += ["--targets", "8", "--output", str(tmp_path / "out"), "--budget-measurements", "2"]
    arguments = parser.parse_args([*words, "--json"])
    arguments.run(arguments)
    found = json.loads(capsys.readouterr().out)
    assert found["best"] == "rerope:window=8"
    assert [line["line"] for line in found["lines"] if line["line"] == "window"] == ["window"]
    arguments = parser.parse_args(words)
    arguments.run(arguments)
    assert "attention cut at L" in capsys.readouterr().out
    arguments = parser.parse_args([*words, "--dry-run"])
    arguments.run(arguments)
    assert capsys.readouterr().out.startswith("lengths 16, 32")
    with pytest.raises(EvaluationError, match="no target was given"):
        (arguments := parser.parse_args(["sweep"])).run(arguments)
