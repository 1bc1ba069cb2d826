"""The search of frequencies: how lists evolve, that several share a forward, and what is made of the best."""

from __future__ import annotations

import json
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.measured_model import MeasuredModel
from rope_patch.evaluation.row import Rows
from rope_patch.evaluation.run import run
from rope_patch.evaluation.scheme_specs import display_name
from rope_patch.evaluation.side_by_side import measure_together
from rope_patch.evaluation.tasks.perplexity import Perplexity
from rope_patch.saving.export import describe_serving
from rope_patch.schemes import PerLayer, get_scheme
from rope_patch.typing import RotarySpec
from tests.recipes import load_recipe, refuse, run_recipe

from .conftest import documents
from .rows import row

recipe = load_recipe("search")
Evolution, factors_of = recipe.Evolution, recipe.factors_of

PAIRS, K = 16, 4.0
EVEN, RAMP = (K,) * PAIRS, tuple(np.linspace(1, K, PAIRS).tolist())
GOAL = np.concatenate([np.ones(6), np.linspace(1.2, 3.5, 5), np.full(5, 3.5)])


def evolved(evolution, generations, loss):
    """The losses of every list after each generation."""
    losses, after = {}, []
    for number in range(generations):
        new = evolution.generation(number, losses)
        assert losses.keys().isdisjoint(new)
        losses |= {each: loss(each) for each in new}
        after.append(dict(losses))
    return after


def far_from_goal(factors):
    return float(((np.array(factors) - GOAL) ** 2).sum())


# --- evolution -------------------------------------------------------------------------------------------------------


def test_every_list_ascends_within_its_bounds_and_none_comes_twice():
    evolution = Evolution((EVEN, RAMP), K)
    after = evolved(evolution, 12, far_from_goal)
    assert [len(losses) - len(before) for before, losses in pairwise(after[1:])] == [32] * 10
    for factors in after[-1]:
        assert len(factors) == PAIRS
        assert np.all(np.diff([1.0, *factors, 1 + K]) >= 0)


def test_the_best_never_gets_worse_and_comes_near_a_known_optimum():
    best = [min(losses.values()) for losses in evolved(Evolution((EVEN, RAMP), K), 41, far_from_goal)]
    assert best == sorted(best, reverse=True)
    assert best[-1] < 0.1 * best[0]


def test_a_generation_follows_from_the_seed_and_the_losses():
    first, again, other = (evolved(Evolution((EVEN, RAMP), K, seed=seed), 4, far_from_goal)[-1] for seed in (7, 7, 8))
    assert first == again
    assert first.keys() != other.keys()
    turned = dict(reversed(first.items()))  # the order in which they were measured means nothing
    assert Evolution((EVEN, RAMP), K, seed=7).generation(4, turned) == Evolution((EVEN, RAMP), K, seed=7).generation(
        4, first
    )


def test_a_crossover_has_the_fast_pairs_of_one_parent_and_the_slow_pairs_of_the_other():
    child = Evolution((EVEN, RAMP), K).crossed(RAMP, tuple(GOAL), np.random.default_rng(0))
    cut = next(place for place in range(PAIRS) if child[place] != RAMP[place])
    assert child == (*RAMP[:cut], *np.maximum(GOAL[cut:], RAMP[cut - 1]).tolist())


def test_equal_lists_without_room_end_a_generation():
    one = (1.0,)
    assert Evolution((one,), 1.0, step=1.0).generation(1, {one: 0.0, (2.0,): 1.0}) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"population": 3}, "population=3 is not allowed; it must be at least 4"),
        ({"starts": ((2.0, 1.0),)}, r"start \(2.0, 1.0\): factors must ascend from 1 to 1 \+ k = 5"),
        ({"starts": ((0.5, 1.0),)}, "must ascend from 1"),
        ({"starts": ((1.0, 5.5),)}, r"to 1 \+ k = 5"),
    ],
)
def test_a_wrong_evolution_is_refused(changed, message):
    with pytest.raises(EvaluationError, match=message):
        Evolution(**{"starts": (EVEN,), "factor": K, **changed})


def de_casteljau(points, t):
    """A point of a Bezier curve by repeated interpolation between neighbours."""
    while len(points) > 1:
        points = [(1 - t) * left + t * right for left, right in pairwise(points)]
    return points[0]


