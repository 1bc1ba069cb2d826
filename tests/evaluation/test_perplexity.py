from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import rope_patch
from rope_patch import AlreadyPatched, InvalidField, NothingToPatch, patch
from rope_patch.errors import EvaluationError
from rope_patch.evaluation import measured_model
from rope_patch.evaluation.protocols import protocol as shared
from rope_patch.evaluation.row import Rows

from .conftest import TRAINING_LENGTH, documents, measure

CORPUS = documents(70, 80, 20)
SCHEMES = ["plain", "window", "pi:target=auto", "rerope:window=8+logn"]


def go(model, tokenizer, schemes=SCHEMES, lengths=(16, 32, 64), **settings):
    return measure(model, tokenizer, CORPUS, schemes, lengths, **{"targets": 8, "windows_per_document": 1, **settings})


@torch.no_grad()
def reference(model, tokenizer, scheme, length, positions):
    """Mean NLL of targets at these positions of the context, from all logits."""
    losses = []
    for document in CORPUS[:2]:
        tokens = torch.tensor(tokenizer(document["text"])["input_ids"][-(length + 1) :])
        with patch(model, scheme):
            logits = model(tokens[None, :-1]).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")[positions])
    return torch.cat(losses).mean().item()


def test_last_is_the_mean_over_the_last_targets_at_every_length(model, tokenizer):
    rows = {(row.line, row.length): row for row in go(model, tokenizer)}
    assert len(rows) == 12
    for length in (16, 32, 64):
        expected = {
            "plain": reference(model, tokenizer, "rope", length, slice(-8, None)),
            "window": reference(model, tokenizer, f"window:window={TRAINING_LENGTH}", length, slice(-8, None)),
            "pi:target=auto": reference(model, tokenizer, f"pi:factor={length / 16}", length, slice(-8, None)),
            "rerope:window=8+logn": reference(model, tokenizer, "rerope:window=8+logn", length, slice(-8, None)),
        }
        for line, nll in expected.items():
            assert rows[line, length].nll == pytest.approx(nll, abs=1e-5), (line, length)
            assert rows[line, length].perplexity == pytest.approx(math.exp(nll), rel=1e-4)
    assert rows["plain", 16].nll != pytest.approx(rows["plain", 64].nll, abs=1e-3)  # the test can tell lengths apart


def test_the_same_targets_are_scored_at_every_length(model, tokenizer, monkeypatch):
    scored = {}

    def spy(model, input_ids, targets):
        scored.setdefault(input_ids.shape[1], []).append(targets.tolist())
        return torch.zeros(targets.shape)

    monkeypatch.setattr(shared, "chunked_nll", spy)
    go(model, tokenizer, ["plain"])
    assert set(scored) == {16, 32, 64}
    assert scored[16] == scored[32] == scored[64]
    assert [len(targets[0]) for targets in scored[16]] == [8, 8]


def test_by_position_bins_one_pass(model, tokenizer):
    rows = go(model, tokenizer, ["plain", "pi:target=auto"], protocol="by_position", targets=None)
    assert [(row.length, row.targets) for row in rows[:3]] == [(16, 16), (32, 16), (64, 32)]
    bins = [slice(0, 16), slice(16, 32), slice(32, 64)]
    for row, span in zip(rows[:3], bins, strict=True):
        assert row.nll == pytest.approx(reference(model, tokenizer, "rope", 64, span), abs=1e-5)
    for row, span in zip(rows[3:], bins, strict=True):
        assert row.scheme == {"name": "pi", "factor": 4.0}
        assert row.nll == pytest.approx(reference(model, tokenizer, "pi:factor=4", 64, span), abs=1e-5)


def test_a_row_says_everything(model, tokenizer):
    row = go(model, tokenizer, ["window"], [16], seed=3, name="tiny")[0]
    said = json.loads(row.to_json())
    assert said["scheme"] == {"name": "window", "window": TRAINING_LENGTH}  # its default, filled in
    expected = {
        "model": "tiny",
        "line": "window",
        "mount": "late",
        "protocol": "last",
        "length": 16,
        "training_length": TRAINING_LENGTH,
        "targets": 8,
        "documents": 3,
        "windows": 3,
        "short_documents": 0,
        "scored_tokens": 24,
        "dtype": "float32",
        "attention": "sdpa",
        "device": "cpu",
        "seed": 3,
    }
    assert {key: said[key] for key in expected} == expected
    assert said["versions"] == {
        "python": said["versions"]["python"],
        "torch": torch.__version__,
        "transformers": said["versions"]["transformers"],
        "rope_patch": rope_patch.__version__,
    }
    assert {"nll", "perplexity", "seconds", "tokens_per_second", "texts", "weights", "commit"} < set(said)


def test_short_documents_are_said(model, tokenizer):
    row = go(model, tokenizer, ["plain"])[0]
    assert (row.documents, row.short_documents, row.windows) == (2, 1, 2)


