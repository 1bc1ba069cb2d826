"""Repeated spans: where they stand, who can see them, and how they are scored."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import LlamaForCausalLM

from rope_patch import patch
from rope_patch.errors import EvaluationError
from rope_patch.evaluation.tasks.repeated_spans import RepeatedSpans

from .conftest import TRAINING_LENGTH, byte_tokenizer, documents

CORPUS = documents(90, 110, 20)
SPAN = 8


def make(tokenizer=None, **settings):
    given = {"longest": 64, "span": SPAN, "depths": [0.5], "trials": 4, **settings}
    return RepeatedSpans(tokenizer or byte_tokenizer(), CORPUS, **given)


def text(tokens):
    return byte_tokenizer().decode(tokens)


@pytest.mark.parametrize("length", [24, 48, 64])
@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_a_span_of_another_document_stands_at_its_depth_and_begins_again_at_the_end(length, depth):
    for prompt in make().prompts(length, depth):
        read, rest = text(prompt.tokens), text(prompt.answer)
        assert len(read) == length
        span = read[-(SPAN - 1) :] + rest[-1]
        assert span[2:] == rest
        filler = length - 2 * SPAN + 1
        place = round(depth * filler)
        assert read[place : place + SPAN] == span
        outside = read[:place] + read[place + SPAN : -(SPAN - 1)]
        (home,) = [row["text"] for row in CORPUS if span in row["text"]]
        (around,) = [row["text"] for row in CORPUS if outside in row["text"]]
        assert home != around
        assert prompt.distance == filler - place + 2


def test_the_control_asks_for_the_same_with_nothing_hidden():
    task = make()
    for asked, control in zip(task.prompts(64, 0.5), task.prompts(64, None), strict=True):
        assert torch.equal(asked.answer, control.answer)
        assert len(asked.tokens) == len(control.tokens) == 64
        assert torch.equal(asked.tokens[-16:], control.tokens[-16:])
        assert text(asked.answer) in text(asked.tokens)
        assert text(asked.answer) not in text(control.tokens)
        assert control.distance is None


def test_only_the_place_of_the_first_copy_moves():
    task = make()
    for trial in range(4):
        asked = [task.prompts(length, depth)[trial] for length in (32, 64) for depth in (0.0, 0.5)]
        assert len({text(prompt.answer) for prompt in asked}) == 1
        assert len({text(prompt.tokens[-12:]) for prompt in asked}) == 1


def test_the_draw_is_a_function_of_the_seed():
    def drawn(seed):
        return [text(prompt.answer) for prompt in make(seed=seed).prompts(64, 0.5)]

    assert drawn(0) == drawn(0) != drawn(1)


def test_the_start_of_a_text_stays_in_front():
    task = make(byte_tokenizer(bos=True))
    for depth in (None, 0.0, 1.0):
        for prompt in task.prompts(40, depth):
            assert prompt.tokens.tolist().count(0) == 1
            assert prompt.tokens[0] == 0
            assert len(prompt.tokens) == 40


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["rope", "rerope:window=8", "window"])
def test_answers_are_those_of_all_logits_in_float64(scheme, model):
    task = make()
    prompts = task.prompts(48, 0.25)
    with patch(model, scheme):
        # likely answers to one prompt, so that the share of right tokens is neither 0 nor 1
        likely = model(prompts[0].tokens[None]).logits[0, -6:].argmax(-1)
        prompts[0] = dataclasses.replace(prompts[0], answer=likely)
        mixed = torch.cat([model(prompts[1].tokens[None]).logits[0, -6:-2].argmax(-1), prompts[1].answer[-2:] * 0])
        prompts[1] = dataclasses.replace(prompts[1], answer=mixed)
        found, nll = task.score(model, prompts)
        right, losses = [], []
        for prompt in prompts:
            logits = model(prompt.tokens[None]).logits[0].double()
            scored = range(len(prompt.tokens) - 6, len(prompt.tokens))
            right.append([bool(logits[i].argmax() == token) for i, token in zip(scored, prompt.answer, strict=True)])
            losses.append([-logits[i].log_softmax(-1)[t] for i, t in zip(scored, prompt.answer, strict=True)])
    assert found.tolist() == right
    assert 10 <= found.sum() < 24
    assert right[0] == [True] * 6
    torch.testing.assert_close(nll, torch.tensor(losses).double(), atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize(("distance", "seen"), [(TRAINING_LENGTH - 1, True), (TRAINING_LENGTH, False)])
def test_from_a_distance_of_l_on_attention_cut_at_l_sees_nothing(distance, seen, model):
    config = model.config
    config.num_hidden_layers = 1  # more layers pass on what they saw
    torch.manual_seed(0)
    shallow = LlamaForCausalLM(config).eval()
    task = make()
    filler = 64 - 2 * SPAN + 1
    (prompt, *_) = task.prompts(64, (filler + 2 - distance) / filler)
    assert prompt.distance == distance
    end = 64 - (SPAN - 1) + 2 - distance
    other = prompt.tokens.clone()
    other[end - SPAN : end] = 1
    with patch(shallow, "window"):
        before, after = (shallow(tokens[None]).logits[0, -6:] for tokens in (prompt.tokens, other))
    assert torch.equal(before, after) is not seen


def test_what_the_texts_do_not_have_room_for_is_refused():
    with pytest.raises(EvaluationError, match="length 15: a span of 8 tokens twice needs a length of at least 16"):
        make().prompts(15, 0.5)
    with pytest.raises(EvaluationError, match="span=3 is not allowed"):
        make(span=3)
    with pytest.raises(
        EvaluationError, match="only 'd1' is long enough, but a span needs two texts; use more texts or shorter lengths"
    ):
        make(longest=100)
    with pytest.raises(EvaluationError, match="the longest of 3 has 110"):
        make(longest=200)
    with pytest.raises(EvaluationError, match="trials=500: the texts have places for"):
        make(trials=500)
