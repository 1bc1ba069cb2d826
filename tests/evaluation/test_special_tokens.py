"""Special tokens in front of texts are told from those behind them, wherever tokens are put together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers.processors import TemplateProcessing
from transformers import ByT5Tokenizer, CanineTokenizer

from rope_patch.data.special_tokens import ids_to_continue, tokens_around
from rope_patch.data.training_rows import training_rows
from rope_patch.data.windows import prefix_of
from rope_patch.evaluation.tasks.passkey import Passkey

from .conftest import byte_tokenizer, documents, measure, tiny_llama

END = 300

TEMPLATES = {
    "nothing": ("$A", [], []),
    "a start": ("<s> $A", [0], []),
    "an end with the id of the start": ("$A <s>", [], [0]),
    "a start and an end of one id": ("<s> $A <s>", [0], [0]),
    "an end": ("$A </s>", [], [END]),
    "a start and an end": ("<s> $A </s>", [0], [END]),
    "a start that is not bos_token": ("[CLS] $A", [301], []),
    "two in front": ("[gMASK] <sop> $A", [302, 303], []),
    "one in front, two behind": ("[CLS] $A [SEP] </s>", [301], [304, END]),
}


def tokenizer_with(template: str, eos: str = "</s>") -> Any:
    tokenizer = byte_tokenizer()
    named = {"</s>": END, "[CLS]": 301, "[gMASK]": 302, "<sop>": 303, "[SEP]": 304}
    tokenizer.add_tokens([f"<filler {i}>" for i in range(len(tokenizer), END)])
    tokenizer.add_special_tokens({"additional_special_tokens": list(named)})
    tokenizer.eos_token = eos
    ids = {**named, "<s>": 0}
    assert all(tokenizer.convert_tokens_to_ids(token) == number for token, number in ids.items())
    used = [(token, ids[token]) for token in template.split() if token != "$A"]
    if used:
        tokenizer._tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=list(set(used)))
    return tokenizer


def bytes_of(text: str) -> list[int]:
    return byte_tokenizer()(text)["input_ids"]


@pytest.fixture(params=TEMPLATES)
def case(request):
    template, front, behind = TEMPLATES[request.param]
    return tokenizer_with(template), front, behind


def test_each_template(case):
    tokenizer, front, behind = case
    assert tokenizer("ab")["input_ids"] == [*front, *bytes_of("ab"), *behind]
    assert tokens_around(tokenizer) == (front, behind)
    assert prefix_of(tokenizer).tolist() == front
    assert ids_to_continue(tokenizer, "ab") == [*front, *bytes_of("ab")]


@pytest.mark.parametrize(
    ("tokenizer", "front", "behind"),
    [(ByT5Tokenizer(), [], [1]), (CanineTokenizer(), [0xE000], [0xE001])],
    ids=lambda each: type(each).__name__,
)
def test_slow_tokenizers(tokenizer, front, behind):
    assert tokens_around(tokenizer) == (front, behind)
    assert prefix_of(tokenizer).tolist() == front


def test_no_tokenizer_puts_nothing_in_front():
    assert prefix_of(None).tolist() == []


def test_a_vocabulary_without_latin_letters():
    class Digits:
        bos_token_id = 7

        def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
            bare = [int(letter) for letter in text if letter.isdigit()]
            return {"input_ids": [9, 8, *bare, 7] if add_special_tokens else bare}

    assert tokens_around(Digits()) == ([9, 8], [7])


def test_perplexity_is_that_of_the_text_alone_whatever_end_the_tokenizer_appends():
    plain, ending = byte_tokenizer(), tokenizer_with("$A <s>", eos="<s>")
    settings = {"schemes": ["plain"], "lengths": [8, 16], "targets": 4}
    expected = measure(tiny_llama(), plain, documents(40, 50), **settings)
    found = measure(tiny_llama(), ending, documents(40, 50), **settings)
    assert [row.nll for row in found] == [row.nll for row in expected]


def test_a_training_row_has_one_end_and_what_stands_in_front(case):
    tokenizer, front, behind = case
    end = behind if END in behind else [*behind, END]
    one, other = [*front, *bytes_of("abcdef"), *end], [*front, *bytes_of("ghijkl"), *end]
    texts = Dataset.from_list([{"name": n, "text": text} for n, text in enumerate(["abcdef", "", "ghijkl"])])
    rows = training_rows(texts, tokenizer, 400, 2 * len(one), allow_short=True)
    assert rows[0]["input_ids"] in ([*one, *other], [*other, *one])
    rows = training_rows(texts, tokenizer, 400, len(one), pack=False)
    assert sorted(row["input_ids"] for row in rows) == [one, other]


def test_questions_end_where_the_answer_begins(case):
    tokenizer, front, _ = case
    (prompt,) = Passkey(tokenizer, (0.5,), 1).prompts(1200, 0.5)
    text = tokenizer.decode(prompt.tokens[len(front) :])
    assert prompt.tokens[: len(front)].tolist() == front
    assert prompt.tokens[len(front) :].tolist() == bytes_of(text)


def test_rows_and_windows_begin_alike(case):
    tokenizer, front, _ = case
    texts = Dataset.from_list([{"name": "one", "text": "abcdefgh"}])
    (row,) = training_rows(texts, tokenizer, 400, 8, pack=False, allow_short=True).select([0])["input_ids"]
    assert torch.equal(torch.tensor(row[: len(front)], dtype=torch.long), prefix_of(tokenizer))
