"""Retrieval measured: the same questions for every scheme, rows that are kept, models left as they were."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

import rope_patch
from rope_patch import AlreadyPatched, InvalidField, patch
from rope_patch.errors import EvaluationError
from rope_patch.evaluation.row import Row, Rows
from rope_patch.evaluation.run import run
from rope_patch.evaluation.tasks.passkey import Passkey
from rope_patch.evaluation.tasks.repeated_spans import RepeatedSpans

from .conftest import TRAINING_LENGTH, byte_tokenizer, documents
from .retrieval_rows import row

CORPUS = documents(90, 110, 20)
SCHEMES = ["plain", "window", "pi:target=auto", "rerope:window=8+logn"]


def make(**settings):
    given = {"longest": 64, "span": 6, "depths": (0.0, 1.0), "trials": 2, **settings}
    return RepeatedSpans(byte_tokenizer(), CORPUS, **given)


def go(model, schemes=SCHEMES, lengths=(16, 64), task=None, **settings):
    return run(model, task or make(), schemes, lengths, **settings)


class Counting(RepeatedSpans):
    """The task, counting its questions and interrupted where the test asks for it."""

    calls = 0
    stop_at = None

    def score(self, model, prompts):
        self.calls += 1
        if self.calls == self.stop_at:
            raise KeyboardInterrupt
        return super().score(model, prompts)


def counting(stop_at=None):  # of two prompts at a time
    task = Counting(byte_tokenizer(), CORPUS, longest=64, span=6, depths=(0.0, 1.0), trials=2, batch_size=2)
    task.stop_at = stop_at
    return task


@torch.no_grad()
def test_every_cell_is_the_loss_of_its_prompts_under_its_scheme(model):
    rows = go(model)
    assert [(r.line, r.length, r.depth) for r in rows] == [
        (line, length, depth) for line in SCHEMES for length in (16, 64) for depth in (0.0, 1.0)
    ]
    for found in rows:
        spelled = {"plain": "rope", "pi:target=auto": f"pi:factor={found.length / TRAINING_LENGTH}"}
        with patch(model, spelled.get(found.line, found.line)):
            for depth, nll in ((found.depth, found.nll), (None, found.control_nll)):
                losses = []
                for prompt in make().prompts(found.length, depth):
                    logits = model(prompt.tokens[None]).logits[0, -len(prompt.answer) :]
                    losses.append(torch.nn.functional.cross_entropy(logits, prompt.answer).item())
                assert nll == pytest.approx(sum(losses) / len(losses), abs=1e-5), (found.line, found.length, depth)
    assert len({(r.length, r.depth, r.prompts) for r in rows}) == 4  # the same questions for every scheme


def test_a_row_says_everything(model):
    said = json.loads(go(model, ["window"], (64,), task=make(seed=3, depths=(0.0,)), name="tiny")[0].to_json())
    expected = {
        "task": "spans",
        "model": "tiny",
        "line": "window",
        "scheme": {"name": "window", "window": TRAINING_LENGTH},
        "mount": "late",
        "length": 64,
        "depth": 0.0,
        "training_length": TRAINING_LENGTH,
        "prompt_tokens": 64.0,
        "distance": 64 - 11 + 1,
        "span": 6,
        "trials": 2,
        "seed": 3,
        "dtype": "float32",
        "attention": "sdpa",
        "device": "cpu",
    }
    assert {key: said[key] for key in expected} == expected
    assert said["versions"]["rope_patch"] == rope_patch.__version__
    measured = {"accuracy", "exact", "nll", "control_accuracy", "control_exact", "control_nll"}
    measured |= {"seconds", "tokens_per_second", "weights", "prompts"}
    assert measured == set(said) - set(expected) - {"regime", "versions", "commit", "text", "nll_by_document"}


def test_a_row_survives_the_file():
    for found in (row(), row(nll=None, control_accuracy=None, span=None)):
        assert Row.from_json(found.to_json()) == found
    assert '"nll": null' in row(nll=math.inf).to_json()


def test_prompts_of_unequal_length_are_never_answered_together(model):
    asked = []

    class Listening(Passkey):
        def score(self, model, prompts):
            asked.append([len(prompt.tokens) for prompt in prompts])
            return torch.zeros(len(prompts), 1, dtype=torch.bool), None

        def prompts(self, length, depth):
            return [] if depth is None else [*super().prompts(length, depth), *super().prompts(length - 40, depth)]

    go(model, ["plain"], (400,), Listening(byte_tokenizer(), [0.5], 3, batch_size=2))
    assert sorted(len(batch) for batch in asked) == [1, 1, 2, 2]
    assert all(len(set(batch)) == 1 for batch in asked)


def test_an_interrupted_run_goes_on_where_it_stopped(model, tmp_path):
    path = tmp_path / "rows.jsonl"
    whole = [(r.accuracy, r.nll, r.control_nll) for r in go(model)]
    with pytest.raises(KeyboardInterrupt):
        go(model, task=counting(stop_at=6), rows=Rows(path))
    kept = path.read_text()
    assert kept.count("\n") == 3  # the third question of a column of three is the sixth in all

    path.write_text(kept + kept.splitlines()[0][:100])  # killed while writing
    task = counting()
    rows = go(model, task=task, rows=Rows(path))
    assert task.calls == 2 + 6 * 3  # a control and a depth, then the other columns
    assert [(r.accuracy, r.nll, r.control_nll) for r in rows] == whole
    assert path.read_text().startswith(kept)
    assert path.read_text().count("\n") == len(rows)

    task = counting()
    assert go(model, task=task, rows=Rows(path)) == rows
    assert task.calls == 0


def test_other_weights_prompts_or_dtype_are_measured_anew(model, tmp_path):
    results = Rows(tmp_path / "rows.jsonl")

    def measured(**settings):
        before = len(results.path.read_text().splitlines())
        go(model, ["plain"], (16,), task=make(depths=(0.0,), **settings), rows=results)
        return len(results.path.read_text().splitlines()) - before

    assert measured() == 1
    assert measured() == 0
    assert measured(batch_size=2) == 0
    assert measured(seed=1) == 1
    assert measured(span=5) == 1
    assert measured(trials=3) == 1
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert measured() == 1
    model.to(torch.bfloat16)
    assert measured() == 1


def test_half_precision_asks_the_same_questions(model):
    single = go(model, ["rerope:window=8"], (64,))
    half = go(model.to(torch.bfloat16), ["rerope:window=8"], (64,))
    assert [r.prompts for r in half] == [r.prompts for r in single]
    assert {r.dtype for r in half} == {"bfloat16"}
    for a, b in zip(half, single, strict=True):
        assert a.nll == pytest.approx(b.nll, rel=0.1)
    (key,) = go(model, ["rerope:window=8"], (400,), Passkey(byte_tokenizer(), [0.5], 2, batch_size=2))
    assert (key.task, key.span, key.nll, key.control_accuracy) == ("passkey", None, None, None)
    assert 380 <= key.prompt_tokens < 400


def test_modes_weights_and_patches_are_as_before_also_after_an_error(model):
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    go(model)
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(KeyboardInterrupt):
        go(model, ["rerope:window=8"], task=counting(stop_at=2))
    assert [module.training for module in model.modules()] == modes
    patch(model, "rerope", window=8).remove()  # nothing was left on it


def test_a_patched_model_is_measured_as_it_is(model, monkeypatch):
    middle = make(depths=(0.5,))
    (alone,) = go(model, ["rerope:window=8"], (64,), middle)
    with patch(model, "rerope:window=8"):
        monkeypatch.setattr("rope_patch.evaluation.measured_model.mount_scheme", None)  # never taken apart
        (carried,) = go(model, ["rerope:window=8"], (64,), middle)
    assert (carried.nll, carried.mount, carried.scheme) == (alone.nll, alone.mount, alone.scheme)


REFUSED = {
    "lengths 32, 16: they must ascend": {"lengths": (32, 16)},
    "every length must be a whole number": {"lengths": (0, 16)},
    "no lengths were given": {"lengths": ()},
    "length 8: a span of 6 tokens twice": {"lengths": (8, 16)},
    "no schemes were given": {"schemes": []},
    "scheme 'plain' is listed twice": {"schemes": ["plain", "plain"]},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_measured_is_refused_before_anything_runs(message, model):
    with pytest.raises(EvaluationError, match=message):
        go(model, task=counting(stop_at=1), **REFUSED[message])


@pytest.mark.parametrize(
    ("depths", "message"),
    [
        ((0.0, 1.5), "depths 0, 1.5: shares of the context from 0 to 1"),
        ((0.5, 0.5), "depths 0.5, 0.5: shares of the context from 0 to 1, in ascending order"),
        ((), "depths : shares of the context"),
    ],
)
def test_depths_that_are_none_are_refused(depths, message):
    with pytest.raises(EvaluationError, match=message):
        make(depths=depths)


def test_schemes_and_models_that_do_not_fit_are_refused_before_anything_runs(model):
    with pytest.raises(InvalidField, match=r"factor=0\.5 is not allowed"):
        go(model, ["plain", "pi:factor=0.5"], task=counting(stop_at=1))
    with patch(model, "rerope", window=8), pytest.raises(AlreadyPatched, match="carries rerope:window=8"):
        go(model)
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=257, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )
    with pytest.raises(EvaluationError, match="T5ForConditionalGeneration is an encoder with a decoder"):
        go(t5, ["plain"], task=counting(stop_at=1))
    config = GPT2Config(vocab_size=257, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0)
    table = GPT2LMHeadModel(config).eval()
    with pytest.raises(EvaluationError, match="plain at 64 tokens: GPT2Model has 16 positions"):
        go(table, ["plain"], task=counting(stop_at=1))
    assert [r.mount for r in go(table, ["hierarchical"], (64,))] == ["embedding"] * 2
