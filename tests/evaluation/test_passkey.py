"""The passkey: the words of the paper, their length in tokens, and what counts as an answer."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import nn

from rope_patch import patch
from rope_patch.errors import EvaluationError
from rope_patch.evaluation.tasks import passkey
from rope_patch.evaluation.tasks import task as tasks
from rope_patch.evaluation.tasks.passkey import Passkey

from .conftest import byte_tokenizer

OF_THE_PAPER = """\
There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you about \
the important information there.
The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. The grass is green. The sky \
is blue. The sun is yellow. Here we go. There and back again.
The pass key is 12345. Remember it. 12345 is the pass key.
The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. The grass is green. The sky \
is blue. The sun is yellow. Here we go. There and back again.
What is the pass key? The pass key is"""
LENGTH = len(OF_THE_PAPER) + passkey.NEW_TOKENS


@pytest.fixture
def task(tokenizer):
    return Passkey(tokenizer, depths=[0.5], trials=3)


def texts(task, tokenizer, length, depth):
    return [tokenizer.decode(prompt.tokens) for prompt in task.prompts(length, depth)]


def key_of(prompt):
    return "".join(map(str, prompt.answer.tolist()))


def digits_alone(model):
    """The model, saying nothing but digits: every other token is out of its reach."""
    digits = byte_tokenizer()("0123456789")["input_ids"]
    bias = torch.full((model.config.vocab_size,), -1e4)
    bias[digits] = 0.0
    model.lm_head.bias = nn.Parameter(bias)
    return model


def test_the_words_are_those_of_the_paper(task, tokenizer):
    for prompt in task.prompts(LENGTH, 0.5):
        expected = OF_THE_PAPER.replace("12345", key_of(prompt))
        assert tokenizer.decode(prompt.tokens) == expected
        assert prompt.distance == len(expected) - expected.index("pass key.") - len("pass key.")


def test_a_prompt_is_as_long_as_whole_sentences_allow(task, tokenizer):
    for length in (400, 413, 500, 1000):
        for depth in (0.0, 0.3, 1.0):
            for prompt, text in zip(task.prompts(length, depth), texts(task, tokenizer, length, depth), strict=True):
                spare = length - len(prompt.tokens) - passkey.NEW_TOKENS
                assert 0 <= spare <= len(" There and back again.")
                assert text.endswith("What is the pass key? The pass key is")


def test_depth_is_the_place_of_the_key(task, tokenizer):
    for first, last in zip(texts(task, tokenizer, 600, 0.0), texts(task, tokenizer, 600, 1.0), strict=True):
        assert "there.\nThe pass key is" in first
        assert "is the pass key.\nThe grass is green." in first
        assert "there.\nThe grass is green." in last
        assert "is the pass key.\nWhat is the pass key?" in last
    distances = [task.prompts(600, depth)[0].distance for depth in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert distances == sorted(distances, reverse=True)


def test_keys_are_a_function_of_seed_length_depth_and_trial(tokenizer):
    def keys(seed, length, depth):
        return [key_of(prompt) for prompt in Passkey(tokenizer, [0.5], 4, seed=seed).prompts(length, depth)]

    assert keys(0, 500, 0.5) == keys(0, 500, 0.5)
    drawn = [key for where in ((0, 500, 0.5), (1, 500, 0.5), (0, 600, 0.5), (0, 500, 0.25)) for key in keys(*where)]
    assert len(set(drawn)) == len(drawn)
    assert all(len(key) == 5 and key[0] != "0" for key in drawn)


def test_a_tokenizer_with_a_start_has_it_once_and_one_with_an_end_has_none(tokenizer):
    assert Passkey(tokenizer, depths=[0.5], trials=1).prompts(500, 0.5)[0].tokens[0] != 0
    start = Passkey(byte_tokenizer(bos=True), depths=[0.5], trials=1).prompts(500, 0.5)[0].tokens
    assert start.tolist().count(0) == 1
    assert start[0] == 0
    closing = byte_tokenizer()
    closing.eos_token = "<s>"
    closing.backend_tokenizer.post_processor = TemplateProcessing(single="$A <s>", special_tokens=[("<s>", 0)])
    assert closing("a")["input_ids"][-1] == 0
    assert 0 not in Passkey(closing, depths=[0.5], trials=1).prompts(500, 0.5)[0].tokens


def test_a_length_without_room_for_the_question_is_refused(task):
    with pytest.raises(
        EvaluationError, match=r"length 100: the question of task 'passkey' and its answer need 2\d\d tok"
    ):
        task.prompts(100, 0.5)


class Speaker:
    """Answers every prompt with the same text."""

    device = torch.device("cpu")

    def __init__(self, said, tokenizer):
        self.said = torch.tensor([tokenizer(said)["input_ids"]])
        self.generation_config = type("Config", (), {"eos_token_id": 0})

    def generate(self, tokens, **_):
        return torch.cat([tokens, self.said.expand(len(tokens), -1)], dim=1)


@pytest.mark.parametrize(
    ("said", "right"),
    [
        (" {key}", True),
        ("{key}. ", True),
        ("\n{key}", True),
        (" {key}6", False),
        (" 1{key}", False),
        (" 0 {key}", False),
        (" the key", False),
        ("", False),
    ],
)
def test_an_answer_is_the_five_digits_and_no_others(said, right, tokenizer, monkeypatch):
    task = Passkey(tokenizer, depths=[0.5], trials=1)
    prompts = task.prompts(500, 0.5)
    monkeypatch.setattr(tasks, "find_language_model", lambda model: model)
    answers, losses = task.score(Speaker(said.format(key=key_of(prompts[0])), tokenizer), prompts)
    assert (answers.tolist(), losses) == ([[right]], None)


def greedy_digits(model, tokenizer, tokens):
    """The model's continuation, when it reads everything anew for every token."""
    read = tokens
    for _ in range(passkey.NEW_TOKENS):
        with torch.no_grad():
            following = model(read[None], use_cache=False).logits[0, -1].argmax()
        read = torch.cat([read, following[None]])
    return torch.tensor([int(digit) for digit in tokenizer.decode(read[len(tokens) :])])