def test_scheme_objects_are_lines_too(model, tokenizer):
    (row,) = go(model, tokenizer, [rope_patch.ReRoPE(window=8)], [32])
    assert row.line == "rerope:window=8"


def test_modes_weights_and_patches_are_as_before(model, tokenizer):
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    go(model, tokenizer)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    patch(model, "rerope", window=8).remove()  # nothing was left on it


def test_the_model_is_unpatched_after_an_error(model, tokenizer, monkeypatch):
    def broken(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(shared, "chunked_nll", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        go(model.train(), tokenizer, ["rerope:window=8"])
    assert model.training
    patch(model, "rerope", window=8).remove()


def test_an_interrupted_run_goes_on_where_it_stopped(model, tokenizer, tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    whole = [row.nll for row in go(model, tokenizer)]
    calls = []

    def counting(*arguments, stop_at=None):
        calls.append(arguments)
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        return chunked_nll(*arguments)

    chunked_nll = shared.chunked_nll
    monkeypatch.setattr(shared, "chunked_nll", lambda *a: counting(*a, stop_at=8))
    with pytest.raises(KeyboardInterrupt):
        go(model, tokenizer, results=Rows(path))
    kept = path.read_text()
    assert kept.count("\n") == 3  # two documents each; the eighth pass was the second document of the fourth row

    calls.clear()
    path.write_text(kept + kept.splitlines()[0][:100])  # killed while writing
    monkeypatch.setattr(shared, "chunked_nll", counting)
    rows = go(model, tokenizer, results=Rows(path))
    assert len(calls) == 2 * (len(rows) - 3)
    assert [row.nll for row in rows] == whole
    assert path.read_text().startswith(kept)
    assert path.read_text().count("\n") == len(rows)

    calls.clear()
    go(model, tokenizer, results=Rows(path))
    assert calls == []


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_pass_of_which_some_rows_were_lost_has_all_of_them_again(lost, model, tokenizer, tmp_path):
    settings, path = {"protocol": "by_position"}, tmp_path / "rows.jsonl"
    whole = measure(model, tokenizer, documents(70), ["plain"], [8, 16, 32], Rows(path), **settings)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:lost] + lines[lost + 1 :]))
    again = measure(model, tokenizer, documents(70), ["plain"], [8, 16, 32], Rows(path), **settings)
    assert [(row.length, row.nll) for row in again] == [(row.length, row.nll) for row in whole]
    assert sorted(row.length for row in Rows(path).rows) == [8, 16, 32]


def test_other_weights_texts_targets_or_dtype_are_measured_anew(model, tokenizer, tmp_path):
    results = Rows(tmp_path / "rows.jsonl")

    def measured(**settings):
        before = len(results.path.read_text().splitlines())
        go(model, tokenizer, ["plain"], [16], results=results, **settings)
        return len(results.path.read_text().splitlines()) - before

    assert measured() == 1
    assert measured() == 0
    assert measured(targets=4) == 1
    assert measured(documents=2) == 1
    assert measured(name="another") == 1
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert measured() == 1
    model.to(torch.bfloat16)
    assert measured() == 1


