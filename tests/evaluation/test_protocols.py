"""Whole documents: each protocol against a literal reading of its definition, one forward pass per token or window."""

from __future__ import annotations

import math

import pytest
import torch

from rope_patch import patch
from rope_patch.errors import EvaluationError
from rope_patch.evaluation.protocols import protocol as shared
from rope_patch.evaluation.protocols.whole_documents import slide
from rope_patch.evaluation.row import Rows
from rope_patch.evaluation.tasks.perplexity import PROTOCOLS, Perplexity

from .conftest import byte_tokenizer, documents, measure

CORPUS = documents(37, 45, 20)
LENGTHS = (16, 24)


def go(model, tokenizer, protocol, lengths=LENGTHS, schemes=("plain",), corpus=CORPUS, **settings):
    return measure(model, tokenizer, corpus, list(schemes), lengths, protocol=protocol, **settings)


def ids(tokenizer, document):
    return tokenizer(document["text"], add_special_tokens=False)["input_ids"]


@torch.no_grad()
def token_by_token(model, sequence, front, length, stride):
    """-ln p of every token of prefix and document but the first, each from a forward pass of its own.

    The first `length` targets see everything before them; target p beyond sees the tokens of the first window that
    reaches it, and `front` (if there is one) in place of that window's first token.
    """
    found = []
    for place in range(1, len(sequence)):
        number = 0 if place <= length else math.ceil((place - length) / stride)
        context = sequence[number * stride : place]
        if front:
            context = [*front, *context[1:]]
        logits = model(torch.tensor([context])).logits[0, -1].double()
        found.append(-torch.log_softmax(logits, -1)[sequence[place]].item())
    return found


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize(("protocol", "stride"), [("sliding", 5), ("sliding", 16), ("disjoint", None)])
def test_every_token_is_scored_once_from_the_window_that_reaches_it_first(model, protocol, stride, bos):
    tokenizer, front = byte_tokenizer(bos), [0] if bos else []
    for row in go(model, tokenizer, protocol, **({"stride": stride} if stride else {})):
        expected = []
        for document in CORPUS[:2]:
            sequence = [*front, *ids(tokenizer, document)]
            expected += token_by_token(model, sequence, front, row.length, stride or row.length)
        assert row.nll == pytest.approx(sum(expected) / len(expected), abs=1e-5)
        assert row.scored_tokens == len(expected) == 37 + 45 - (0 if bos else 2)
        assert row.perplexity == pytest.approx(math.exp(row.nll))
        assert (row.documents, row.short_documents, row.targets) == (2, 1, stride or row.length)


@torch.no_grad()
def yarn(model, tokenizer, texts, length, stride=256, truncate=False):
    """What YaRN's script does, in other words: the model's own loss over labels, window by window."""
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    room = length - len(start)
    if truncate:
        texts, stride = [text[:room] for text in texts], room
    losses = []
    for text in texts:
        scored_until = 0
        for first in range(0, len(text), stride):
            last = min(first + room, len(text))
            inputs = torch.tensor([start + text[first:last]])
            labels = inputs.clone()
            labels[:, : -(last - scored_until)] = -100
            losses.append(model(input_ids=inputs, labels=labels).loss)
            scored_until = last
            if last == len(text):
                break
    return torch.stack(losses).mean().item(), len(losses)


@pytest.mark.parametrize("start", [None, "<s>"])
@pytest.mark.parametrize("scheme", ["plain", "dynamic_ntk"])
def test_yarn_compat_is_the_number_of_the_script(model, start, scheme):
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = start  # the script sets it in front even where the tokenizer itself does not
    texts = [ids(tokenizer, document) for document in CORPUS[:2]]
    for stride in (5, 15):
        for row in go(model, tokenizer, "yarn_compat", schemes=[scheme], stride=stride):
            with patch(model, "rope" if scheme == "plain" else scheme):
                nll, count = yarn(model, tokenizer, texts, row.length, stride)
            assert row.nll == pytest.approx(nll, abs=1e-5)
            assert row.windows == count
            assert row.scored_tokens == 37 + 45 - (0 if start else 2)
            assert row.targets == stride
    for row in go(model, tokenizer, "yarn_truncate", schemes=[scheme]):
        with patch(model, "rope" if scheme == "plain" else scheme):
            nll, count = yarn(model, tokenizer, texts, row.length, truncate=True)
        assert row.nll == pytest.approx(nll, abs=1e-5)
        assert row.windows == count == 2
        assert row.targets == row.length - 1
        assert row.scored_tokens == 2 * row.targets


def test_windows_weigh_differently_by_token_and_by_window(model, tokenizer):
    (sliding,) = go(model, tokenizer, "sliding", [16], stride=7)
    (unweighted,) = go(model, tokenizer, "yarn_compat", [16], stride=7)
    assert sliding.nll != pytest.approx(unweighted.nll, abs=1e-3)


