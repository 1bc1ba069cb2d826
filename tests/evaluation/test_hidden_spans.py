"""Loss against length for T5's style: which tokens are hidden, what is read, and that all of it goes through."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rope_patch import patch
from rope_patch.data.hidden_spans import corrupt, draw_spans, sentinels_of
from rope_patch.errors import EvaluationError
from rope_patch.evaluation.protocols.last import SpanCorruption
from rope_patch.evaluation.row import Rows
from rope_patch.evaluation.tasks.perplexity import Perplexity
from tests.evaluation.conftest import byte_tokenizer, documents
from tests.evaluation.conftest import measure as measured
from tests.models.t5_families import build
from tests.recipes import run_recipe

CORPUS = documents(150, 170, 20)
SENTINELS = 16

measure = partial(measured, windows_per_document=1)


def t5_tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["</s>", *(f"<extra_id_{i}>" for i in range(SENTINELS))]}
    )
    tokenizer.eos_token = "</s>"
    return tokenizer


def t5_model(family="t5"):
    return build(family, vocab_size=257 + 1 + SENTINELS)


@settings(max_examples=200, deadline=None)
@given(st.integers(14, 700), st.integers(0, 50))
def test_spans_hide_their_share_and_never_touch(length, seed):
    spans = draw_spans(length, torch.Generator().manual_seed(seed))
    edges = [edge for span in spans for edge in span]
    assert edges == sorted(set(edges))
    assert edges[0] > 0
    assert edges[-1] <= length
    hidden = sum(stop - start for start, stop in spans)
    assert hidden == round(0.15 * length)
    assert len(spans) == max(1, round(hidden / 3))


def test_the_example_of_the_paper():
    words = ["Thank", "you", "for", "inviting", "me", "to", "your", "party", "last", "week", "."]
    tokens = torch.arange(100, 100 + len(words))
    source, target, hidden = corrupt(tokens, [(2, 4), (8, 9)], [3, 2, 1], end=9)
    assert source.tolist() == [100, 101, 3, 104, 105, 106, 107, 2, 109, 110, 9]
    assert target.tolist() == [3, 102, 103, 2, 108, 1, 9]
    assert target[hidden].tolist() == [102, 103, 108]


def test_the_same_tokens_are_hidden_at_every_length(monkeypatch):
    model, tokenizer, calls = t5_model(), t5_tokenizer(), []

    def spy(input_ids, labels):
        calls.append((input_ids.tolist()[0], labels.tolist()[0]))
        return type("Output", (), {"logits": torch.zeros(1, labels.shape[1], 257 + 1 + SENTINELS)})

    monkeypatch.setattr(model, "forward", spy)
    measure(model, tokenizer, CORPUS, ["plain"], [40, 80, 140], targets=40)
    assert len(calls) == 6
    shortest, *longer = calls[:2], calls[2:4], calls[4:]
    assert shortest[0][1] != shortest[1][1], "each document has tokens of its own"
    for more, at_length in zip((40, 100), longer, strict=True):
        for (source, labels), (longer_source, longer_labels) in zip(shortest, at_length, strict=True):
            assert longer_labels == labels
            assert longer_source[more:] == source


@pytest.mark.parametrize("family", ["t5", "umt5"])
@pytest.mark.parametrize("spec", ["plain", "t5:target=auto", "alibi", "rerope:window=6"])
def test_rows_are_the_loss_on_the_hidden_tokens(family, spec):
    model, tokenizer = t5_model(family), t5_tokenizer()
    (row,) = measure(model, tokenizer, CORPUS, [spec], [96], targets=40, seed=3)
    assert row.protocol == "span_corruption"
    assert row.targets == 40
    assert row.scored_tokens == 2 * 6
    losses, sentinels = [], sentinels_of(tokenizer)
    for window, document in enumerate(CORPUS[:2]):
        tokens = torch.tensor(tokenizer(document["text"])["input_ids"][-96:])
        spans = draw_spans(40, torch.Generator().manual_seed(3 * 1_000_003 + window))
        source, target, hidden = corrupt(
            tokens, [(56 + start, 56 + stop) for start, stop in spans], sentinels, tokenizer.eos_token_id
        )
        scheme = spec.replace("target=auto", "interpolation=3")
        with torch.no_grad(), nullcontext() if spec == "plain" else patch(model, scheme):
            logits = model(input_ids=source[None], labels=target[None]).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits[hidden], target[hidden], reduction="none"))
    assert row.nll == pytest.approx(torch.cat(losses).mean().item(), abs=1e-4)


@pytest.mark.parametrize(
    ("make", "protocol", "said"),
    [
        (t5_model, "last", "an encoder with a decoder"),
        (t5_model, "by_position", "an encoder with a decoder"),
        (None, "span_corruption", "a decoder alone"),
    ],
)
def test_a_protocol_of_another_style_is_refused(model, make, protocol, said):
    with pytest.raises(EvaluationError, match=said):
        measure(make() if make else model, t5_tokenizer(), CORPUS, ["plain"], [40], protocol=protocol)


def test_what_cannot_be_hidden_is_said():
    with pytest.raises(EvaluationError, match="<extra_id_0>"):
        sentinels_of(byte_tokenizer())
    with pytest.raises(EvaluationError, match=r"needs 21 sentinels.*has 16"):
        SpanCorruption(Perplexity(t5_tokenizer(), targets=400), [400], 512)
    with pytest.raises(EvaluationError, match="too few"):
        SpanCorruption(Perplexity(t5_tokenizer(), targets=2), [400], 512)


def test_spans_of_another_seed_are_another_measurement(tmp_path):
    results = Rows(tmp_path / "rows.jsonl")
    for seed in (0, 1, 0):
        measure(t5_model(), t5_tokenizer(), CORPUS, ["plain"], [96], targets=40, seed=seed, results=results)
    assert len(results.rows) == 2


def test_the_recipe_chooses_the_protocol_by_the_model(tmp_path, capsys):
    t5_model().save_pretrained(tmp_path / "t5")
    t5_tokenizer().save_pretrained(tmp_path / "t5")
    for document in CORPUS:
        (tmp_path / f"{document['name']}.txt").write_text(document["text"])
    words = ["--model", tmp_path / "t5", "--text", tmp_path / "*.txt", "--lengths", "40,120", "--targets", 40]
    words += ["--scheme", "t5:target=auto", "--output", tmp_path / "out", "--json"]
    assert run_recipe("perplexity", words) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["protocol"] for row in rows} == {"span_corruption"}
    assert {row["line"] for row in rows} == {"plain", "window", "t5:target=auto"}
    assert len(rows) == 6
    assert (tmp_path / "out" / "perplexity.png").is_file()