REFUSED = {
    "lengths 32, 16: they must ascend, but 16 follows 32": {"lengths": [32, 16]},
    "they must ascend, but 16 follows 16": {"lengths": [16, 16]},
    "every length must be a whole number of at least 1 token": {"lengths": [0, 16]},
    "lengths 16.5: every length": {"lengths": [16.5]},
    "no lengths were given": {"lengths": []},
    "targets=17 is more than the shortest length of 16 tokens": {"targets": 17},
    "targets=16 is more than the shortest length of 8 tokens": {"lengths": [8], "targets": None},
    "targets=0 is not allowed": {"targets": 0},
    "protocol 'lats': did you mean 'last'": {"protocol": "lats"},
    "'by_position' scores every token": {"protocol": "by_position"},
    "no schemes were given": {"schemes": []},
    "scheme 'plain' is listed twice": {"schemes": ["plain", "plain"]},
    "a context of 128 tokens needs documents of 129 tokens; the longest of 3 has 80": {"lengths": [16, 128]},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_measured_is_refused_before_anything_runs(message, model, tokenizer, monkeypatch):
    monkeypatch.setattr(shared, "chunked_nll", None)
    with pytest.raises(EvaluationError, match=message):
        go(model, tokenizer, **REFUSED[message])


def test_schemes_that_do_not_fit_are_refused_before_anything_runs(model, tokenizer, monkeypatch):
    monkeypatch.setattr(shared, "chunked_nll", None)
    with pytest.raises(InvalidField, match=r"factor=0\.5 is not allowed"):
        go(model, tokenizer, ["plain", "pi:factor=0.5"])
    for scheme in ("dynamic_ntk", "lampe"):
        with pytest.raises(EvaluationError, match=f"{scheme} depends on the length"):
            go(model, tokenizer, [scheme], protocol="by_position", targets=None)
    with patch(model, "rerope", window=8), pytest.raises(AlreadyPatched, match="carries rerope:window=8"):
        go(model, tokenizer)


def test_one_pass_does_not_measure_a_checkpoint_whose_frequencies_follow_the_length(model, tokenizer):
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    following = type(model)(model.config).eval()
    one_pass = {"protocol": "by_position", "targets": None}
    for scheme in ("plain", "rerope:window=8"):
        with pytest.raises(EvaluationError, match=f"{scheme} depends on the length"):
            go(following, tokenizer, [scheme], **one_pass)
    assert go(following, tokenizer, ["pi:factor=4"], **one_pass)


def test_a_model_that_no_scheme_would_change_is_refused(tokenizer):
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MistralConfig(**sizes, num_key_value_heads=1, vocab_size=257, max_position_embeddings=64, sliding_window=8)
    with pytest.raises(NothingToPatch):
        go(MistralForCausalLM(config), tokenizer, ["rerope:window=8"])


def test_a_model_with_a_table_of_positions_is_measured_as_far_as_its_table_reaches(tokenizer):
    config = GPT2Config(vocab_size=257, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).eval()
    plain, table = go(model, tokenizer, ["plain", "hierarchical"], (16,))
    assert plain.nll == table.nll
    assert table.mount == "embedding"
    assert go(model, tokenizer, ["hierarchical"], (16, 64))[1].length == 64
    with pytest.raises(EvaluationError, match="plain at 64 tokens: GPT2Model has 16 positions"):
        go(model, tokenizer, ["plain", "hierarchical"], (16, 64))


def test_a_patched_model_is_measured_as_it_is(model, tokenizer, monkeypatch):
    alone = go(model, tokenizer, ["rerope:window=8+logn"])
    carried = patch(model, "rerope:window=8+logn")
    monkeypatch.setattr(measured_model, "mount_scheme", None)  # never taken apart
    for spec in ("rerope:window=8+logn", carried.scheme):
        rows = go(model, tokenizer, [spec])
        assert [(row.nll, row.scheme) for row in rows] == [(row.nll, row.scheme) for row in alone]
    assert rows[0].mount == carried.plan.mounts() == "late"
    for other in ("plain", "rerope:window=9+logn"):
        with pytest.raises(AlreadyPatched, match=r"carries rerope:window=8.*logn.*before measuring"):
            go(model, tokenizer, ["rerope:window=8+logn", other])
    carried.remove()


def test_another_scheme_or_line_throws_no_row_away(model, tokenizer, tmp_path, monkeypatch):
    results = Rows(tmp_path / "rows.jsonl")
    go(model, tokenizer, ["plain", "pi:factor=2.0"], [32], results=results)
    go(model, tokenizer, ["plain", "pi:factor=2.0", "rerope:window=8"], [32], results=results)
    assert len(results.path.read_text().splitlines()) == 3
    monkeypatch.setattr(shared, "chunked_nll", None)
    (row,) = go(model, tokenizer, ["pi:target=auto"], [32], results=results)  # the same scheme in other words
    assert row.line == "pi:target=auto"


def test_rows_keep_what_a_paired_error_needs(model, tokenizer):
    corpus = documents(*range(20, 28))

    def alone(documents, **settings):
        return measure(model, tokenizer, documents, ["plain"], [16], **{"targets": 2, **settings})[0]

    eight = alone(corpus, windows_per_document=2)
    by_document = [alone([document], windows_per_document=2).nll for document in corpus]
    assert eight.windows == 16
    assert eight.nll_by_document == pytest.approx(by_document, abs=1e-5)

    seven = alone(corpus[1:])  # too few documents to take an error over: their windows are counted
    assert len(seven.nll_by_document) == seven.windows >= 16
    assert sum(seven.nll_by_document) / seven.windows == pytest.approx(seven.nll, abs=1e-5)
    book = alone(documents(300))
    assert (book.documents, book.windows, len(book.nll_by_document)) == (1, 16, 16)

    single = alone(CORPUS[:1], protocol="sliding", stride=1, targets=None)
    assert len(single.nll_by_document) == 32  # blocks of its windows
    both = alone(CORPUS[:2], protocol="sliding", stride=1, targets=None)
    assert (both.documents, len(both.nll_by_document)) == (2, 32)
    few = alone(CORPUS[:1], targets=8, windows_per_document=3)
    assert len(few.nll_by_document) == few.windows == 3


def test_rows_name_the_text_and_the_documents_that_were_asked_for(model, tokenizer, tmp_path, monkeypatch):
    results = Rows(tmp_path / "rows.jsonl")
    (old,) = go(model, tokenizer, ["pi:factor=2"], [16], results=results)
    assert (old.text, old.asked) == ("", None)
    monkeypatch.setattr(shared, "chunked_nll", None)  # what is called otherwise is not measured again
    (row,) = go(model, tokenizer, ["pi:factor=2"], [16], results=results, text="book.txt", documents=8)
    assert (row.text, row.asked, row.documents, row.nll) == ("book.txt", 8, 3, old.nll)
