"""Training per encoding and seed: the same start and the same data, rows that are complete, and going on."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math

import pytest
import torch

from rope_patch.cli import main
from rope_patch.errors import CorpusError, EvaluationError, InvalidField, UnknownScheme
from rope_patch.evaluation.results import LineFile
from rope_patch.schemes import get_scheme
from rope_patch.training import loop, runs
from rope_patch.training.comparison import Comparison, Data
from rope_patch.training.costs import measure_costs, quartiles, saved_bytes
from rope_patch.training.experiment import run
from rope_patch.training.records import RunRow
from rope_patch.training.runs import batch_at, build_patched, compare, prepare, run_folder, score
from rope_patch.training.state import STATE

TIMES = {"training_seconds"}


def measured(rows):
    return [{key: value for key, value in vars(row).items() if key not in TIMES} for row in rows]


def test_every_encoding_starts_from_the_same_weights(comparison):
    plain = dict(comparison.build(seed=3).named_parameters())
    for spec in ("rope", "alibi", "nope"):
        model, positional = build_patched(comparison, get_scheme(spec), seed=3)
        own = dict(model.named_parameters())
        assert all(torch.equal(own[name], weight) for name, weight in plain.items())
        assert not positional
    assert not torch.equal(next(iter(comparison.build(4).parameters())), next(iter(comparison.build(3).parameters())))


def test_what_an_encoding_brings_is_counted_and_not_decayed(comparison):
    model, positional = build_patched(comparison, get_scheme("learned"), seed=0)
    assert sum(p.numel() for p in positional) == comparison.context * comparison.hidden_size
    optimizer = loop.make_optimizer(model, comparison.schedule(".", 0), positional)
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert not decayed & {id(p) for p in positional}
    assert decayed == {id(p) for p in model.parameters() if p.ndim >= 2} - {id(p) for p in positional}


def test_batches_are_a_function_of_seed_and_step(comparison):
    stream = Data.of(comparison).stream
    first = batch_at(comparison, stream, seed=0, step=5)
    torch.manual_seed(99)
    assert torch.equal(first, batch_at(comparison, stream, seed=0, step=5))
    assert not torch.equal(first, batch_at(comparison, stream, seed=0, step=6))
    assert not torch.equal(first, batch_at(comparison, stream, seed=1, step=5))
    assert first.shape == (comparison.batch_size, comparison.context + 1)


def test_the_stream_is_the_text_in_bytes_closed_by_zero(comparison, tmp_path):
    (tmp_path / "train" / "d0.txt").write_text("é!" * 20)
    stream = Data.of(comparison).stream
    assert bytes(stream[:61].tolist()) == "é!".encode() * 20 + b"\0"


def test_rows_are_complete(comparison):
    rows = compare(prepare(dataclasses.replace(comparison, seeds=(0, 1))))
    assert [(row.encoding, row.seed, row.length) for row in rows] == [
        (spec, seed, length) for spec in ("rope", "alibi") for seed in (0, 1) for length in (16, 32, 64)
    ]
    for row in rows:
        assert row.failure is None
        assert math.isclose(row.perplexity, math.exp(row.nll))
        assert row.scored_tokens == row.windows * row.targets == 4 * 8
        assert row.tokens_seen == 3 * 2 * 16
        assert row.scheme == get_scheme(row.encoding).to_dict()
        assert row.training_seconds > 0
    kept = LineFile(prepare(comparison).results.path, RunRow).rows
    assert sorted(kept, key=RunRow.key) == sorted(rows, key=RunRow.key)


def test_the_same_targets_are_scored_at_every_length(comparison):
    data = Data.of(comparison)
    model = comparison.build(0)
    for length in comparison.lengths:
        (first, *_) = data.selection.windows
        tokens = first.context(length)
        logits = model(tokens[None, :-1]).logits[0, -comparison.targets :]
        by_hand = torch.nn.functional.cross_entropy(logits, tokens[-comparison.targets :], reduction="none")
        torch.testing.assert_close(score(model, data.selection, length, comparison.targets, "cpu")[0], by_hand)


def test_a_second_run_computes_nothing(comparison, monkeypatch):
    rows = compare(prepare(comparison))
    monkeypatch.setattr(runs, "run_one", None)
    assert compare(prepare(comparison)) == rows


def test_going_on_after_a_kill_ends_where_an_uninterrupted_run_does(comparison, tmp_path, monkeypatch):
    whole = compare(prepare(dataclasses.replace(comparison, output=str(tmp_path / "whole"))))
    take_gradient = loop.take_gradient

    def killed(model, optimizer, loss_at, step):
        if step == 2:
            raise KeyboardInterrupt
        return take_gradient(model, optimizer, loss_at, step)

    monkeypatch.setattr(loop, "take_gradient", killed)
    with pytest.raises(KeyboardInterrupt):
        compare(prepare(comparison))
    taken = []
    monkeypatch.setattr(loop, "take_gradient", lambda *words: taken.append(words[3]) or take_gradient(*words))
    assert measured(compare(prepare(comparison))) == measured(whole)
    assert taken == [1, 2, 0, 1, 2]
    folder = run_folder(prepare(comparison).output, "rope", 0)
    assert [line["step"] for line in loop.read_log(folder)] == [1, 2, 3]
    assert not (folder / STATE).exists()


def test_a_line_that_was_cut_off_is_measured_again(comparison):
    rows = compare(prepare(comparison))
    path = prepare(comparison).results.path
    path.write_bytes(path.read_bytes()[:-5])
    assert measured(compare(prepare(comparison))) == measured(rows)


def test_two_processes_share_one_file(comparison):
    ours, theirs = (prepare(comparison.only([spec])) for spec in comparison.encodings)
    compare(ours)
    compare(theirs)
    outcome = run(comparison)
    assert [entry.encoding for entry in outcome.summary.entries] == ["rope", "alibi"]
    assert len(outcome.results.read_text().splitlines()) == 6


@pytest.mark.parametrize("fails", [False, True])
def test_the_number_of_threads_is_left_as_it_was(comparison, monkeypatch, fails):
    seen, before = [], torch.get_num_threads()

    def watched(*_, **__):
        seen.append(torch.get_num_threads())
        if fails:
            raise KeyboardInterrupt

    monkeypatch.setattr("rope_patch.training.experiment.compare", watched)
    with contextlib.suppress(KeyboardInterrupt):
        run(dataclasses.replace(comparison, threads=before + 1))
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


def test_other_settings_are_refused_by_name(comparison):
    compare(prepare(comparison))
    with pytest.raises(EvaluationError, match=r"steps=3 there, 4 here; learning_rate=0.004 there, 0.1 here"):
        prepare(dataclasses.replace(comparison, steps=4, learning_rate=0.1))
    prepare(dataclasses.replace(comparison, encodings=("nope",), seeds=(7,)))


def test_other_text_is_refused(comparison, tmp_path):
    prepare(comparison)
    (tmp_path / "train" / "d0.txt").write_text("other " * 100)
    with pytest.raises(EvaluationError, match="train_text="):
        prepare(comparison)


@pytest.mark.parametrize("failure", [InvalidField("not today"), RuntimeError("a bug")])
def test_an_encoding_that_fails_says_so_and_the_others_go_on(comparison, monkeypatch, failure):
    def broken(model, scheme):
        if scheme.name == "rope":
            raise failure
        return patch(model, scheme)

    patch = runs.patch
    monkeypatch.setattr(runs, "patch", broken)
    rope, alibi = compare(prepare(comparison))[:3], compare(prepare(comparison))[3:]
    assert {row.failure for row in rope} == {f"{type(failure).__name__}: {failure}"}
    assert all(math.isnan(row.nll) for row in rope)
    assert all(row.failure is None for row in alibi)
    error = run_folder(prepare(comparison).output, "rope", 0) / "error.txt"
    assert error.exists() == isinstance(failure, RuntimeError)
    monkeypatch.setattr(runs, "patch", patch)
    assert compare(prepare(comparison))[0].failure is not None
    assert compare(prepare(comparison), retry=True)[0].failure is None


def test_a_loss_that_is_not_finite_ends_that_run_alone(comparison, monkeypatch):
    loss = runs.next_token_loss
    calls = iter(range(1000))
    monkeypatch.setattr(runs, "next_token_loss", lambda *words: loss(*words) * (math.nan if next(calls) == 0 else 1))
    rows = compare(prepare(comparison))
    assert "Diverged: step 1: the loss is nan" in rows[0].failure
    assert rows[3].failure is None


def test_a_length_that_fails_leaves_the_shorter_ones(comparison):
    rows = compare(prepare(dataclasses.replace(comparison, encodings=("learned",))))
    assert [row.failure is None for row in rows] == [True, False, False]
    assert "position 16" in rows[1].failure


def test_a_full_disk_stops_everything(comparison, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(loop, "save_state", full)
    with pytest.raises(OSError, match="No space"):
        compare(prepare(comparison))


def test_costs_are_relative_to_rope(comparison):
    rows = measure_costs(prepare(comparison))
    assert [row.encoding for row in rows] == ["rope", "alibi"]
    assert rows[0].relative_memory == 1
    assert all(row.relative_speed > 0 and row.slowest == row.fastest for row in rows)
    assert measure_costs(prepare(comparison)) == rows
    assert run(comparison, costs=True) is None
    run(comparison)
    assert "memory" in run(comparison, costs=True).table.read_text()


def test_saved_bytes_count_a_storage_once_and_no_weights():
    layer = torch.nn.Linear(4, 4, bias=False)
    x = torch.randn(2, 4)

    def loss() -> torch.Tensor:
        y = layer(x)  # keeps x and the weight
        return (y * y).sum()  # keeps y, twice

    assert saved_bytes(layer, loss) == 2 * 2 * 4 * 4


def test_quartiles():
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)
    assert quartiles([7.0]) == (7.0, 7.0, 7.0)


WRONG = [
    ({"encodings": ()}, "encodings is empty"),
    ({"encodings": ("rope", "rope")}, "'rope' is there twice"),
    ({"steps": 0}, "steps=0 is not allowed; steps must be at least 1"),
    ({"steps": "many"}, "steps='many' is not allowed; steps must be a whole number"),
    ({"seeds": ()}, "seeds is empty"),
    ({"multiples": (2, 4)}, r"multiples=\[2, 4\] is not allowed; they begin with 1 and ascend"),
    ({"multiples": (1, 4, 2)}, "they begin with 1 and ascend"),
    ({"targets": 17}, "targets=17 is more than context=16"),
    ({"hidden_size": 30}, "hidden_size=30 is not allowed; it must be a multiple of 2 \\* heads = 4"),
    ({"learning_rate": 0}, "learning_rate=0 is not allowed"),
    ({"multiples": (1, 8)}, "a context of 128 tokens needs documents of 129 tokens; the longest of 3 has 90"),
    ({"held_out_text": None}, "give both or neither"),
]


@pytest.mark.parametrize(("changed", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_said_before_training(settings, changed, message, monkeypatch):
    monkeypatch.setattr(runs, "run_one", None)
    with pytest.raises(EvaluationError, match=message):
        run(Comparison(**{**settings, **changed}))


def test_an_unknown_scheme_a_missing_text_and_a_bad_output(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "run_one", None)
    with pytest.raises(UnknownScheme, match="did you mean 'alibi'"):
        run(Comparison(**{**settings, "encodings": ("rope", "alibbi")}))
    with pytest.raises(CorpusError, match="no text file or folder"):
        run(Comparison(**{**settings, "train_text": str(tmp_path / "none")}))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        run(Comparison(**{**settings, "output": str(tmp_path / "file" / "out")}))
    with pytest.raises(EvaluationError, match="'t5' is not among the encodings: rope, alibi"):
        run(Comparison(**settings), only=["t5"])


def test_the_command_line(settings, tmp_path, capsys, monkeypatch):
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(settings))
    words = ["compare", str(config), "--seeds", "0,1", "--steps", "2"]
    monkeypatch.setenv("COLUMNS", "100")
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "4/4 alibi, seed 1: NLL" in shown.err
    assert "comparison.png" in shown.out
    assert (tmp_path / "out" / "comparison.png").stat().st_size > 20_000
    numbers = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [curve["step"] for curve in numbers["encodings"][0]["curves"]["1"]] == [1, 2]

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "run_one", interrupted)
    assert main([*words[:2], "--schemes", "nope", "--steps", "2"]) == 130
    assert f"rope-patch compare {config} --schemes nope --steps 2" in capsys.readouterr().err
    assert main(["compare"]) == 2
    assert "nothing to compare" in capsys.readouterr().err
    assert main(["compare", str(config), "--seeds", "a"]) == 2
    assert "seeds 'a': whole numbers" in capsys.readouterr().err