@pytest.mark.parametrize("layers", [1, 2, 6, 30])
def test_layers_stand_on_the_curve_of_their_points(layers):
    points = (1.0, 4.5, 2.0, 3.0)
    depths = [number / max(1, layers - 1) for number in range(layers)]
    found = recipe.over_depth(points, layers)
    assert found == pytest.approx([de_casteljau(points, depth) for depth in depths], abs=1e-4)
    assert found[0] == 1
    assert recipe.over_depth((K,) * 4, layers) == (K,) * layers  # YaRN itself


def test_curves_stay_within_their_bounds_and_come_near_a_known_optimum():
    goal = (1.5, 4.8, 2.2, 3.1)
    starts = recipe.curves_to(K)
    assert starts["yarn"] == (4, 4, 4, 4)
    assert starts["falling"] == pytest.approx(starts["rising"][::-1])

    def far(points):
        return sum((point - own) ** 2 for point, own in zip(points, goal, strict=True))

    after = evolved(recipe.Curves(tuple(starts.values()), K), 21, far)
    assert all(len(points) == 4 and min(points) >= 1 and max(points) <= 1 + K for points in after[-1])
    best = [min(losses.values()) for losses in after]
    assert best == sorted(best, reverse=True)
    assert best[-1] < 0.05 * best[0]
    first, second = (1.0, 2.0, 3.0, 4.0), (5.0, 4.5, 4.0, 3.5)
    child = recipe.Curves((first,), K).crossed(first, second, np.random.default_rng(0))
    assert child in [first[:cut] + second[cut:] for cut in (1, 2, 3)]
    with pytest.raises(EvaluationError, match=r"points must be from 1 to 1 \+ k = 5"):
        recipe.Curves(((4.0, 0.5, 1.0, 1.0),), K)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("pi:factor=4", lambda i: 4.0),
        ("ntk:factor=4", lambda i: 4.0 ** (2 * i / 30)),  # theta' = theta 4^(d / (d - 2)), d = 32
    ],
)
def test_the_factors_of_a_scheme_are_those_of_its_formula(spec, expected):
    found = factors_of(get_scheme(spec), RotarySpec(2 * PAIRS, 10000.0, 256))
    assert found == pytest.approx([expected(i) for i in range(PAIRS)], rel=1e-5)


# --- several lists in one forward ------------------------------------------------------------------------------------


def longrope(factors, temperature=1.1):
    return get_scheme("longrope", short_factor=factors, long_factor=factors, factor=4.0, attention_factor=temperature)


def repetitive(*lengths):
    return [
        {**each, "text": "".join("abcd"[ord(letter) % 4] for letter in each["text"])} for each in documents(*lengths)
    ]


@pytest.mark.parametrize("protocol", ["last", "far"])
def test_lists_that_share_a_forward_have_the_rows_of_the_measuring_loop(model, tokenizer, tmp_path, protocol):
    pairs = model.config.hidden_size // model.config.num_attention_heads // 2
    schemes = [longrope((k,) * pairs, temperature) for k, temperature in ((1.0, 1.0), (2.0, 1.1), (3.5, 1.3))]
    task = Perplexity(tokenizer, repetitive(300, 320), protocol, targets=8).resolve(MeasuredModel(model), [64])
    alone = run(model, task, schemes, [64])
    rows = Rows(tmp_path / "rows.jsonl")
    together = measure_together(MeasuredModel(model), task, 64, schemes, rows, alone[0].model)
    for one, other in zip(together, alone, strict=True):
        assert one.key() == other.key()
        assert one.nll_by_document == pytest.approx(other.nll_by_document, abs=1e-4)
    assert len({round(each.nll, 3) for each in together}) == 3

    with torch.no_grad():  # known rows are not measured again
        model.lm_head.weight.zero_()
    again = measure_together(MeasuredModel(model), task, 64, schemes, Rows(rows.path), alone[0].model)
    assert [each.nll for each in again] != [each.nll for each in together]  # other weights are another model
    assert len(Rows(rows.path).rows) == 6


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(documents(1500)[0]["text"])
    return path


def spelled(checkpoint, text, output, *more):
    words = ["--model", checkpoint, "--text", text, "--target", "2x", "--targets", "4", "--protocol", "last"]
    return [*words, "--population", "8", "--generations", "2", "--output", output, "--device", "cpu", "--json", *more]


def searched(capsys, words):
    assert run_recipe("search", words) == 0
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


