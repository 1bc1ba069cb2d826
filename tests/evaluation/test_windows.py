from __future__ import annotations

from itertools import pairwise

import pytest

from rope_patch.data.windows import prefix_of, select_windows
from rope_patch.errors import EvaluationError

from .conftest import byte_tokenizer, documents


def select(corpus, tokenizer, **settings):
    return select_windows(corpus, tokenizer, **{"longest": 40, "targets": 8, **settings})


def test_every_length_ends_at_the_last_token_of_the_document(tokenizer):
    corpus = documents(60, 90)
    for window, document in zip(select(corpus, tokenizer).windows, corpus, strict=True):
        ids = tokenizer(document["text"])["input_ids"]
        for length in (8, 17, 40):
            assert window.context(length).tolist() == ids[-(length + 1) :]


def test_a_start_token_of_the_tokenizer_stands_in_front_of_every_context():
    tokenizer = byte_tokenizer(bos=True)
    corpus = documents(40)
    (window,) = select(corpus, tokenizer).windows
    ids = tokenizer(corpus[0]["text"], add_special_tokens=False)["input_ids"]
    assert window.context(40).tolist() == [0, *ids]
    assert window.context(9).tolist() == [0, *ids[-9:]]


def test_the_prefix_is_what_the_tokenizer_sets_in_front_of_texts_and_not_any_start_token_that_it_knows(tokenizer):
    assert tokenizer.bos_token_id == 0
    assert prefix_of(tokenizer).tolist() == []
    assert prefix_of(byte_tokenizer(bos=True)).tolist() == [0]


def test_short_documents_are_counted(tokenizer):
    selection = select(documents(60, 40, 41, 3), tokenizer)
    assert (selection.documents, selection.short_documents) == (2, 2)
    assert [window.document for window in selection.windows] == ["d0", "d2"]


def test_all_too_short_says_the_lengths(tokenizer):
    with pytest.raises(EvaluationError, match="40 tokens needs documents of 41 tokens; the longest of 2 has 30"):
        select(documents(30, 20), tokenizer)


@pytest.mark.parametrize(("size", "wanted", "count"), [(41, 3, 1), (49, 3, 2), (100, 3, 3), (100, 50, 8)])
def test_windows_of_one_document_do_not_share_targets(tokenizer, size, wanted, count):
    (document,) = documents(size)
    ids = tokenizer(document["text"])["input_ids"]
    windows = select([document], tokenizer, windows_per_document=wanted).windows
    assert len(windows) == count
    joined = "".join(map(chr, ids))
    ends = [joined.index("".join(map(chr, window.tokens.tolist()))) + 41 for window in windows]
    assert ends[0] == size
    assert all(left - right >= 8 for left, right in pairwise(ends))


def test_the_draw_follows_the_seed_and_the_fingerprint_follows_the_targets(tokenizer):
    corpus = documents(*[60] * 8)
    drawn = select(corpus, tokenizer, documents=3, seed=5)
    names = [window.document for window in drawn.windows]
    assert names == sorted(names)
    assert drawn.fingerprint == select(corpus, tokenizer, documents=3, seed=5).fingerprint
    assert drawn.fingerprint == select(corpus, tokenizer, documents=3, seed=5, longest=20).fingerprint
    others = {select(corpus, tokenizer, documents=3, seed=seed).fingerprint for seed in range(5)}
    assert len(others) > 1
    assert drawn.fingerprint != select(corpus, byte_tokenizer(bos=True), documents=3, seed=5).fingerprint


@pytest.mark.parametrize(
    ("sizes", "counts"),
    [
        ([2000], [16]),  # a book
        ([2000] * 3, [6, 6, 6]),
        ([2000] * 16, [1] * 16),
        ([2000] * 20, [1] * 20),
        ([41, 44, 2000], [1, 1, 14]),  # the one that has room makes up for the others
        ([41, 60], [1, 3]),  # all that there is room for
    ],
)
def test_of_few_documents_more_windows_are_taken_until_there_are_16(tokenizer, sizes, counts):
    windows = select(documents(*sizes), tokenizer, windows_per_document=None).windows
    assert [sum(window.document == f"d{i}" for window in windows) for i in range(len(sizes))] == counts


def test_windows_of_one_book_share_no_target_although_their_contexts_overlap(tokenizer):
    (document,) = documents(200)
    text = document["text"]
    found = [window.tokens for window in select([document], tokenizer, windows_per_document=None).windows]
    spelled = ["".join(tokenizer.convert_ids_to_tokens(tokens.tolist())) for tokens in found]
    ends = [text.index(each) + 41 for each in spelled]
    assert len(ends) == 16
    assert ends[0] == 200
    assert all(8 <= right - left < 41 for right, left in pairwise(ends))
    assert ends[-1] == 41
