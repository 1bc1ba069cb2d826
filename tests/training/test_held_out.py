"""What is measured on is never trained on, and is long enough."""

from __future__ import annotations

import numpy as np
import pytest
from datasets import Dataset

from rope_patch.data.held_out import DOCUMENTS, halves, hold_out
from rope_patch.errors import EvaluationError
from tests.evaluation.conftest import byte_tokenizer, documents

TOKENIZER = byte_tokenizer()  # a token for each letter


def texts_of(rows):
    return [row["text"] for row in rows]


def test_whole_documents_of_a_tenth_are_held_out():
    corpus = documents(*[100] * 40, 30, 250)
    trained_on, held, name = hold_out(Dataset.from_list(corpus), TOKENIZER, 64, name="books")
    assert name == "4 of 42 documents of books, held out"
    assert len(held) == 4
    assert {len(text) for text in texts_of(held)} == {100}  # neither the one that is too short nor the longest
    assert sorted(texts_of(trained_on) + texts_of(held)) == sorted(texts_of(corpus))
    again = hold_out(Dataset.from_list(corpus), TOKENIZER, 64)
    assert (texts_of(again[0]), texts_of(again[1])) == (texts_of(trained_on), texts_of(held))
    assert texts_of(hold_out(Dataset.from_list(corpus), TOKENIZER, 64, seed=1)[1]) != texts_of(held)
    assert len(hold_out(Dataset.from_list(corpus), TOKENIZER, 64, share=0.25)[1]) == 10


def test_the_longest_document_is_never_held_out_whole():
    corpus = Dataset.from_list(documents(*[100] * 10, 110))
    for seed in range(10):
        assert {len(text) for text in texts_of(hold_out(corpus, TOKENIZER, 64, share=0.5, seed=seed)[1])} == {100}


def test_many_documents_are_not_all_measured():
    corpus = Dataset.from_list(documents(*[20] * 1000))
    trained_on, held, _ = hold_out(corpus, TOKENIZER, 16)
    assert (len(trained_on), len(held)) == (1000 - DOCUMENTS, DOCUMENTS)


@pytest.mark.parametrize(
    ("sizes", "longest", "end"),
    [
        ([1000], 64, 100),  # a tenth
        ([400, 1000, 500], 64, 190),  # of all, and none of the documents has room in it
        ([1000], 300, 301),  # as much as the longest context needs, and its target
        ([20] * 50 + [120], 64, 65),  # all others are too short
    ],
)
def test_the_end_of_a_document_is_held_out(sizes, longest, end):
    corpus = documents(*sizes)
    whole = max(texts_of(corpus), key=len)
    trained_on, (held,), name = hold_out(Dataset.from_list(corpus), TOKENIZER, longest, name="book.txt")
    assert end <= len(held["text"]) <= 1.06 * end
    kept = texts_of(trained_on)
    assert kept.pop() + held["text"] == whole
    assert sorted([*kept, whole]) == sorted(texts_of(corpus))
    assert name == f"the last {len(held['text']) / len(whole):.0%} of {held['name']}, held out"


@pytest.mark.parametrize("size", [20, 64, 65])
def test_a_text_that_is_too_short_is_refused_with_its_numbers(size):
    with pytest.raises(
        EvaluationError,
        match=f"book.txt is too short: measuring at 64 tokens needs 65 held-out tokens, but the longest of 2 "
        f"documents has {size}; use a longer text, shorter lengths, or an eval_text",
    ):
        hold_out(Dataset.from_list(documents(size, 10)), TOKENIZER, 64, name="book.txt")


@pytest.mark.parametrize("number", [30, DOCUMENTS, 150])
def test_the_first_documents_of_a_stream_are_held_out(number):
    corpus = documents(*[40] * number)
    trained_on, held, name = hold_out(Dataset.from_list(corpus).to_iterable_dataset(), TOKENIZER, 16, name="web")
    if number > DOCUMENTS:
        assert texts_of(held) == texts_of(corpus[:DOCUMENTS])
        assert texts_of(trained_on) == texts_of(corpus[DOCUMENTS:])
        assert name == f"the first {DOCUMENTS} documents of web, held out"
    else:
        assert len(held) == number // 10
        assert sorted(texts_of(trained_on) + texts_of(held)) == sorted(texts_of(corpus))


# --- halves -----------------------------------------------------------------------------------------------------------


def tokens_of(half):
    return [token for row in half for token in row["input_ids"]]


@pytest.mark.parametrize("sizes", [[100], [100, 60], [20, 21, 22, 5], [50] * 9, [20] * 30])
def test_halves_share_no_token_and_lose_none(sizes):
    ends = np.cumsum(sizes).tolist()
    corpus = [{"name": f"d{end}", "input_ids": list(range(end - n, end))} for n, end in zip(sizes, ends, strict=True)]
    first, second = halves(corpus, None, 20)
    assert sorted(tokens_of(first) + tokens_of(second)) == list(range(ends[-1]))
    assert all(len(row["input_ids"]) >= 20 for row in second)
    assert sum(len(row["input_ids"]) >= 20 for row in first) in (len(second), len(second) + 1)
    if len(sizes) >= 8:  # documents stay whole: what is of one text is in one half
        assert {row["name"] for row in first}.isdisjoint(row["name"] for row in second)


def test_halves_read_no_more_documents_than_are_wanted():
    corpus = [{"name": f"d{i}", "input_ids": [i] * 20} for i in range(100)]
    first, second = halves(corpus, None, 20, documents=5, seed=1)
    assert (len(first), len(second)) == (5, 5)
    assert halves(corpus, None, 20, documents=5, seed=1) == (first, second)
    assert halves(corpus, None, 20, documents=5, seed=2) != (first, second)


def test_a_text_with_room_for_one_half_is_refused_by_its_size():
    with pytest.raises(EvaluationError, match="each needs 20 tokens; the only document long enough has 39"):
        halves([{"name": "a", "input_ids": [1] * 39}, {"name": "b", "input_ids": [1] * 19}], None, 20)


def test_a_document_of_exactly_two_halves_is_cut_and_a_shorter_one_is_not():
    first, second = halves([{"name": "one", "input_ids": list(range(20))}], None, 10)
    assert [row["input_ids"] for row in first + second] == [list(range(10)), list(range(10, 20))]
    with pytest.raises(EvaluationError, match="the text is too short"):
        halves([{"name": "one", "input_ids": list(range(19))}], None, 10)