def test_an_interrupted_search_comes_to_the_same_result(checkpoint, text, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # no picture
    whole, said = searched(capsys, spelled(checkpoint, text, tmp_path / "whole"))
    assert "generation 2 of 2: best " in said
    assert whole["lists"] == 3 + 2 * 4  # YaRN and MrRoPE are alike on few pairs
    lines = (tmp_path / "whole" / "search.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "again").mkdir()
    kept = b"".join(lines[: len(lines) // 2]) + lines[len(lines) // 2][:40]  # in the middle of a row
    (tmp_path / "again" / "search.jsonl").write_bytes(kept)
    again, _ = searched(capsys, spelled(checkpoint, text, tmp_path / "again"))
    assert (tmp_path / "again" / "search.jsonl").read_bytes().startswith(b"".join(lines[: len(lines) // 2]))
    assert {name: again[name] for name in ("scheme", "choosing", "lists")} == {
        name: whole[name] for name in ("scheme", "choosing", "lists")
    }

    together, _ = searched(capsys, spelled(checkpoint, text, tmp_path / "together", "--candidates-per-forward", "3"))
    assert together["choosing"] == pytest.approx(whole["choosing"], abs=1e-4)


def test_what_was_found_is_exported_and_keeps_the_plain_checkpoint_up_to_l(
    checkpoint, text, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # no picture
    monkeypatch.setattr(recipe, "is_over", lambda budget, seconds: budget is not None)
    words = spelled(checkpoint, text, tmp_path / "out", "--attention-factor", "1", "--budget-minutes", "60")
    found, said = searched(capsys, words)
    assert found["stopped"] == "the budget of 60 minutes was used up in generation 1"
    assert found["lists"] == 3  # the starts are always measured
    spec = (tmp_path / "out" / "scheme.txt").read_text().strip()
    assert " " not in spec  # it is one word of a next command
    serving = describe_serving(checkpoint, spec)
    entry = serving.config.get("rope_parameters") or serving.config["rope_scaling"]
    assert (entry["rope_type"], serving.length) == ("longrope", 32)
    assert entry["short_factor"] == entry["long_factor"]
    at_l = {one["line"]: one["nll"] for one in found["confirmation"] if one["length"] == 16}
    assert at_l["found, plain up to L"] == pytest.approx(at_l["cut"], abs=1e-6)
    assert "--attention-factor 1" not in found["sentence"]
    assert f'Next: rope-patch export {checkpoint} --scheme "$(cat {tmp_path}/out/scheme.txt)"' in said


def test_a_search_by_layer_finds_a_yarn_for_each_layer(checkpoint, text, tmp_path, capsys):
    words = spelled(checkpoint, text, tmp_path / "out", "--by", "layer")
    found, said = searched(capsys, words)
    spec = (tmp_path / "out" / "scheme.txt").read_text().strip()
    assert not (tmp_path / "out" / "scheme-short.txt").exists()
    assert (tmp_path / "out" / "search.png").stat().st_size > 10_000
    assert 8 < found["lists"] <= 4 + 2 * 4  # few points cross alike
    scheme = get_scheme(spec)
    assert scheme == get_scheme(found["scheme"])
    by_layer = scheme.of_layers({0: "full_attention", 1: "full_attention"}, 2)
    assert {each.name for each in by_layer.values()} == {"yarn"}
    rows = [row for row in Rows(tmp_path / "out" / "search.jsonl").rows if row.scheme.get("layers")]
    assert min(row.loss for row in rows if row.texts == rows[0].texts) == pytest.approx(min(found["choosing"]))
    assert {row["line"] for row in found["confirmation"]} >= {"found", "yarn:factor=2", "cut"}
    assert "plain factors" not in said + found["sentence"]
    assert f'Next: rope-patch serve {checkpoint} --scheme "$(cat {tmp_path}/out/scheme.txt)"' in said


def test_a_curve_of_equal_points_is_yarn(model, tokenizer, tmp_path):
    task = Perplexity(tokenizer, repetitive(300, 320), "last", targets=8).resolve(MeasuredModel(model), [64])
    flat = dict.fromkeys(range(model.config.num_hidden_layers), get_scheme("yarn:factor=4.0"))
    schemes = [get_scheme("yarn:factor=4"), PerLayer({**flat, "rest": None})]
    yarn, curve = run(model, task, schemes, [64])[-2:]
    assert curve.nll_by_document == pytest.approx(yarn.nll_by_document, abs=1e-5)


def test_the_small_checkpoint_is_searched_by_what_is_far_back(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(recipe, "CONFIRMING", 1)
    words = ["--target", "2x", "--documents", "1", "--windows-per-document", "1", "--population", "4"]
    words += ["--generations", "1", "--output", tmp_path / "out", "--device", "cpu"]
    assert run_recipe("search", words) == 0
    out = capsys.readouterr().out
    assert "within noise (1 window)" in out
    assert "found, plain up to L" in out
    assert (tmp_path / "out" / "search.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--target", "1x"), "target=16 is not allowed; it has to be beyond L = 16 tokens"),
        (("--target", "2x", "--generations", "0"), "generations=0 is not allowed; it must be at least 1"),
        (("--target", "2x", "--budget-minutes", "0"), "budget_minutes=0 is not allowed; it must be above 0"),
        (("--target", "2x", "--candidates-per-forward", "0"), "candidates_per_forward=0 is not allowed"),
        (
            ("--target", "2x", "--by", "layer", "--candidates-per-forward", "2"),
            "candidates_per_forward=2 is not allowed with by=layer, where a forward has one curve; it must be 1",
        ),
        (("--target", "2x", "--population", "3"), "population=3 is not allowed; it must be at least 4"),
        (("--target", "2x", "--attention-factor", "0"), "attention_factor=0 is not allowed; it must be above 0"),
        (("--target", "2x", "--protocol", "sliding"), "sliding"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_measured(words, message, checkpoint, text, tmp_path, capsys):
    asked = ["--model", checkpoint, "--text", text, "--targets", "4", "--output", tmp_path / "out", *words]
    refuse("search", [*asked, *([] if "--protocol" in words else ["--protocol", "last"])], message, capsys)


# --- the verdict -----------------------------------------------------------------------------------------------------


def confirmed(protocol, losses):
    """Rows at 256 and 1024 tokens; documents differ by up to 0.01 nats between lines."""
    draws = np.random.default_rng(0)
    return [
        row(
            line=line,
            length=length,
            nll=nll,
            protocol=protocol,
            nll_by_document=(nll + 0.01 * draws.random(16)).tolist(),
        )
        for line, pair in losses.items()
        for length, nll in zip((256, 1024), pair, strict=True)
    ]


@pytest.mark.parametrize(("gain", "kind"), [(0.1, "better"), (0.0, "noise"), (-0.1, "worse")])
def test_the_verdict_is_about_yarn_on_text_that_did_not_choose(gain, kind):
    far = {"near": (1.9, 1.9), "cut": (3.8, 3.8), "yarn:factor=4": (1.9, 2.4), "mrrope:factor=4": (1.9, 2.4)}
    far |= {"found": (1.9, 2.4 - gain), "found, plain up to L": (1.9, 2.4 - gain)}
    ordinary = {
        "cut": (2.1, 2.1),
        "yarn:factor=4": (2.2, 2.3),
        "found": (2.15, 2.2),
        "found, plain up to L": (2.11, 2.2),
    }
    verdict = recipe.judge(confirmed("repeat", far), confirmed("last", ordinary))
    assert verdict.kind == kind
    assert ("The difference from YaRN is noise." in verdict.sentence) == (kind == "noise")
    assert "On ordinary text of that length they are 0.100 ± " in verdict.sentence
    assert "--attention-factor 1" in verdict.sentence  # 0.01 is lost at L


def test_a_checkpoint_that_cannot_copy_gets_no_verdict():
    far = dict.fromkeys(
        ("near", "cut", "yarn:factor=4", "mrrope:factor=4", "found", "found, plain up to L"), (3.8, 3.8)
    )
    verdict = recipe.judge(confirmed("repeat", far), confirmed("last", far))
    assert verdict.kind == "nothing"


def test_a_list_of_factors_has_a_short_name_that_tells_where_it_ends():
    name = display_name(longrope((1.25,) * 32))
    assert name.startswith("longrope:short_factor=[1.25, 1")
    assert name.endswith("mixed=False")
    assert len(name) < 60
    assert display_name("dpe:window=128,groups=[1,2,1,2,8,8,8,1]") == "dpe:window=128,groups=[1,2,1,2,8,8,8,1]"
