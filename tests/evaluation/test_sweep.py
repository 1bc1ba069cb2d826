"""Sweeps: what is tried follows from what was measured, and the recommendation from the rows."""

from __future__ import annotations

import io
import json
import shlex
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace

import numpy as np
import pytest

from rope_patch.cli import report
from rope_patch.cli.options import in_tokens, parse
from rope_patch.errors import EvaluationError
from rope_patch.evaluation.row import Rows
from rope_patch.evaluation.standard_errors import error_of_neighbours
from rope_patch.saving.loading import load_config
from rope_patch.saving.readers import SERVERS, served_by
from rope_patch.schemes import ReRoPE, get_scheme, list_schemes, scheme_class
from rope_patch.schemes.base import Sweep
from rope_patch.shipped import recipes_folder
from tests.recipes import load_recipe, run_recipe

from .conftest import documents
from .rows import row

recipe = load_recipe("sweep")
Candidate, candidates = recipe.Candidate, recipe.candidates

REFERENCES = ("plain", "cut", "window")
SWEPT = recipe.schemes_to_sweep("fine-tune", ())
RERE, YARN = (next((name, sweep) for name, sweep in SWEPT if name == wanted) for wanted in ("rerope", "yarn"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep") / "texts"
    folder.mkdir()
    for document in documents(180, 200, 220):
        (folder / f"{document['name']}.txt").write_text(document["text"])
    return folder


def spelled(checkpoint, texts, output, *more):
    words = ["--target", "4x", "--model", checkpoint, "--text", texts, "--schemes", "rerope", "yarn"]
    return [*words, "--targets", "8", "--output", output, "--device", "cpu", *more]


@pytest.fixture(scope="module")
def whole(checkpoint, texts, tmp_path_factory):
    """What a sweep to its end prints as JSON, its sentences, and its folder."""
    output, out, err = tmp_path_factory.mktemp("whole") / "out", io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        assert run_recipe("sweep", spelled(checkpoint, texts, output, "--json")) == 0
    return json.loads(out.getvalue()), err.getvalue(), output


@pytest.fixture
def begun(whole, tmp_path, monkeypatch):
    """The folder of a sweep that has measured the references and nothing else, and draws no picture."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    output = tmp_path / "out"
    output.mkdir()
    rows = (whole[2] / "sweep.jsonl").read_text().splitlines(keepends=True)
    (output / "sweep.jsonl").write_text("".join(row for row in rows if json.loads(row)["line"] in REFERENCES))
    return output


@pytest.fixture
def swept(checkpoint, texts, begun, capsys):
    """Goes on with that sweep and gives what it prints as JSON, and its sentences."""

    def run(*more):
        assert run_recipe("sweep", spelled(checkpoint, texts, begun, "--json", *more)) == 0
        captured = capsys.readouterr()
        return json.loads(captured.out), captured.err

    return run


# --- what a scheme declares ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list_schemes())
def test_a_scheme_for_pretrained_checkpoints_declares_what_a_sweep_tries(name):
    cls = scheme_class(name)
    declares = "sweep" in vars(cls)  # what it inherits is the declaration of another scheme
    assert declares or cls.regime == "from-scratch", (
        f"{name}: {cls.__module__} has no line for sweeps; add sweep = (Sweep(FIELD, UNIT, VALUES),) to the class, or "
        "sweep = None where there is nothing to try"
    )


def test_what_has_nothing_to_try_is_left_out():
    left_out = {name for name in list_schemes() if not scheme_class(name).sweep}
    pretrained = {name for name in left_out if scheme_class(name).regime != "from-scratch"}
    learned = {"floater", "learned", "multiplicative", "rnn", "t5", "urpe"}
    inside = {"string", "ssmax"}  # acts within L; learns
    refining = {"resonance", "fope_cut", "giraffe_power", "learned_rope"}
    assert pretrained >= {"rope", "window", "logn", "hierarchical", "abf", "longrope"} | learned | refining | inside


@pytest.mark.parametrize(("length", "target"), [(256, 1024), (4096, 131072), (16, 24)])
def test_every_candidate_is_a_scheme_that_can_be_spelled(length, target):
    for name, sweep in SWEPT:
        for value in sweep.values:
            for logn in (False, True):
                scheme = get_scheme(Candidate(name, sweep, value, logn).line(length, target))
                assert (scheme.name == "compose") == logn


def test_values_follow_the_training_length_and_the_target():
    def line(scheme, value):
        return Candidate(*next(each for each in SWEPT if each[0] == scheme), value).line(256, 1024)

    assert line("rerope", 3 / 8) == "rerope:window=96"
    assert line("yarn", 1.5) == "yarn:factor=6"
    assert line("self_extend", 1) == "self_extend:group_size=7,window=128"  # (1024 - 128) / (256 - 128)
    assert line("leaky_rerope", 2) == "leaky_rerope:factor=14,window=128"
    assert line("dca", 7 / 8) == "dca:chunk_size=224"
    assert line("dynamic_ntk", 1) == "dynamic_ntk:factor=1"
    assert line("dynamic_yarn", 1) == "dynamic_yarn"


def test_schemes_made_to_be_fine_tuned_wait_to_be_asked_for_and_come_last():
    free = [name for name, _ in recipe.schemes_to_sweep("training-free", ())]
    assert "pi" not in free
    assert [name for name, _ in SWEPT] == [*free, "giraffe", "llama3", "pi"]
    assert free.index("rerope") < free.index("yarn")  # what keeps distances as they were trained comes first
    assert recipe.schemes_to_sweep("training-free", ["yarn"]) == [YARN]


# --- what is tried ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "lengths"), [(64, [16, 32, 64]), (40, [16, 32, 40]), (20, [16, 20]), (17, [16, 17])]
)
def test_lengths_double_from_the_training_length_to_the_target(target, lengths):
    assert recipe.lengths_up_to(target, 16) == lengths


@pytest.mark.parametrize("target", [-1, 0, 255, 256])
def test_a_target_within_the_training_length_is_refused(target):
    with pytest.raises(EvaluationError, match=f"target={target} is not allowed; it has to be beyond L = 256 tokens"):
        recipe.lengths_up_to(target, 256)


@pytest.mark.parametrize(("target", "meant"), [(2, "2x"), (8, "8x"), (0, ""), (10, ""), (200, "")])
def test_a_target_of_a_few_tokens_is_meant_in_multiples(target, meant):
    with pytest.raises(EvaluationError) as refused:
        recipe.lengths_up_to(target, 256)
    assert str(refused.value).partition("tokens")[2] == (f"; for {target} times L, write {meant}" if meant else "")


def test_the_first_round_is_one_best_guess_for_each_scheme():
    assert candidates(1, [RERE, YARN], {}) == [Candidate(*RERE, 1 / 2), Candidate(*YARN, 1)]


def test_later_rounds_refine_what_was_best():
    half, yarn = Candidate(*RERE, 1 / 2), Candidate(*YARN, 1)
    measured = {yarn: 1.4, half: 1.2}
    second = candidates(2, [RERE, YARN], measured)
    assert second == [replace(half, logn=True), replace(yarn, logn=True)]
    measured |= {second[0]: 1.1, second[1]: 1.5}
    third = candidates(3, [RERE, YARN], measured)
    assert third == [
        *(Candidate(*RERE, value, logn=True) for value in (3 / 8, 5 / 8, 1 / 4)),
        *(Candidate(*YARN, value) for value in (1.5, 2)),
    ]
    measured |= {third[0]: 1.0, third[1]: 1.3, third[2]: 1.3}
    assert candidates(4, [RERE, YARN], measured) == [
        Candidate(*RERE, 5 / 16, logn=True),
        Candidate(*RERE, 7 / 16, logn=True),
    ]


def test_a_scheme_with_several_lines_takes_one_place_among_the_best():
    extends = [Candidate(name, sweep, 1) for name, sweep in SWEPT if name == "self_extend"]
    half, yarn = Candidate(*RERE, 1 / 2), Candidate(*YARN, 1)
    measured = {extends[0]: 1.0, extends[1]: 1.1, half: 1.2, yarn: 1.3}
    assert candidates(2, SWEPT, measured) == [replace(best, logn=True) for best in (extends[0], half, yarn)]


def test_a_round_after_nothing_could_be_measured_is_empty():
    assert [candidates(number, [RERE], {}) for number in (2, 3, 4)] == [[], [], []]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--regime", "from-scratch"], "regime"),
        (["--schemes", "reropes"], "there is no scheme 'reropes'; did you mean 'rerope'"),
        (["--schemes", "alibi"], "does not try 'alibi'"),
        (["--schemes", "pi"], "ask for it with --regime fine-tune"),
        (["--target", "four"], "'four' is not a length such as 1024 or 4x"),
        (["--model", "./nowhere"], "there is no checkpoint './nowhere'"),
        (["--serve", "vlm"], "serve='vlm' is not allowed; allowed: config, llama.cpp, vLLM"),
    ],
)
def test_wrong_input_is_one_clear_line(words, message, capsys):
    assert run_recipe("sweep", ["--target", "4x", *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err.strip().splitlines()[-1]
    assert captured.out == ""


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({64: 1.0, 96: 0.5, 128: 1.0}, 96),
        ({1: (1 - 2.5) ** 2, 2: 0.25, 4: 1.5**2}, 2.5),
        ({64: 0.1, 96: 0.5, 128: 1.0}, 64),
        ({96: 0.5}, 96),
        ({64: 0.5, 96: 0.5, 128: 0.5}, 64),
    ],
)
def test_the_best_value_at_a_length_is_the_vertex_between_its_neighbours(losses, expected):
    assert recipe.lowest(losses) == pytest.approx(expected)


def test_the_last_round_tries_the_curve_through_the_best_value_at_each_length():
    near, far = scheme_class("lampe").sweep
    best_at = {256: 3 / 8, 512: 1 / 2, 1024: 5 / 8}

    def losses(value):
        return {128: 1.0} | {length: 1 + (value - best) ** 2 for length, best in best_at.items()}

    values = (1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
    measured = {Candidate("lampe", near, value): losses(value) for value in values}
    others = [Candidate("lampe", far, value) for value in values]
    others += [Candidate("lampe", near, value, logn=True) for value in values]
    measured |= {other: dict.fromkeys(losses(1), 3 - other.value) for other in others}
    measured |= {Candidate(*YARN, 1): dict.fromkeys((128, 256, 512, 1024), 0.5)}  # has no such rule
    (found,) = recipe.curves(measured, 256)
    scheme = get_scheme(found.line(256, 1024))
    assert (scheme.window, scheme.mapping_length) == (128, None)
    assert [scheme.positions_of(length) for length in best_at] == pytest.approx([96, 128, 160], abs=4)
    only = {candidate: {1024: of[1024]} for candidate, of in measured.items()}
    assert recipe.curves(only, 256) == []  # one length


# --- a sweep ---------------------------------------------------------------------------------------------------------


def test_the_tiny_options_parse():
    options = in_tokens(parse(recipe.Options, [str(recipes_folder() / "configs" / "sweep_tiny.yaml")]))
    assert recipe.lengths_up_to(options.target, 256) == [256, 512, 1024]


def test_a_sweep_measures_references_and_rounds_and_recommends_the_best(whole):
    found, said, output = whole
    at_target = {row["line"]: row["nll"] for row in found["rows"] if row["length"] == 64}
    others = {line: nll for line, nll in at_target.items() if line not in REFERENCES}
    assert {"rerope:window=8", "yarn:factor=4"} <= set(others)
    assert set(at_target) - set(others) == {"plain", "cut", "window"}
    assert list(at_target.values()) == sorted(at_target.values())
    assert any(line.endswith("+logn") for line in others)
    assert others[found["best"]] <= min(others.values()) + recipe.TIE
    assert {row["length"] for row in found["rows"]} == {16, 32, 64}
    assert {row["targets"] for row in found["rows"]} == {8}
    assert found["stopped"] == "every round was completed"
    assert (output / "sweep.png").stat().st_size > 20_000
    assert said.count("rope-patch: round") == 5
    assert {row["texts"] for row in found["rows"]}.isdisjoint(row["texts"] for row in found["confirmation"])
    confirmed = {row["line"]: row for row in found["confirmation"] if row["length"] == 64}
    assert set(confirmed) == {*REFERENCES, found["best"]}
    free = min(("cut", "window"), key=lambda line: confirmed[line]["nll"])
    apart = [
        one - other
        for one, other in zip(
            confirmed[found["best"]]["nll_by_document"], confirmed[free]["nll_by_document"], strict=True
        )
    ]
    assert found["difference"] == pytest.approx(confirmed[found["best"]]["nll"] - confirmed[free]["nll"], abs=1e-12)
    assert found["standard_error"] == pytest.approx(error_of_neighbours(apart))


def test_a_budget_of_measurements_ends_the_sweep_and_earlier_rows_cost_nothing(swept, tmp_path):
    first, _ = swept("--budget-measurements", "4")
    assert first["stopped"] == "the budget of 4 measurements was used up in round 1 of 5"
    assert len({row["line"] for row in first["rows"]}) == 4
    kept = (tmp_path / "out" / "sweep.jsonl").read_text()
    again, _ = swept("--budget-measurements", "4")
    assert len({row["line"] for row in again["rows"]}) == 5
    assert (tmp_path / "out" / "sweep.jsonl").read_text().startswith(kept)
    assert [row for row in again["rows"] if row in first["rows"]] == sorted(first["rows"], key=again["rows"].index)


def test_a_budget_of_no_minutes_measures_the_references_alone(swept):
    found, _ = swept("--budget-minutes", "0")
    assert {row["line"] for row in found["rows"]} == set(REFERENCES)
    assert (found["best"], found["verdict"], found["difference"]) == (None, "nothing", None)
    assert found["sentence"] == "Nothing was tried: the budget of 0 minutes was used up in round 1 of 5."


def test_the_next_command_after_nothing_was_tried_can_be_run():
    for budget, more in ({"budget_minutes": 4.0}, ["--budget-minutes", "8"]), ({}, ["--dry-run"]):
        options = recipe.Options(target=1024, model="model", **budget)
        _, command, *words = shlex.split(report.spelled(recipe.advice(options), options))
        assert (command, words) == ("sweep", ["--target", "1024", *more, "--model", "model"])
        assert parse(recipe.Options, words).model == "model"


def test_what_the_model_refuses_is_listed_and_not_fatal(swept, monkeypatch):
    monkeypatch.setattr(ReRoPE, "sweep", (Sweep("window", "one", (-1.0, 0.4)),))
    found, _ = swept("--budget-measurements", "3")
    assert list(found["refused"]) == ["rerope:window=-1"]
    assert "window=-1 is not allowed" in found["refused"]["rerope:window=-1"]
    assert found["best"].startswith("yarn")


def test_the_table_names_every_line(checkpoint, texts, begun, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert run_recipe("sweep", spelled(checkpoint, texts, begun, "--budget-measurements", "3")) == 0
    out = capsys.readouterr().out
    assert len({row.line for row in Rows(begun / "sweep.jsonl").rows}) == 4
    for name in (
        "plain checkpoint",
        "sliding window",
        "ReRoPE, w = 8",
        "served by",
        "this library",
        "±",
        "text: texts; ",
    ):
        assert name in out
    assert "the budget of 3 measurements was used up in round 1 of 5" in out


def test_the_plan_is_printed_without_measuring(checkpoint, texts, tmp_path, capsys):
    words = spelled(checkpoint, texts, tmp_path / "out", "--dry-run")
    assert run_recipe("sweep", words) == 0
    out = capsys.readouterr().out
    assert out.startswith("lengths 16, 32, 64 (L = 16)")
    assert "rerope:window=8" in out
    assert not (tmp_path / "out").exists()
    assert run_recipe("sweep", [*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan == {"lengths": [16, 32, 64], "first_round": ["rerope:window=8", "yarn:factor=4"]}


# --- one book, and what serves ----------------------------------------------------------------------------------------


def test_one_book_is_read_in_many_windows_before_anything_is_recommended(checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # no picture
    book = tmp_path / "book.txt"
    book.write_text(documents(2000)[0]["text"])

    def swept(*more):
        asked = ["--model", checkpoint, "--text", book, "--target", "2x", "--targets", "8", "--schemes", "rerope"]
        asked += ["--output", tmp_path / "out", "--budget-measurements", "2", "--device", "cpu", "--json"]
        assert run_recipe("sweep", [*asked, *more]) == 0
        captured = capsys.readouterr()
        return json.loads(captured.out), captured.err

    found, _ = swept()
    assert {(row["documents"], row["windows"], row["text"]) for row in found["rows"]} == {(1, 16, "book.txt")}
    assert {(row["documents"], row["windows"]) for row in found["confirmation"]} == {(1, 16)}
    assert found["standard_error"] > 0

    alone, said = swept("--windows-per-document", "1", "--documents", "8")
    assert (alone["recommended"], alone["verdict"], alone["standard_error"]) == (None, "too few", None)
    assert "within noise (1 window). A longer text" in alone["sentence"]
    assert "rope-patch: asked for 8 documents, found 1\n" in said
    assert "rope-patch: only 1 window: below 8" in said


def test_a_sweep_tries_what_a_server_can_serve(checkpoint, texts, tmp_path, capsys):
    def planned(server):
        words = spelled(checkpoint, texts, tmp_path / "out", "--dry-run", "--json", "--serve", server)
        assert run_recipe("sweep", words) == 0
        return json.loads(capsys.readouterr().out)["first_round"]

    assert planned("vllm") == planned("llama.cpp") == planned("config") == ["yarn:factor=4"]


def test_nothing_that_no_server_has_is_measured_in_any_round(swept, whole, begun, checkpoint):
    (begun / "sweep.jsonl").write_bytes((whole[2] / "sweep.jsonl").read_bytes())  # most is known
    found, _ = swept("--serve", "llama.cpp")
    lines = {row["line"] for row in found["rows"]} - set(REFERENCES)
    assert len(lines) > 1
    assert all(line.startswith("yarn:factor=") for line in lines)
    config = load_config(str(checkpoint))
    assert all("llama.cpp" in recipe.servers_of(line, config) for line in lines)
    assert recipe.servers_of("plain", config) == list(SERVERS)
    assert recipe.servers_of("window", config) == []


@pytest.mark.parametrize(
    ("spec", "served"),
    [
        ("pi:factor=4", ["config", "vLLM", "llama.cpp"]),
        ("yarn:factor=4,truncate=false", ["config", "vLLM"]),
        ("ntk_by_parts:factor=4", ["config", "vLLM"]),
        ("ntk_mixed:factor=4", ["config", "vLLM"]),
        ("dynamic_ntk:factor=1", []),  # its readers disagree
        ("ntk:factor=4+logn", []),
        ("rerope:window=8", []),
    ],
)
def test_who_serves_a_scheme_is_what_its_export_knows(spec, served, model):
    model.config.architectures = ["LlamaForCausalLM"]
    before = model.config.to_dict()
    assert served_by(get_scheme(spec), model.config) == served
    assert model.config.to_dict() == before
    model.config.auto_map = {"AutoConfig": "configuration_own.OwnConfig"}
    assert served_by(get_scheme(spec), model.config) == []


# --- the recommendation ----------------------------------------------------------------------------------------------


def outcome(nlls, count=12):
    """Rows at 256 and 1024 tokens, as the confirmation has them; documents differ by 0.01 nats in turn."""
    return {
        line: [
            row(
                line=line,
                length=length,
                nll=nll,
                nll_by_document=[nll + 0.01 * (i % 2) * len(line) for i in range(count)],
            )
            for length, nll in zip((256, 1024), pair, strict=True)
        ]
        for line, pair in nlls.items()
    }


def test_what_is_better_beyond_noise_is_recommended_with_its_price():
    best = "rerope:window=96+logn"
    rows = outcome({"plain": (2.1, 5.0), "cut": (2.1, 2.1), "window": (2.1, 2.08), best: (2.101, 1.9)})
    verdict, difference, error = recipe.recommend(rows, best)
    assert verdict.kind == "better"
    assert verdict.sentence == (
        "On the half of the text that did not choose it, reading farther pays: at 1024 tokens ReRoPE, w = 96, log-n "
        "(`rerope:window=96+logn`) is 0.180 below the "
        f"sliding window (2.080) (error {error:.3f} over 12 documents). It costs 0.001 at 256 tokens."
    )
    assert difference == pytest.approx(-0.18)


def test_among_equals_the_line_that_is_better_over_all_lengths_comes_first():
    rows = outcome({"a": (2.5, 2.0), "b": (2.0, 2.0005), "c": (1.0, 2.1)})
    assert recipe.rank(rows) == ["b", "a", "c"]
    assert recipe.rank({}) == []


@pytest.mark.parametrize("documents", [8, 16])
@pytest.mark.parametrize("correlation", [0.0, 0.4])
def test_a_sweep_of_equals_seldom_recommends(documents, correlation):
    """Under a true null no line differs from the cut but by noise; the best of 12 is chosen on one half of the text."""
    draws, sweeps, recommended = np.random.default_rng(documents), 400, 0
    for _ in range(sweeps):
        noise = draws.standard_normal((12, 2, documents))
        noise[..., 1:] += correlation * noise[..., :-1]  # neighbours are alike
        choosing, confirming = noise[:, 0], noise[:, 1]
        best = int(choosing.mean(1).argmin())
        told = {"documents": 1 if correlation else documents, "windows": documents}
        rows = {
            line: [
                row(line=line, length=length, nll=2 + losses.mean(), nll_by_document=(2 + losses).tolist(), **told)
                for length in (256, 1024)
            ]
            for line, losses in (("window", np.zeros(documents)), ("rerope:window=128", confirming[best]))
        }
        recommended += recipe.recommend(rows, "rerope:window=128")[0].kind == "better"
    assert recommended <= 0.05 * sweeps


def test_a_budget_is_told_before_anything_is_loaded(swept):
    _, said = swept("--budget-minutes", "0")
    assert said.startswith("rope-patch: a budget of 0 minutes for all: references, candidates, and the confirmation")


def test_a_sweep_by_repeated_passages_compares_with_the_text_cut_to_l(checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # no picture
    book = tmp_path / "book.txt"
    book.write_text(documents(3000)[0]["text"])
    asked = ["--model", checkpoint, "--text", book, "--target", "200", "--protocol", "repeat", "--schemes", "rerope"]
    asked += ["--targets", "1", "--output", tmp_path / "out", "--budget-measurements", "3", "--device", "cpu", "--json"]
    assert run_recipe("sweep", asked) in (0, 2)  # a passage needs more room than the 16 tokens of this checkpoint
    assert "a passage of 33 tokens and its copy" in capsys.readouterr().err