@pytest.mark.parametrize(
    ("tokens", "stride", "spans"),
    [
        (16, 4, [(0, 16, 16)]),
        (17, 4, [(0, 16, 16), (4, 17, 1)]),
        (20, 4, [(0, 16, 16), (4, 20, 4)]),
        (21, 4, [(0, 16, 16), (4, 20, 4), (8, 21, 1)]),
        (33, 16, [(0, 16, 16), (16, 32, 16), (32, 33, 1)]),
        (3, 16, [(0, 3, 3)]),
        (18, 1, [(0, 16, 16), (1, 17, 1), (2, 18, 1)]),
    ],
)
def test_windows_counted_by_hand(tokens, stride, spans):
    assert list(slide(tokens, 16, stride)) == spans


@pytest.mark.parametrize(
    ("size", "bos", "counted"),
    [
        (17, False, (1, 16)),  # 16 inputs predict 16 tokens; the first has nothing before it
        (18, False, (2, 17)),
        (16, True, (1, 16)),  # the start of text stands before the first
        (17, True, (2, 17)),
    ],
)
@pytest.mark.parametrize("protocol", ["sliding", "disjoint"])
def test_documents_that_just_fill_a_window(model, protocol, size, bos, counted):
    stride = {"stride": 4} if protocol == "sliding" else {}
    (row,) = go(model, byte_tokenizer(bos), protocol, [16], corpus=documents(size), **stride)
    assert (row.windows, row.scored_tokens) == counted


@pytest.mark.parametrize(("size", "bos"), [(16, False), (15, True)])
@pytest.mark.parametrize("protocol", ["sliding", "disjoint"])
def test_a_document_that_does_not_fill_the_longest_window_is_short(model, protocol, size, bos):
    stride = {"stride": 4} if protocol == "sliding" else {}
    needed = 16 if bos else 17
    with pytest.raises(EvaluationError, match=f"needs documents of {needed} tokens; the longest of 1 has {size}"):
        go(model, byte_tokenizer(bos), protocol, [16], corpus=documents(size), **stride)


def test_a_document_is_read_as_far_as_it_is_asked_for(model, tokenizer):
    cut = go(model, tokenizer, "sliding", stride=5, tokens_per_document=30)
    by_hand = [{"name": row["name"], "text": row["text"][:30]} for row in CORPUS]
    expected = go(model, tokenizer, "sliding", stride=5, corpus=by_hand)
    assert [row.nll for row in cut] == [row.nll for row in expected]
    assert cut[0].texts == expected[0].texts
    assert cut[0].texts != go(model, tokenizer, "sliding", stride=5)[0].texts


def test_every_length_scores_the_same_documents(model, tokenizer):
    rows = go(model, tokenizer, "disjoint", (4, 16, 24))
    assert {(row.documents, row.scored_tokens, row.short_documents, row.texts) for row in rows} == {
        (2, 80, 1, rows[0].texts)
    }
    assert [row.windows for row in rows] == [9 + 11, 3 + 3, 2 + 2]


def test_another_stride_is_another_measurement(model, tokenizer, tmp_path, monkeypatch):
    results = Rows(tmp_path / "rows.jsonl")
    for stride in (4, 5):
        go(model, tokenizer, "sliding", stride=stride, results=results)
    go(model, tokenizer, "disjoint", results=results)
    assert len(results.rows) == 6
    monkeypatch.setattr(shared, "chunked_nll", None)  # now everything is known
    assert [row.targets for row in go(model, tokenizer, "sliding", stride=5, results=results)] == [5, 5]


def test_the_stride_is_256_where_the_shortest_length_allows_it(model, tokenizer):
    assert {row.targets for row in go(model, tokenizer, "sliding")} == {16}
    assert PROTOCOLS["sliding"](Perplexity(tokenizer), [512, 1024], 16).targets_at(512) == 256


REFUSED = {
    "stride=17 is not allowed with a shortest length of 16 tokens: it must be from 1 to 16": (
        "sliding",
        {"stride": 17},
    ),
    "stride=16 is not allowed .* it must be from 1 to 15": ("yarn_compat", {"stride": 16}),
    "stride=0 is not allowed; it must be a whole number of at least 1": ("sliding", {"stride": 0}),
    "stride=4: protocol 'disjoint' scores whole documents; omit stride": ("disjoint", {"stride": 4}),
    "stride=4: protocol 'last' scores the last tokens": ("last", {"stride": 4}),
    "targets=8: protocol 'sliding' scores whole documents": ("sliding", {"targets": 8, "stride": 4}),
    "windows_per_document=2: protocol 'disjoint' scores": ("disjoint", {"windows_per_document": 2}),
    "tokens_per_document=30: protocol 'auto' scores the last tokens": ("auto", {"tokens_per_document": 30}),
    "tokens_per_document=24 is not allowed: a context of 24 tokens needs documents of 25": (
        "disjoint",
        {"tokens_per_document": 24},
    ),
    "protocol 'slidding': did you mean 'sliding'": ("slidding", {}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_settings_that_mean_nothing_are_refused(message, model, tokenizer, monkeypatch):
    monkeypatch.setattr(shared, "chunked_nll", None)
    protocol, settings = REFUSED[message]
    with pytest.raises(EvaluationError, match=message):
        go(model, tokenizer, protocol, **settings)


def test_every_protocol_says_what_it_scores():
    for name, kind in PROTOCOLS.items():
        assert name == kind.protocol
        assert kind.scores
        assert kind.__doc__
        Perplexity(protocol=name, evaluator="a folder" if name == "longppl" else None).check([16])
