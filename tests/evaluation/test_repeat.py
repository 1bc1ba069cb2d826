"""`repeat`: contexts and controls against a literal reading of the definition."""

from __future__ import annotations

import math

import pytest
import torch

from rope_patch import patch
from rope_patch.errors import EvaluationError
from rope_patch.evaluation.protocols import protocol as shared
from rope_patch.evaluation.row import Rows
from rope_patch.evaluation.tables import Grid
from tests.evaluation.conftest import byte_tokenizer, documents, measure, tiny_llama
from tests.evaluation.rows import row

TRAINED, LENGTHS, TARGETS, PASSAGE = 128, (112, 128, 256, 300), 8, 40
CORPUS = documents(310, 330, 20)


@pytest.fixture
def model():
    model = tiny_llama()
    model.config.max_position_embeddings = TRAINED
    return model


def go(model, tokenizer, schemes=("near", "cut", "plain", "rerope:window=32"), lengths=LENGTHS, **settings):
    settings = {"targets": TARGETS, "windows_per_document": 1, **settings}
    return measure(model, tokenizer, CORPUS, list(schemes), lengths, protocol="repeat", **settings)


@torch.no_grad()
def loss(model, contexts, scheme="rope"):
    losses = []
    with patch(model, scheme):
        for context in contexts:
            logits = model(torch.tensor([context[:-1]])).logits[0, -TARGETS:].double()
            losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(context[-TARGETS:])))
    return torch.stack(losses).mean().item()


def repeated(tokenizer, start, length):
    """Start token, 32 tokens, the passage, what fits of the text behind it, and the passage again."""
    contexts = []
    for document in CORPUS[:2]:
        text = tokenizer(document["text"], add_special_tokens=False)["input_ids"]
        window = text[len(text) - (LENGTHS[-1] + 1 - len(start) - PASSAGE) :]
        front, behind, passage = window[: 32 + PASSAGE], window[32 + PASSAGE :], window[32 : 32 + PASSAGE]
        left = length + 1 - len(start) - len(front) - PASSAGE
        contexts.append([*start, *front, *behind[len(behind) - left :], *passage])
        assert len(contexts[-1]) == length + 1
    return contexts


@pytest.mark.parametrize("bos", [False, True])
def test_a_row_is_the_loss_of_the_copy_from_its_33rd_token(model, bos):
    tokenizer, start = byte_tokenizer(bos), [0] if bos else []
    rows = {(row.line, row.length): row for row in go(model, tokenizer)}
    assert len(rows) == 4 * len(LENGTHS)
    for length in LENGTHS:
        contexts = repeated(tokenizer, start, length)
        for line, scheme in (("plain", "rope"), ("rerope:window=32", "rerope:window=32")):
            assert rows[line, length].nll == pytest.approx(loss(model, contexts, scheme), abs=1e-5)
        near = loss(model, repeated(tokenizer, start, TRAINED))
        longest = repeated(tokenizer, start, LENGTHS[-1])
        cut = loss(model, [[*start, *context[len(context) - (TRAINED + 1 - len(start)) :]] for context in longest])
        assert rows["near", length].nll == pytest.approx(near, abs=1e-5)
        assert rows["cut", length].nll == pytest.approx(cut, abs=1e-5)
        assert rows["cut", length].scheme == {"name": "plain", "cut": TRAINED}
        assert rows["plain", length].scored_tokens == 2 * TARGETS
        assert len(rows["plain", length].nll_by_document) == 2
    assert near != pytest.approx(cut, abs=1e-3)  # the test can tell the controls apart


def test_controls_are_measured_once_and_a_run_resumes(model, tokenizer, monkeypatch, tmp_path):
    lengths, chunked_nll = [], shared.chunked_nll

    def counting(model, input_ids, targets):
        lengths.append(input_ids.shape[1])
        return chunked_nll(model, input_ids, targets)

    monkeypatch.setattr(shared, "chunked_nll", counting)
    rows = Rows(tmp_path / "rows.jsonl")
    first = go(model, tokenizer, ["near", "cut", "pi:target=auto"], (128, 256), results=rows)
    assert lengths == [128] * 6 + [256] * 2  # of two windows: near, cut, the scheme
    again = go(model, tokenizer, ["near", "cut", "pi:target=auto"], (128, 256), results=Rows(rows.path))
    assert again == first
    assert len(lengths) == 8
    plain = go(model, tokenizer, ["plain", "near"], (128, 256), results=Rows(tmp_path / "other.jsonl"))
    assert len(lengths) == 12  # near is plain at L
    assert [row.nll for row in plain] == [plain[0].nll, plain[1].nll, plain[0].nll, plain[0].nll]


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ((100,), r"length 100: a passage of 40 .* of 111 within"),
        ((128, 199), "length 199: .* of 200 beyond the training"),
    ],
)
def test_a_length_without_room_for_the_passage_is_refused(model, tokenizer, lengths, said):
    with pytest.raises(EvaluationError, match=said):
        go(model, tokenizer, ["plain"], lengths)


def test_a_table_says_whether_the_checkpoint_can_copy():
    def notes(near):
        told = {"protocol": "repeat", "length": 512}
        shown = [
            row(line=line, nll=nll, nll_by_document=[nll - 0.1, nll, nll + 0.1], **told)
            for line, nll in (("near", near), ("cut", 3.0), ("yarn", 2.5))
        ]
        return " ".join(Grid.from_rows(shown).notes())

    assert "means nothing" not in notes(2.0)
    assert "this means nothing" in notes(2.95)
    assert "-0.050" in notes(2.95)
    assert "this means nothing" in notes(3.5)
    assert "this means nothing" in notes(math.nan)