@pytest.mark.parametrize("scheme", ["rope", "rerope:window=8+logn", "yarn:factor=4"])
@pytest.mark.parametrize("together", [1, 3])
def test_the_answer_is_that_of_greedy_decoding_without_a_cache(scheme, together, model, tokenizer):
    digits_alone(model)
    task = Passkey(tokenizer, depths=[0.5], trials=3)
    asked = task.prompts(400, 0.5)[:together]
    with patch(model, scheme):
        spoken = [
            dataclasses.replace(prompt, answer=greedy_digits(model, tokenizer, prompt.tokens)) for prompt in asked
        ]
        assert task.score(model, spoken)[0].tolist() == [[True]] * together
        wrong = dataclasses.replace(spoken[0], answer=(spoken[0].answer + 1) % 10)
        assert task.score(model, [wrong, *spoken[1:]])[0].tolist() == [[False], *[[True]] * (together - 1)]


def test_decoding_is_greedy_whatever_the_checkpoint_says_about_sampling(model, tokenizer):
    digits_alone(model)
    task = Passkey(tokenizer, depths=[0.5], trials=1)
    (prompt,) = task.prompts(400, 0.5)
    greedy = [dataclasses.replace(prompt, answer=greedy_digits(model, tokenizer, prompt.tokens))]
    assert task.score(model, greedy)[0].item()
    model.generation_config.update(do_sample=True, temperature=5.0, top_p=0.9, repetition_penalty=3.0, max_length=9)
    model.generation_config.update(eos_token_id=[0, 1], pad_token_id=None)
    assert task.score(model, greedy)[0].item()


def test_an_answer_has_room_for_a_space_the_key_and_a_digit_too_many(tokenizer):
    assert len(tokenizer(" 123456")["input_ids"]) == passkey.NEW_TOKENS  # a token per byte: none needs more
